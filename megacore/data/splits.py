"""Which sequences belong to the train, validation and test split."""

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Literal

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


def split_ranges(
    split: str, count: int, style: Literal["megatron", "neox"] = "megatron"
) -> Mapping[str, tuple[int, int]]:
    """First and end element of each split when `count` elements are divided.

    The boundaries are the cumulative fractions times `count`, rounded half to even, as in Megatron core. With
    "neox" they are GPT-NeoX's: each fraction times `count` is rounded by itself, and what the sum is off by is taken
    from the train split. Raises ConfigError.
    """
    fractions = parse_split(split)
    if style == "neox":
        bounds = [0, *accumulate(round(fraction * float(count)) for fraction in fractions)]
        excess = bounds[-1] - count
        bounds = [0, *(bound - excess for bound in bounds[1:])]
        if bounds[1] < 0:
            raise ConfigError(f"data.split {split} leaves the train split {bounds[1]} of {count} sequences")
    else:
        bounds = [round(fraction * float(count)) for fraction in accumulate(fractions, initial=0.0)]
    return {name: (bounds[i], bounds[i + 1]) for i, name in enumerate(SPLIT_NAMES)}
