"""The stages after a training, while another flow extends it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flows import export
from megacore.artifact.files import write_json
from megacore.checkpoint.format import complete_checkpoints
from megacore.checkpoint.retain import apply_retention
from megacore.checkpoint.save import save_checkpoint
from megacore.config import load_config
from tasks.convert import convert
from tasks.evaluate import REPORT


class _ConvertedError(Exception):
    """End of the stages at the conversion."""


@pytest.mark.parametrize("last", ["stage", "checkpoint_stage"])
def test_no_checkpoint_is_deleted_before_it_is_converted(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = tmp_path / "checkpoints"
    for iteration in (10, 20, 30):
        save_checkpoint(checkpoints, iteration, {"model.a": torch.ones(3)}, {})
    rows = [{"checkpoint": path.name} for path in complete_checkpoints(checkpoints)]
    write_json(tmp_path / REPORT, {"checkpoints": rows})
    artifact: Any = SimpleNamespace(directory=tmp_path, counts={"checkpoint": "iter_0000030"})

    def extend_the_run(*stage: object) -> tuple[object, object]:
        apply_retention(checkpoints, keep_last=1, keep_best=False)
        return artifact, ()

    def convert_one(name: str, task: object) -> object:
        assert task is convert
        extend_the_run()
        assert len(complete_checkpoints(checkpoints)) == 3
        if name == last:
            raise _ConvertedError
        return artifact

    monkeypatch.setattr(export, "score_stages", extend_the_run)
    tasks = {"lm_eval": {"tasks": ["arc_easy"], "checkpoints": "all"}}
    pipeline: Any = SimpleNamespace(
        config=load_config("gpt2-tiny", {"evaluate": tasks}),
        contamination=None,
        stage=lambda task, *inputs: convert_one("stage", task),
        checkpoint_stage=lambda task, *inputs: convert_one("checkpoint_stage", task),
    )
    with pytest.raises(_ConvertedError):
        export.publication_stages(pipeline, artifact, data=None)  # type: ignore[arg-type]
    apply_retention(checkpoints, keep_last=1, keep_best=False)
    assert len(complete_checkpoints(checkpoints)) == 1
