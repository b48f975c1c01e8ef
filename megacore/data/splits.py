"""Which sequences belong to the train, validation and test split."""

import math
from collections.abc import Mapping
from itertools import accumulate

import numpy as np

from megacore.errors import ConfigError

SPLIT_NAMES = ("train", "valid", "test")
"""In the order of the weights."""


def parse_split(split: str) -> tuple[float, float, float]:
    """The normalised weights in "949,50,1"; missing ones are 0. Raises ConfigError."""
    try:
        weights = [float(part) for part in split.split(",")]
    except ValueError as error:
        raise ConfigError(f"data.split is {split!r}: give up to three numbers, as in 949,50,1") from error
    if len(weights) > 3 or any(not math.isfinite(weight) or weight < 0 for weight in weights) or sum(weights) <= 0:
        raise ConfigError(
            f"data.split is {split!r}: give up to three weights for train, validation and test, none of them "
            "negative and not all of them 0, as in 949,50,1"
        )
    train, valid, test = np.asarray([*weights, 0.0, 0.0][:3]) / np.sum(weights)
    return float(train), float(valid), float(test)


def split_ranges(split: str, count: int) -> Mapping[str, tuple[int, int]]:
    """First and end element of each split when `count` elements are divided.

    The boundaries are the cumulative fractions times `count`, rounded half to even, as in Megatron core.
    """
    fractions = [0.0, *accumulate(parse_split(split))]
    bounds = [round(fraction * float(count)) for fraction in fractions]
    return {name: (bounds[i], bounds[i + 1]) for i, name in enumerate(SPLIT_NAMES)}
