"""Checkpoints saved in the background: waiting for the previous one, and failures."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from megacore.checkpoint import save
from megacore.checkpoint.save import CheckpointWriter
from megacore.errors import WorkspaceError
from megacore.observe.recorder import Recorder
from tests._dist import run_distributed
from tests.train import _runs


def test_stall_includes_the_wait_for_the_previous_save(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = save.write_checkpoint

    def write_slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(1.0)
        return write(*arguments, **options)

    monkeypatch.setattr(save, "write_checkpoint", write_slowly)
    train = _runs.config().train.model_dump() | {"train_iters": 2, "eval_interval": 100}
    _runs.train(_runs.config(train=train, checkpoint={"save_interval": 1}), data, tmp_path)
    first, second = (
        event["stall_seconds"] for event in _runs.events(tmp_path, "checkpoint_started")
    )
    assert first < 0.5 < second
    assert [event["iteration"] for event in _runs.events(tmp_path, "checkpoint")] == [1, 2]


def full_on_one_rank(data: Path, root: Path) -> tuple[str, int]:
    """Fill rank 1's disk from the second save on; return the rank's error and iteration."""
    write, saves = CheckpointWriter.write_data, iter(range(1, 100))

    def limited(*arguments: Any) -> Any:
        if next(saves) > 1 and os.environ["RANK"] == "1":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    CheckpointWriter.write_data = limited  # type: ignore[method-assign]
    train = _runs.config().train.model_dump() | {"train_iters": 40, "eval_interval": 100}
    config = _runs.config(train=train, checkpoint={"save_interval": 15})
    mesh = _runs.mesh(config)
    with Recorder(root, attempt=1, rank=mesh.rank, tensorboard=False) as recorder:
        trainer = _runs.trainer(config, data, root, mesh, recorder)
        with pytest.raises(WorkspaceError) as caught:
            trainer.run()
    return str(caught.value), trainer.state.iteration


def test_failed_save_on_one_rank_ends_all_ranks_after_the_same_iteration(
    data: Path, tmp_path: Path
) -> None:
    (first, one), (second, other) = run_distributed(2, full_on_one_rank, data, tmp_path)
    assert "No space left on device" in first
    assert first == second
    assert one == other >= 30
    assert [event["iteration"] for event in _runs.events(tmp_path, "checkpoint")] == [15]
    assert [path.name for path in (tmp_path / "checkpoints").glob("iter_*")] == ["iter_0000015"]
