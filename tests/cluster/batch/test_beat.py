import os
from pathlib import Path

import pytest

from megacore.cluster.batch.spec import INTERVAL, FollowerBeat, FollowerWatch


class Clock:
    """Shows what it is set to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_follower_that_beats_is_not_lost_and_one_that_stops_is(
    tmp_path: Path, clock: Clock
) -> None:
    beat, watch = (
        FollowerBeat(tmp_path, "mine", clock),
        FollowerWatch(tmp_path, "mine", 10.0, clock),
    )
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


def test_another_submissions_follower_does_not_count(tmp_path: Path, clock: Clock) -> None:
    other, watch = (
        FollowerBeat(tmp_path, "other", clock),
        FollowerWatch(tmp_path, "mine", 10.0, clock),
    )
    for _ in range(6):
        clock.now += INTERVAL
        other.beat()
    assert watch.lost()


def test_a_request_to_save_is_told_at_once_and_stays(tmp_path: Path, clock: Clock) -> None:
    beat, watch = (
        FollowerBeat(tmp_path, "mine", clock),
        FollowerWatch(tmp_path, "mine", 10.0, clock),
    )
    beat.beat()
    watch.lost()
    assert not watch.save
    beat.save = True
    beat.beat()
    watch.lost()
    assert watch.save
    assert not watch.over
    beat.over = True
    beat.beat()
    watch.lost()
    assert watch.over


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"token": "mine"}'])
def test_a_torn_sign_is_none(text: str, tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "follower.json").write_text(text)
    watch = FollowerWatch(tmp_path, "mine", 10.0, clock)
    assert not watch.lost()
    clock.now += 11.0
    assert watch.lost()


def test_a_disk_that_cannot_be_written_does_not_end_the_follower(
    tmp_path: Path, clock: Clock
) -> None:
    FollowerBeat(tmp_path / "not there", "mine", clock).beat()
    assert os.listdir(tmp_path) == []
