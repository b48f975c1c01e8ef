"""Tests of the division of sequences into splits."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.data.index_options import parse_split, split_ranges
from megacore.errors import ConfigError


def test_boundaries_equal_megatrons() -> None:
    assert split_ranges("949,50,1", 596) == {
        "train": (0, 566),
        "valid": (566, 595),
        "test": (595, 596),
    }


def test_boundaries_are_rounded_half_to_even() -> None:
    assert split_ranges("1,1", 5) == {"train": (0, 2), "valid": (2, 5), "test": (5, 5)}
    assert split_ranges("1,1", 7) == {"train": (0, 4), "valid": (4, 7), "test": (7, 7)}


def test_neox_rounds_each_split_and_corrects_the_first() -> None:
    # 3.5 -> 4, 3.5 -> 4: one too many, subtracted from the train split.
    assert split_ranges("1,1", 7, "neox") == {"train": (0, 3), "valid": (3, 7), "test": (7, 7)}
    # 1.67 -> 2 three times in 5.
    assert split_ranges("1,1,1", 5, "neox") == {"train": (0, 1), "valid": (1, 3), "test": (3, 5)}
    assert split_ranges("949,50,1", 596, "neox") == {
        "train": (0, 565),
        "valid": (565, 595),
        "test": (595, 596),
    }


def test_neox_rounding_that_leaves_a_negative_train_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves the train split -1 of 3 sequences"):
        split_ranges("0,1,1", 3, "neox")


def test_missing_split_weights_are_zero() -> None:
    assert parse_split("100") == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("style", ["megatron", "neox"])
@given(
    weights=st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any),
    count=st.integers(0, 10**12),
)
def test_ranges_cover_all_sequences_in_order(style: str, weights: list[int], count: int) -> None:
    try:
        bounds = list(split_ranges(",".join(map(str, weights)), count, style).values())  # type: ignore[arg-type]
    except ConfigError:
        assert style == "neox"
        return
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(a[1] == b[0] and a[0] <= a[1] for a, b in pairwise(bounds))


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan,1", "inf"])
def test_an_invalid_split_is_refused(split: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.split is"):
        parse_split(split)
