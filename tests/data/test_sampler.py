"""Tests of the order of samples and of reading batches ahead."""

import threading
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import pytest

from megacore.config.batch_schedule import BatchSchedule
from megacore.data.sampler import PrefetchingIterator, micro_batch_indices, micro_batches
from tests._limits import HANG

EIGHT = BatchSchedule(global_batch_size=8, start=8)


def gather(indices: Sequence[int]) -> np.ndarray:
    return np.array([[index, index + 1] for index in indices], np.int64)


def prefetch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "megacore-prefetch"]


def test_micro_batches_have_megatrons_order() -> None:
    assert micro_batch_indices(
        100, micro_step=1, micro_batch_size=2, dp_rank=1, dp_size=3
    ) == range(108, 110)


def test_a_global_batch_with_a_skipped_sample_is_left_out_and_no_other_changes() -> None:
    def read(*skipped: range) -> list[int]:
        ranges = micro_batches(
            40, micro_batch_size=2, schedule=EIGHT, dp_rank=0, dp_size=1, steps=3, skipped=skipped
        )
        return [sample for micro_batch in ranges for sample in micro_batch]

    first, second, third = (list(range(start, start + 8)) for start in (40, 48, 56))
    assert read() == first + second + third
    assert read(range(50, 51)) == first + third
    assert read(range(47, 49)) == third
    assert read(range(55, 56), range(63, 64)) == first
    assert read(range(32, 40), range(64, 65)) == first + second + third


@pytest.mark.parametrize(("micro", "ranks"), [(1, 1), (2, 2), (4, 1), (1, 8), (2, 4)])
def test_a_global_batch_has_the_same_samples_in_every_layout(micro: int, ranks: int) -> None:
    plans = [
        list(
            micro_batches(
                40, micro_batch_size=micro, schedule=EIGHT, dp_rank=rank, dp_size=ranks, steps=3
            )
        )
        for rank in range(ranks)
    ]
    per_step = 8 // (micro * ranks)
    for step in range(3):
        samples = [
            index
            for plan in plans
            for batch in plan[step * per_step : (step + 1) * per_step]
            for index in batch
        ]
        assert sorted(samples) == list(range(40 + 8 * step, 48 + 8 * step))


def test_resuming_continues_after_the_consumed_samples() -> None:
    arguments = {"micro_batch_size": 2, "schedule": EIGHT, "dp_rank": 1, "dp_size": 2}
    assert list(micro_batches(0, **arguments, steps=5)) == [
        *micro_batches(0, **arguments, steps=2),
        *micro_batches(16, **arguments, steps=3),
    ]


@pytest.mark.parametrize(("micro", "ranks"), [(1, 1), (2, 2), (1, 4)])
def test_growing_global_batches_use_every_sample_once_in_order(micro: int, ranks: int) -> None:
    schedule = BatchSchedule(global_batch_size=12, start=4, increment=4, rampup_samples=24)
    sizes = [4, 4, 4, 8, 8, 12]
    arguments = {"micro_batch_size": micro, "schedule": schedule, "dp_size": ranks}
    plans = [
        iter(micro_batches(0, **arguments, dp_rank=rank, steps=len(sizes))) for rank in range(ranks)
    ]
    consumed = 0
    for size in sizes:
        read = [next(plan) for _ in range(size // (micro * ranks)) for plan in plans]
        assert list(chain(*read)) == list(range(consumed, consumed + size))
        consumed += size
    assert all(next(plan, None) is None for plan in plans)
    resumed = list(micro_batches(12, **arguments, dp_rank=0, steps=3))
    assert resumed[0][0] == 12
    assert len(resumed) * micro * ranks == 8 + 8 + 12


def test_batches_are_in_order_and_the_thread_ends() -> None:
    with PrefetchingIterator(gather, [[i, i + 7] for i in range(20)], depth=2) as batches:
        assert [batch[:, 0].tolist() for batch in batches] == [[i, i + 7] for i in range(20)]
        assert next(batches, None) is None
    assert prefetch_threads() == []


def test_prefetching_is_bounded_and_ends_at_close() -> None:
    requested: list[int] = []

    def endless() -> Iterator[list[int]]:
        for index in range(10**9):
            requested.append(index)
            yield [index]

    with PrefetchingIterator(gather, endless(), depth=3) as batches:
        for _ in range(5):
            next(batches)
        assert len(requested) <= 5 + 3 + 1
    assert prefetch_threads() == []
    batches.close()
    assert next(batches, None) is None


def test_close_ends_a_thread_that_waits_for_a_batch_to_be_taken() -> None:
    gathered = threading.Event()

    def noted(indices: Sequence[int]) -> np.ndarray:
        gathered.set()
        return gather(indices)

    batches = PrefetchingIterator(noted, [[0], [1]], depth=1)
    assert gathered.wait(HANG)
    closing = threading.Thread(target=batches.close, daemon=True)
    closing.start()
    closing.join(HANG)
    assert not closing.is_alive()
    assert prefetch_threads() == []


def test_an_error_is_raised_in_place_of_its_batch() -> None:
    def failing(indices: Sequence[int]) -> np.ndarray:
        if indices == [2]:
            raise IndexError("no sample 2")
        return gather(indices)

    with PrefetchingIterator(failing, [[0], [1], [2], [3]]) as batches:
        assert next(batches)[0, 0] == 0
        assert next(batches)[0, 0] == 1
        with pytest.raises(IndexError, match="no sample 2"):
            next(batches)
        assert next(batches, None) is None
    assert prefetch_threads() == []
