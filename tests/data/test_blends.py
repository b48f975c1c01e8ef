"""Tests of blends of data sets."""

import numpy as np
import pytest

from megacore.data.index_plans import build_blend, build_exhaustive_blend, member_sizes, shares


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
