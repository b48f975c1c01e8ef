import os
from pathlib import Path
from typing import Any

import pytest

from megacore.artifact.files import read_json
from megacore.cluster.batch.spec import INTERVAL, FollowerBeat, FollowerWatch


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_follower_is_lost_only_after_its_beats_stop(tmp_path: Path, clock: Clock) -> None:
    beat = FollowerBeat(tmp_path, "mine", clock)
    watch = FollowerWatch(tmp_path, "mine", 10.0, clock)
    for _ in range(20):
        clock.now += INTERVAL
        beat.beat()
        assert not watch.lost()
    clock.now += 10.0
    assert not watch.lost()
    clock.now += 0.1
    assert watch.lost()
    beat.beat()
    assert not watch.lost()


def test_time_in_which_the_file_share_stands_still_does_not_count(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    FollowerBeat(tmp_path, "mine", clock).beat()
    watch = FollowerWatch(tmp_path, "mine", 10.0, clock)
    assert not watch.lost()

    def late(path: Path) -> Any:
        clock.now += 600.0
        monkeypatch.undo()
        return read_json(path)

    monkeypatch.setattr("megacore.cluster.batch.spec.read_json", late)
    clock.now += 0.5
    assert not watch.lost()
    clock.now += 0.5  # the follower goes on, too, and has not written its beat yet
    assert not watch.lost()
    clock.now += 10.0
    assert watch.lost()


def test_beats_of_another_submission_are_ignored(tmp_path: Path, clock: Clock) -> None:
    other = FollowerBeat(tmp_path, "other", clock)
    watch = FollowerWatch(tmp_path, "mine", 10.0, clock)
    for _ in range(6):
        clock.now += INTERVAL
        other.beat()
    assert watch.lost()


@pytest.mark.parametrize("request_name", ["save", "over"])
def test_beat_passes_a_request_to_the_watch(
    request_name: str, tmp_path: Path, clock: Clock
) -> None:
    beat = FollowerBeat(tmp_path, "mine", clock)
    watch = FollowerWatch(tmp_path, "mine", 10.0, clock)
    beat.beat()
    watch.lost()
    assert not watch.save
    assert not watch.over
    setattr(beat, request_name, True)
    beat.beat()
    watch.lost()
    assert (watch.save, watch.over) == (request_name == "save", request_name == "over")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"token": "mine"}'])
def test_torn_beat_file_is_ignored(text: str, tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "follower.json").write_text(text)
    watch = FollowerWatch(tmp_path, "mine", 10.0, clock)
    assert not watch.lost()
    clock.now += 11.0
    assert watch.lost()


def test_beat_ignores_a_directory_that_cannot_be_written(tmp_path: Path, clock: Clock) -> None:
    FollowerBeat(tmp_path / "not there", "mine", clock).beat()
    assert os.listdir(tmp_path) == []
