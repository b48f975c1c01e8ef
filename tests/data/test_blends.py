"""Tests of blends of data sets."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.data import _compiled
from megacore.data.blend import (
    Division,
    build_blend,
    build_exhaustive_blend,
    check_epochs,
    divide,
    member_sizes,
    shares,
    temperature_weights,
    write_blend,
)
from megacore.data.index_options import Member, Mixture, WeightStep
from megacore.errors import ConfigError, DataFormatError


def test_member_sizes_are_the_rounded_shares_with_a_surplus() -> None:
    # 0.3 x 101 = 30.3 -> 31 -> 31.155 -> 32; 0.7 x 101 = 70.7 -> 71 -> 71.355 -> 72; the blend
    # takes 31 + 71.
    assert member_sizes([0.3, 0.7], 101, "megatron") == ([32, 72], 102)
    # 0.3 x 101 x 1.005 = 30.45 -> 31
    assert member_sizes([0.3, 0.7], 101, "neox") == ([31, 72], 101)


def test_shares_are_normalized_like_megatron_and_neox() -> None:
    weights = [0.1] * 9
    assert shares(weights) == (np.array(weights) / np.sum(weights)).tolist()
    assert shares(weights, "neox") == [0.1 / sum(weights)] * 9
    assert shares([1, 3]) == [0.25, 0.75]


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_a_blend_follows_its_weights(size: int) -> None:
    dataset_index, sample_index = build_blend([3, 1], size)
    assert (dataset_index.dtype, sample_index.dtype) == (np.int16, np.int64)
    counts = np.bincount(dataset_index, minlength=2)
    assert abs(counts[0] - 0.75 * size) <= 1
    for number in (0, 1):
        np.testing.assert_array_equal(
            sample_index[dataset_index == number], np.arange(counts[number])
        )


def test_an_exhaustive_blend_uses_every_sample_once() -> None:
    dataset_index, sample_index = build_exhaustive_blend([2, 0, 5])
    assert sorted(zip(dataset_index.tolist(), sample_index.tolist(), strict=True)) == [
        *((0, i) for i in range(2)),
        *((2, i) for i in range(5)),
    ]
    assert [values.size for values in build_exhaustive_blend([0])] == [0, 0]


def reference(
    parts: list[tuple[int, int, list[float]]], members: int
) -> tuple[list[int], list[int]]:
    """Choose the member of each sample by the rule of the module, in exact fractions of 2^-20."""
    taken, target = [0] * members, [0.0] * members
    numbers, samples = [], []
    for start, stop, weights in parts:
        surplus = [round(2**20 * (taken[d] - target[d])) / 2**20 for d in range(members)]
        before = list(taken)
        share = shares(weights)
        for i in range(stop - start):
            errors = [
                share[d] * max(i, 1) - (surplus[d] + (taken[d] - before[d]))
                if weights[d]
                else -math.inf
                for d in range(members)
            ]
            best = errors.index(max(errors))
            numbers.append(best)
            samples.append(taken[best])
            taken[best] += 1
        target = [target[d] + share[d] * (stop - start) for d in range(members)]
    return numbers, samples


STEPS = (
    WeightStep(1000, (1.0, 5.0, 2.5)),
    WeightStep(1010, (0.0, 0.1, 0.2)),
    WeightStep(40_000, (1.0, 0.0, 0.0)),
    WeightStep(45_000, (0.2, 0.3, 0.5)),
)


def test_a_schedule_follows_the_rule_and_changes_nothing_before_a_step() -> None:
    weights, size = [3.0, 1.0, 0.0], 600_000
    numbers, samples = build_blend(weights, size, STEPS)
    short = 60_000
    starts = [0, *(step.samples for step in STEPS), short]
    parts = [
        (start, stop, list(each))
        for start, stop, each in zip(
            starts[:-1], starts[1:], [weights, *(step.weights for step in STEPS)], strict=True
        )
    ]
    expected = reference(parts, 3)
    assert (numbers[:short].tolist(), samples[:short].tolist()) == expected
    # with and without vector instructions, in segments computed from guessed counts
    for until in range(len(STEPS) + 1):
        before = build_blend(weights, size, STEPS[:until])
        same = (*starts[1:-1], size)[until]
        np.testing.assert_array_equal(before[0][:same], numbers[:same])
        np.testing.assert_array_equal(before[1][:same], samples[:same])
    last = 600_000 - 45_000
    surplus = [0.25, -0.75, 0.5]
    vector = _compiled.build_blend(np.array([0.2, 0.3, 0.5]), last, surplus=surplus)
    serial = _compiled.build_blend(np.array([0.2, 0.3, 0.5]), last, True, surplus)
    np.testing.assert_array_equal(vector[0], serial[0])
    np.testing.assert_array_equal(vector[1], serial[1])
    for number in range(3):  # each member's samples in order, without gaps
        drawn = samples[numbers == number]
        np.testing.assert_array_equal(drawn, np.arange(len(drawn)))


def test_shares_are_kept_over_many_short_steps() -> None:
    steps = tuple(
        WeightStep(7 * number, (0.96, 0.04) if number % 2 else (0.94, 0.06))
        for number in range(1, 2000)
    )
    numbers, _ = build_blend([0.94, 0.06], 14_000, steps)
    assert abs(int((numbers == 1).sum()) - 0.05 * 14_000) <= 2  # no share is lost at a step
    division = divide(
        Mixture.blend([Member("a", 0.94), Member("b", 0.06)], steps), "megatron", "train", 14_000
    )
    assert division.least is not None
    assert (np.bincount(numbers) <= division.least).all()


def test_one_phase_is_megatrons_blend() -> None:
    beyond = (WeightStep(5000, (1.0, 1.0)),)
    for weights in ([3.0, 1.0], [0.1] * 9):
        expected = _compiled.build_blend(np.asarray(shares(weights)), 5000)
        for steps in ((), beyond):
            np.testing.assert_array_equal(build_blend(weights, 5000, steps)[0], expected[0])
            np.testing.assert_array_equal(build_blend(weights, 5000, steps)[1], expected[1])
    members = [Member("a", 3.0), Member("b", 1.0)]
    plain = divide(Mixture.blend(members), "megatron", "train", 4999)
    assert divide(Mixture.blend(members, beyond), "megatron", "train", 4999) == plain
    scheduled = divide(
        Mixture.blend(members, (WeightStep(9, (1.0, 0.0)),)), "megatron", "valid", 50
    )
    assert scheduled == divide(Mixture.blend(members), "megatron", "valid", 50)


def test_a_blend_of_small_shares_counts_what_it_draws_beyond_the_request() -> None:
    # 5 + 40 x 1 samples are blended, of which about half come from the first, not the 6 requested.
    weights = [40.0, *(1.0,) * 40]
    mixture = Mixture.blend([Member(f"m{n}", weight) for n, weight in enumerate(weights)])
    division = divide(mixture, "megatron", "train", 10)
    assert (division.size, division.asked) == (45, (6, *(2,) * 40))
    numbers, _ = reference([(0, 45, weights)], 41)
    drawn = [numbers.count(member) for member in range(41)]
    assert drawn[0] > 6
    assert drawn[-1] == 0
    assert division.least == tuple(drawn)


@pytest.mark.parametrize("requested", [30, 40, 50])
def test_without_weights_more_samples_begin_like_fewer(requested: int) -> None:
    mixture = Mixture.blend([Member("a", None), Member("b", None)])
    longer = divide(mixture, "megatron", "train", requested, planned_before=40)
    assert longer == divide(mixture, "megatron", "train", max(requested, 40))


def test_temperature_flattens_the_sizes() -> None:
    assert shares(temperature_weights([900, 100], 1.0)) == pytest.approx([0.9, 0.1])
    assert shares(temperature_weights([900, 100], 2.0)) == pytest.approx([0.75, 0.25])
    assert shares(temperature_weights([900, 100], 1e9)) == pytest.approx([0.5, 0.5])


def test_a_member_that_exceeds_its_epochs_is_refused_with_the_numbers() -> None:
    members = [Member("a", 3.0, max_epochs=2), Member("b", 1.0)]
    mixture = Mixture.blend(members, (WeightStep(100, (1.0, 1.0)),))
    division = divide(mixture, "megatron", "train", 300)
    check_epochs(members, division, 300, [87.5, 1.0])  # 75 + 100 samples
    with pytest.raises(
        ConfigError, match=r"175 samples from a, which are 2\.5 epochs of 70 .* at sample 230"
    ):
        check_epochs(members, division, 300, [70.0, 1.0])
    check_epochs(members, division, None, [1.0, 1.0])  # one epoch
    # 75 + 20 + 90 samples, of which the third part gives 10 of 10/9 samples each
    three = divide(
        Mixture.blend(members, (WeightStep(100, (1.0, 4.0)), WeightStep(200, (9.0, 1.0)))),
        "megatron",
        "train",
        300,
    )
    with pytest.raises(ConfigError, match=r"185 samples from a, .* at sample 211"):
        check_epochs(members, three, 300, [52.5, 1.0])


def test_the_limit_holds_for_the_only_member_of_the_train_split() -> None:
    """Check it where the data set is not blended, because it is the only one."""
    members = (Member("a", 3.0, max_epochs=2),)
    mixture = Mixture.per_split(members, (Member("b", 1.0),), ())
    division = divide(mixture, "megatron", "train", 300)
    assert division.weights is None
    check_epochs(members, division, 300, [149.5])  # a blend deviates by up to one sample
    with pytest.raises(ConfigError, match=r"300 samples from a, .* at sample 298"):
        check_epochs(members, division, 300, [149.4])


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((WeightStep(0, (1.0, 1.0)),), "change at sample 0 after sample 0"),
        ((WeightStep(5, (1.0, 1.0)), WeightStep(5, (1.0, 2.0))), "sample 5 after sample 5"),
        ((WeightStep(5, (1.0,)),), "for 2 data sets"),
        ((WeightStep(5, (0.0, 0.0)),), "not all of them 0"),
        ((WeightStep(5, (1.0, -1.0)),), "from 0 on"),
    ],
)
def test_invalid_steps_are_refused(steps: tuple[WeightStep, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixture.blend([Member("a", 1.0), Member("b", 1.0)], steps)


def test_weight_zero_needs_a_later_positive_weight() -> None:
    members = [Member("a", 1.0), Member("b", 0.0)]
    Mixture.blend(members, (WeightStep(5, (1.0, 1.0)),))
    with pytest.raises(ConfigError, match="gives b the weight 0"):
        Mixture.blend(members, (WeightStep(5, (1.0, 0.0)),))


@pytest.mark.parametrize("weight", [1.0, None])
def test_a_blend_draws_no_more_of_a_member_than_it_has(
    tmp_path: Path, weight: float | None
) -> None:
    mixture = Mixture.blend([Member("a", weight), Member("b", weight)])
    weights = None if weight is None else (0.5, 0.5)
    division = Division((5, 5), weights, 10)
    full: list[dict[str, Any]] = [{"samples": 5, "tokens": 1} for _ in range(2)]
    counts = write_blend(tmp_path, mixture, "train", division, full)
    assert [member["drawn"] for member in counts["members"]] == [5, 5]
    message = "draws 5 samples from b, which has 4" if weight else "10 samples are .* its .* has 9"
    with pytest.raises(DataFormatError, match=message):
        write_blend(tmp_path, mixture, "train", division, [full[0], {"samples": 4, "tokens": 1}])
