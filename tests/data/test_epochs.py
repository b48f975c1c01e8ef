"""Tests of the number of epochs that a number of samples takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.data.index_plans import plan_epochs, plan_whole_documents


@pytest.mark.parametrize(
    ("tokens", "seq_length", "samples", "expected"),
    [
        (137076, 64, 4924, (3, True, 6425, 4283)),
        (137076, 64, None, (1, False, 2141, 2141)),
        (137076, 64, 0, (1, False, 2141, 2141)),
        (1001, 10, 100, (1, False, 100, 100)),
        (1001, 10, 101, (2, True, 200, 100)),
        (1001, 10, 180, (2, False, 200, 200)),
    ],
)
def test_plan_separates_a_final_epoch_used_below_80_percent(
    tokens: int, seq_length: int, samples: int | None, expected: tuple
) -> None:
    plan = plan_epochs(tokens, seq_length, samples)
    assert (
        plan.epochs,
        plan.separate_final_epoch,
        plan.samples,
        plan.samples_before_final_epoch,
    ) == expected


@given(
    tokens=st.integers(2, 10**15),
    seq_length=st.integers(1, 5000),
    samples=st.integers(0, 10**9),
    extra=st.integers(0, 1),
)
def test_plan_has_the_fewest_sufficient_epochs(
    tokens: int, seq_length: int, samples: int, extra: int
) -> None:
    plan = plan_epochs(tokens, seq_length, samples, extra=extra)
    assert plan.epochs * tokens >= samples * seq_length + extra
    assert plan.epochs == 1 or (plan.epochs - 1) * tokens < samples * seq_length + extra
    assert plan.samples == (plan.epochs * tokens - extra) // seq_length >= samples
    assert plan.separate_final_epoch == (plan.samples_before_final_epoch < plan.samples)


def test_neox_has_no_separate_final_epoch() -> None:
    assert plan_epochs(1001, 10, 101).separate_final_epoch
    plan = plan_epochs(1001, 10, 101, style="neox")
    assert (plan.epochs, plan.separate_final_epoch, plan.samples_before_final_epoch) == (
        2,
        False,
        200,
    )


@pytest.mark.parametrize(
    ("tokens", "extra", "expected"),
    [
        (101, 1, (10, False)),
        (102, 1, (11, True)),
        (100, 0, (10, False)),
        (109, 0, (11, True)),
        (2, 1, (1, True)),
    ],
)
def test_partial_sample_is_counted_if_tokens_remain(
    tokens: int, extra: int, expected: tuple
) -> None:
    plan = plan_epochs(tokens, 10, None, extra=extra, keep_partial=True)
    assert (plan.samples, plan.partial_sample) == expected


def test_partial_sample_is_counted_exactly_for_many_tokens() -> None:
    # In fp32 arithmetic the number of samples would be an integer.
    plan = plan_epochs(2**24 * 1024 + 2, 1024, None, keep_partial=True)
    assert (plan.samples, plan.partial_sample) == (2**24 + 1, True)


def test_plan_of_whole_documents_has_the_fewest_sufficient_epochs() -> None:
    # 25 tokens an epoch in samples of 10: 1 epoch has at least 3 samples, 2 have 5, 3 have 8.
    for samples, epochs in ((None, 1), (0, 1), (3, 1), (4, 2), (5, 2), (6, 3), (8, 3)):
        plan = plan_whole_documents(lambda epochs: -(-epochs * 25 // 10), samples, 10)
        assert (plan.epochs, plan.separate_final_epoch) == (epochs, False)
