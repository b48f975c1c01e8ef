"""The search by itself: every threshold is found, with few probes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.errors import RankLostError
from megacore.finetune.batch_size import Answer, Fits, TooLarge, largest_batch

LIMITS = st.integers(1, 5000)


class Machine:
    """Has room for `room` samples; remembers what was tried."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.tried: list[int] = []

    def __call__(self, batch: int) -> Answer:
        self.tried.append(batch)
        return Fits(1000 * batch) if batch <= self.room else TooLarge(f"no room for {batch}")


@given(room=st.integers(0, 6000), limit=LIMITS, start=st.integers(1, 6000))
def test_the_threshold_is_found_with_few_probes(room: int, limit: int, start: int) -> None:
    machine = Machine(room)
    found = largest_batch(machine, limit=limit, start=start)
    assert found.batch == min(room, limit)
    assert found.at_limit == (room >= limit)
    assert found.peak_memory == (1000 * found.batch or None)
    assert found.reason == (None if room >= limit else f"no room for {found.batch + 1}")
    assert list(found.tried) == machine.tried
    assert len(set(machine.tried)) == len(machine.tried) <= 2 + 2 * math.log2(limit)
    assert all(1 <= batch <= limit for batch in machine.tried)


@given(room=st.integers(1, 5000))
def test_a_start_that_is_right_saves_the_way_to_it(room: int) -> None:
    machine = Machine(room)
    largest_batch(machine, limit=2 * room + 1, start=room)
    assert len(machine.tried) <= 2 + math.log2(room)


def test_the_order_of_the_probes() -> None:
    machine = Machine(11)
    largest_batch(machine, limit=100)
    assert machine.tried == [1, 2, 4, 8, 16, 12, 10, 11]


def test_the_limit_is_tried_itself() -> None:
    machine = Machine(100)
    assert largest_batch(machine, limit=11).batch == 11
    assert machine.tried == [1, 2, 4, 8, 11]


def test_one_that_does_not_fit_is_an_answer() -> None:
    machine = Machine(0)
    found = largest_batch(machine, limit=64, start=8)
    assert (found.batch, found.peak_memory, found.reason) == (0, None, "no room for 1")
    assert machine.tried == [8, 4, 2, 1]


def test_another_failure_is_raised_and_ends_the_search() -> None:
    tried = []

    def probe(batch: int) -> Answer:
        tried.append(batch)
        if batch == 4:
            raise RankLostError("rank 1 was lost")
        return Fits(1)

    with pytest.raises(RankLostError, match="rank 1 was lost"):
        largest_batch(probe, limit=64)
    assert tried == [1, 2, 4]
