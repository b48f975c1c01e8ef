from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.data.splits import parse_split, split_ranges
from megacore.errors import ConfigError


def test_golden_boundaries() -> None:
    assert split_ranges("949,50,1", 596) == {"train": (0, 566), "valid": (566, 595), "test": (595, 596)}


def test_boundaries_round_half_to_even() -> None:
    assert split_ranges("1,1", 5) == {"train": (0, 2), "valid": (2, 5), "test": (5, 5)}
    assert split_ranges("1,1", 7) == {"train": (0, 4), "valid": (4, 7), "test": (7, 7)}


def test_missing_weights_are_zero() -> None:
    assert parse_split("100") == (1.0, 0.0, 0.0)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any), st.integers(0, 10**12))
def test_ranges_cover_everything_in_order(weights: list[int], count: int) -> None:
    bounds = list(split_ranges(",".join(map(str, weights)), count).values())
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(a[1] == b[0] and a[0] <= a[1] for a, b in pairwise(bounds))


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan,1", "inf"])
def test_wrong_split_is_refused(split: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.split is"):
        parse_split(split)
