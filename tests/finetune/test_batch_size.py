"""Search for the largest batch, and the number of ranks of a fine-tuning."""

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
    """A probe with room for `room` samples, which records the tried batches."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.tried: list[int] = []

    def __call__(self, batch: int) -> Answer:
        self.tried.append(batch)
        return Fits(1000 * batch) if batch <= self.room else TooLarge(f"no room for {batch}")


@given(room=st.integers(0, 6000), limit=LIMITS, start=st.integers(1, 6000))
def test_largest_batch_is_found_with_few_probes(room: int, limit: int, start: int) -> None:
    machine = Machine(room)
    result = largest_batch(machine, limit=limit, start=start)
    assert result.batch == min(room, limit)
    assert result.peak_memory == (1000 * result.batch or None)
    assert result.reason == (None if room >= limit else f"no room for {result.batch + 1}")
    assert list(result.tried) == machine.tried
    assert len(set(machine.tried)) == len(machine.tried) <= 2 + 2 * math.log2(limit)
    assert all(1 <= batch <= limit for batch in machine.tried)


@given(room=st.integers(1, 5000))
def test_accurate_start_saves_probes(room: int) -> None:
    machine = Machine(room)
    largest_batch(machine, limit=2 * room + 1, start=room)
    assert len(machine.tried) <= 2 + math.log2(room)


def test_search_doubles_and_then_bisects() -> None:
    machine = Machine(11)
    largest_batch(machine, limit=100)
    assert machine.tried == [1, 2, 4, 8, 16, 12, 10, 11]


def test_search_tries_the_limit() -> None:
    machine = Machine(100)
    assert largest_batch(machine, limit=11).batch == 11
    assert machine.tried == [1, 2, 4, 8, 11]


def test_result_is_zero_if_one_sample_does_not_fit() -> None:
    machine = Machine(0)
    result = largest_batch(machine, limit=64, start=8)
    assert (result.batch, result.peak_memory, result.reason) == (0, None, "no room for 1")
    assert machine.tried == [8, 4, 2, 1]


def test_other_failure_ends_the_search() -> None:
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
    """Return a machine with 8 cores and some GPUs."""
    return Hardware(8, 2**34, tuple(Gpu("GPU", 2**35) for _ in range(gpus)))


@pytest.mark.parametrize(
    ("nproc", "gpus", "expected"),
    [("auto", 0, (1, 8)), ("auto", 4, (4, 2)), (2, 0, (2, 4)), (2, 4, (2, 4))],
)
def test_ranks_and_threads_follow_from_the_hardware(
    nproc: int | str, gpus: int, expected: tuple[int, int]
) -> None:
    config = parse_finetune_config(minimal() | {"launch": {"nproc_per_node": nproc}}, origin="test")
    assert resolve_ranks(config, machine(gpus)) == expected


def test_more_ranks_than_gpus_are_refused() -> None:
    config = parse_finetune_config(minimal() | {"launch": {"nproc_per_node": 3}}, origin="test")
    with pytest.raises(
        ParallelLayoutError, match=r"launch.nproc_per_node is 3 and this machine has 2 visible GPUs"
    ):
        resolve_ranks(config, machine(2))


@pytest.mark.parametrize(
    "accelerate_config",
    [
        {"distributed_type": "MULTI_CPU"},
        {"distributed_type": "NO", "use_cpu": True, "num_processes": 1},
    ],
)
def test_accelerate_config_for_cpus_is_refused_with_gpus(
    accelerate_config: dict[str, object],
) -> None:
    config = parse_finetune_config(
        minimal() | {"launch": {"accelerate_config": accelerate_config}}, origin="test"
    )
    resolve_ranks(config, machine(0))
    with pytest.raises(
        ConfigError, match=r"launch.accelerate_config asks for CPUs, and ranks take the 2 GPUs"
    ):
        resolve_ranks(config, machine(2))
