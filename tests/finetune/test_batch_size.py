"""The search by itself: every threshold is found, with few probes.

And how many processes a fine-tuning has.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.config.load import parse_finetune_config
from megacore.errors import ConfigError, ParallelLayoutError, RankLostError
from megacore.finetune.batch_size import Answer, Fits, TooLarge, largest_batch
from megacore.finetune.resolve import resolve_ranks
from megacore.hardware import Gpu, Hardware
from tests.config._finetune import minimal

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


def machine(gpus: int) -> Hardware:
    """A machine of 8 cores."""
    return Hardware(8, 2**34, tuple(Gpu("GPU", 2**35) for _ in range(gpus)))


@pytest.mark.parametrize(
    ("asked", "gpus", "expected"),
    [("auto", 0, (1, 8)), ("auto", 4, (4, 2)), (2, 0, (2, 4)), (2, 4, (2, 4))],
)
def test_ranks_and_their_threads(asked: int | str, gpus: int, expected: tuple[int, int]) -> None:
    config = parse_finetune_config(minimal() | {"launch": {"nproc_per_node": asked}}, origin="test")
    assert resolve_ranks(config, machine(gpus)) == expected


def test_more_ranks_than_gpus() -> None:
    config = parse_finetune_config(minimal() | {"launch": {"nproc_per_node": 3}}, origin="test")
    with pytest.raises(
        ParallelLayoutError, match=r"launch.nproc_per_node is 3 and this machine has 2 visible GPUs"
    ):
        resolve_ranks(config, machine(2))


@pytest.mark.parametrize(
    "said",
    [
        {"distributed_type": "MULTI_CPU"},
        {"distributed_type": "NO", "use_cpu": True, "num_processes": 1},
    ],
)
def test_a_yaml_that_asks_for_cpus_is_refused_beside_gpus(said: dict[str, object]) -> None:
    config = parse_finetune_config(
        minimal() | {"launch": {"accelerate_config": said}}, origin="test"
    )
    resolve_ranks(config, machine(0))
    with pytest.raises(
        ConfigError, match=r"launch.accelerate_config asks for CPUs, and ranks take the 2 GPUs"
    ):
        resolve_ranks(config, machine(2))
