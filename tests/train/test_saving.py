"""Checkpoints saved in the background: waiting for the previous one, and failures."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from megacore.checkpoint import save
from megacore.checkpoint.save import CheckpointWriter
from megacore.errors import FileAccessError, WorkspaceError
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


def failing_on_one_rank(data: Path, root: Path) -> list[tuple[str, str, int]]:
    """Train with a full disk and with one that fails."""
    return [fail_on_one_rank(data, root / str(code), code) for code in (errno.ENOSPC, errno.EIO)]


def fail_on_one_rank(data: Path, root: Path, code: int) -> tuple[str, str, int]:
    """Let rank 1's disk fail from the second save on.

    Returns the class and the message of the rank's error, and the iteration.
    """
    write, saves = CheckpointWriter.write_data, iter(range(1, 100))

    def limited(*arguments: Any) -> Any:
        if next(saves) > 1 and os.environ["RANK"] == "1":
            raise OSError(code, os.strerror(code))
        return write(*arguments)

    CheckpointWriter.write_data = limited  # type: ignore[method-assign]
    train = _runs.config().train.model_dump() | {"train_iters": 40, "eval_interval": 100}
    config = _runs.config(train=train, checkpoint={"save_interval": 15})
    mesh = _runs.mesh(config)
    with Recorder(root, attempt=1, rank=mesh.rank, tensorboard=False) as recorder:
        trainer = _runs.trainer(config, data, root, mesh, recorder)
        with pytest.raises((WorkspaceError, FileAccessError)) as caught:
            trainer.run()
    CheckpointWriter.write_data = write  # type: ignore[method-assign]
    return type(caught.value).__name__, str(caught.value), trainer.state.iteration


def test_failed_save_on_one_rank_ends_all_ranks_after_the_same_iteration(
    data: Path, tmp_path: Path
) -> None:
    results = run_distributed(2, failing_on_one_rank, data, tmp_path)
    for code, name, first, second in zip(
        (errno.ENOSPC, errno.EIO), ("WorkspaceError", "TransientFileError"), *results, strict=True
    ):
        assert first == second
        assert first[0] == name
        assert os.strerror(code) in first[1]
        assert first[2] >= 30
        directory = tmp_path / str(code)
        assert [event["iteration"] for event in _runs.events(directory, "checkpoint")] == [15]
        saved = (directory / "checkpoints").glob("iter_*")
        assert [path.name for path in saved] == ["iter_0000015"]
