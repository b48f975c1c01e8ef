"""Resumed runs after a kill between a checkpoint and its event."""

import os
import shutil
from pathlib import Path

import pytest

from megacore.errors import TrainingStoppedError
from tests.train import _runs


def test_resumed_run_reports_unreported_and_lost_checkpoints(data: Path, tmp_path: Path) -> None:
    train = _runs.config().train.model_dump()
    _runs.train(_runs.config(train=train | {"train_iters": 4}), data, tmp_path)
    events = tmp_path / "events.jsonl"
    checkpoints = sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*"))
    assert len(checkpoints) >= 2
    lines = [
        line for line in events.read_text().splitlines(True) if f'{checkpoints[-1]}"' not in line
    ]
    events.write_text("".join(lines))
    shutil.rmtree(tmp_path / "checkpoints" / checkpoints[0])
    (tmp_path / "checkpoints" / "iter_0000001.tmp-ab12-deleted").mkdir()
    _runs.train(_runs.config(train=train | {"train_iters": 6}), data, tmp_path)
    reported = {}
    for kind in ("checkpoint", "checkpoint_deleted"):
        for event in _runs.events(tmp_path, kind):
            reported.setdefault(Path(event["path"]).name, []).append(kind)
    assert reported[checkpoints[-1]][0] == "checkpoint"
    assert reported[checkpoints[0]] == ["checkpoint", "checkpoint_deleted"]
    assert not list((tmp_path / "checkpoints").glob("*.tmp-*"))


def test_resumed_run_applies_retention_to_existing_checkpoints(data: Path, tmp_path: Path) -> None:
    """A finished run that is started again does so too."""
    train = _runs.config().train.model_dump()
    _runs.train(
        _runs.config(train=train, checkpoint={"save_interval": 2, "keep_last": 9}), data, tmp_path
    )
    few = {"save_interval": 2, "keep_last": 1, "keep_best": False}
    _runs.train(_runs.config(train=train, checkpoint=few), data, tmp_path, attempt=2)
    assert [path.name for path in (tmp_path / "checkpoints").glob("iter_*")] == ["iter_0000006"]
    assert [event["iteration"] for event in _runs.events(tmp_path, "checkpoint_deleted")] == [2, 4]


def test_retention_keeps_the_resumed_checkpoint_when_a_newer_one_is_damaged(
    data: Path, tmp_path: Path
) -> None:
    train = _runs.config().train.model_dump()
    few = {"save_interval": 2, "keep_last": 1, "keep_best": False}
    _runs.train(
        _runs.config(train=train, checkpoint={"save_interval": 2, "keep_last": 9}), data, tmp_path
    )
    shard = next((tmp_path / "checkpoints/iter_0000006").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[-200] ^= 1
    stamp = shard.stat()
    shard.write_bytes(content)
    os.utime(shard, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as if the disk had changed it
    stopped = train | {"exit_interval": 5}
    with pytest.raises(TrainingStoppedError):
        _runs.train(
            _runs.config(train=stopped, checkpoint=few | {"save_interval": 100}),
            data,
            tmp_path,
            attempt=2,
        )
    assert _runs.events(tmp_path, "start")[-1]["resumed_from"] == 4
    assert 4 not in {
        event["iteration"] for event in _runs.events(tmp_path, "checkpoint_deleted")[:1]
    }
