"""The ramp-up of the batch size, compared with its definition batch by batch."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.config.batch_schedule import BatchSchedule
from tests._tiny import tiny_config

RAMP = BatchSchedule(global_batch_size=32, start=8, increment=8, rampup_samples=300)


def sizes(schedule: BatchSchedule, iterations: int) -> list[int]:
    """Return the sizes of successive batches, computed only with `at`."""
    consumed, batches = 0, []
    for _ in range(iterations):
        batches.append(schedule.at(consumed))
        consumed += batches[-1]
    return batches


def test_each_batch_size_lasts_for_an_equal_share_of_the_samples() -> None:
    assert [RAMP.at(consumed) for consumed in (0, 99, 100, 199, 200, 299, 300, 10**9)] == [
        8,
        8,
        16,
        16,
        24,
        24,
        32,
        32,
    ]
    # 8 until 104 are consumed, 16 until 200, 24 until 320.
    assert sizes(RAMP, 26) == [8] * 13 + [16] * 6 + [24] * 5 + [32] * 2


def test_every_batch_has_the_same_size_without_a_ramp_up() -> None:
    schedule = BatchSchedule.of(tiny_config(train={"global_batch_size": 6}).train)
    assert schedule == BatchSchedule(6, 6)
    assert sizes(schedule, 3) == [6, 6, 6]
    assert schedule.consumed_after(7) == 42
    assert [schedule.iterations_for(samples) for samples in (0, 1, 6, 7)] == [0, 1, 1, 2]


def test_schedule_is_built_from_the_configuration() -> None:
    ramp = {"start": 8, "increment": 8, "samples": 300}
    config = tiny_config(train={"global_batch_size": 32, "rampup_batch_size": ramp})
    assert BatchSchedule.of(config.train) == RAMP


def test_a_ramp_up_shorter_than_a_batch_skips_sizes() -> None:
    assert sizes(BatchSchedule(64, 8, 8, rampup_samples=10), 4) == [8, 48, 64, 64]
    assert BatchSchedule(64, 8, 8, rampup_samples=10).consumed_after(3) == 120


@given(
    start=st.integers(1, 12),
    increment=st.integers(1, 12),
    steps=st.integers(0, 60),
    samples=st.integers(1, 400),
    iterations=st.integers(0, 60),
)
def test_closed_forms_equal_the_sums_over_batches(
    start: int, increment: int, steps: int, samples: int, iterations: int
) -> None:
    schedule = BatchSchedule(start + steps * increment, start, increment, samples)
    batches = sizes(schedule, iterations)
    assert all(first <= second <= schedule.global_batch_size for first, second in pairwise(batches))
    consumed = sum(batches)
    assert schedule.consumed_after(iterations) == consumed
    half = schedule.consumed_after(iterations // 2)
    assert schedule.consumed_after(iterations - iterations // 2, half) == consumed
    assert schedule.iterations_for(consumed) == iterations
    assert schedule.iterations_for(consumed + 1) == iterations + 1
    if iterations:
        assert schedule.iterations_for(consumed - batches[-1] + 1) == iterations


@pytest.mark.parametrize(
    "schedule",
    [
        RAMP,
        # In double precision 9 / (18 / 14) and 9 / (9 / 7) are below 7.
        BatchSchedule(global_batch_size=120, start=8, increment=8, rampup_samples=18),
        BatchSchedule(global_batch_size=64, start=8, increment=8, rampup_samples=9),
    ],
)
def test_batch_size_equals_megatrons_formula(schedule: BatchSchedule) -> None:
    # int(consumed / (samples / increments)) increments, and the full batch after `samples`
    full, samples = schedule.global_batch_size, schedule.rampup_samples
    increments = (full - 8) // 8
    for consumed in range(samples + 2):
        expected = full if consumed > samples else 8 + int(consumed / (samples / increments)) * 8
        assert schedule.at(consumed) == expected
