"""Checkpoints saved in the background: waiting for the previous one, and failures."""

import errno
import itertools
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacore.checkpoint import background, save
from megacore.checkpoint.background import CheckpointSaver
from megacore.checkpoint.save import CheckpointWriter
from megacore.engine.native import NativeEngine
from megacore.errors import FileAccessError, WorkspaceError
from megacore.observe.recorder import Recorder
from tests._dist import run_distributed
from tests._limits import HANG
from tests.checkpoint._examples import assert_equal
from tests.checkpoint._read import read_tensors
from tests.train import _runs


def test_stall_includes_the_wait_for_the_previous_save(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, land, waits, now = save.write_checkpoint, CheckpointSaver._land, threading.Event(), 0.0

    def note_wait(saver: CheckpointSaver) -> None:
        if saver._flight is not None:
            waits.set()
        land(saver)

    def write_slowly(*arguments: Any, **options: Any) -> Any:
        nonlocal now
        assert waits.wait(HANG)  # by the second save
        now += 10.0
        return write(*arguments, **options)

    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(CheckpointSaver, "_land", note_wait)
    monkeypatch.setattr(save, "write_checkpoint", write_slowly)
    train = _runs.config().train.model_dump() | {"train_iters": 2, "eval_interval": 100}
    _runs.train(_runs.config(train=train, checkpoint={"save_interval": 1}), data, tmp_path)
    first, second = (event["stall_seconds"] for event in _runs.events(tmp_path, "checkpoint"))
    assert (first, second) == (0.0, 10.0)
    assert [event["iteration"] for event in _runs.events(tmp_path, "checkpoint_started")] == [1, 2]


def test_an_update_during_the_copy_changes_no_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy begins later than the update after it would begin without waiting for it."""
    copy, passes, wait = background._copy, NativeEngine.forward_backward, CheckpointSaver.wait
    may_copy = threading.Semaphore(0)
    iterations = itertools.count(1)

    def copy_late(*arguments: Any) -> None:
        assert may_copy.acquire(timeout=HANG)
        time.sleep(0.2)
        copy(*arguments)

    def pass_and_release(engine: NativeEngine, *arguments: Any, **options: Any) -> None:
        passes(engine, *arguments, **options)
        if next(iterations) > 1:  # before the first save
            may_copy.release()

    def release_and_wait(saver: CheckpointSaver) -> Any:
        may_copy.release()  # no passes follow the last save
        return wait(saver)

    train = _runs.config().train.model_dump() | {"train_iters": 4, "eval_interval": 100}
    config = _runs.config(train=train, checkpoint={"save_interval": 1, "keep_last": 4})
    _runs.train(config, data, tmp_path / "before")
    with monkeypatch.context() as patch:
        patch.setattr(background, "_copy", copy_late)
        patch.setattr(NativeEngine, "forward_backward", pass_and_release)
        patch.setattr(CheckpointSaver, "wait", release_and_wait)
        _runs.train(config, data, tmp_path / "late")
    for iteration in range(1, 5):
        name = f"checkpoints/iter_{iteration:07d}"
        assert_equal(
            read_tensors(tmp_path / "late" / name), read_tensors(tmp_path / "before" / name)
        )


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
