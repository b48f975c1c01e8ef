"""A kill between a checkpoint and its event: the resumed run reports what is there and what is gone."""

import shutil
from pathlib import Path

import pytest

from tests.train import _runs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    _runs.write_data(directory, _runs.config())
    return directory


def test_unreported_checkpoints_are_reported_and_lost_ones_too(data: Path, tmp_path: Path) -> None:
    train = _runs.config().train.model_dump()
    _runs.train(_runs.config(train=train | {"train_iters": 4}), data, tmp_path)
    events = tmp_path / "events.jsonl"
    checkpoints = sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*"))
    assert len(checkpoints) >= 2
    lines = [line for line in events.read_text().splitlines(True) if f'{checkpoints[-1]}"' not in line]
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
