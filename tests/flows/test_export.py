"""The stages after a training, while another flow extends it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flows import export
from megacore.checkpoint.format import complete_checkpoints
from megacore.checkpoint.retain import apply_retention
from megacore.checkpoint.save import save_checkpoint
from tasks.convert import convert


class _ConvertedError(Exception):
    """End of the stages at the conversion."""


def test_no_checkpoint_is_deleted_before_the_best_one_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = tmp_path / "checkpoints"
    for iteration in (10, 20, 30):
        save_checkpoint(checkpoints, iteration, {"model.a": torch.ones(3)}, {})

    def extend_the_run(*stage: object) -> tuple[object, object]:
        apply_retention(checkpoints, keep_last=1, keep_best=False)
        return object(), object()

    def stage(task: object, *inputs: object) -> object:
        assert task is convert
        extend_the_run()
        assert len(complete_checkpoints(checkpoints)) == 3
        raise _ConvertedError

    monkeypatch.setattr(export, "score_stages", extend_the_run)
    pipeline: Any = SimpleNamespace(stage=stage)
    trained: Any = SimpleNamespace(directory=tmp_path)
    with pytest.raises(_ConvertedError):
        export.publication_stages(pipeline, trained, data=None)  # type: ignore[arg-type]
    apply_retention(checkpoints, keep_last=1, keep_best=False)
    assert len(complete_checkpoints(checkpoints)) == 1
