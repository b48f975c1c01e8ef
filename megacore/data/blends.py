"""Blending: which data set each sample of a split comes from.

The rules are Megatron core's (https://github.com/NVIDIA/Megatron-LM, core/datasets), bit for bit: sample i comes from
the data set d with the largest weight_d x max(i, 1) - taken_d, in double precision, the first of equals.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megacore.data import _compiled as helpers
from megacore.data.index_options import IndexStyle

SURPLUS = 0.005
"""Share of samples by which a member has more than its weight asks for: its order is no multiple of the weights."""


def shares(weights: Sequence[float], style: IndexStyle = "megatron") -> list[float]:
    """Weights that add up to 1: as NumPy sums them, or, as GPT-NeoX does, Python (the last bits differ)."""
    if style == "neox":
        total = sum(weights)
        return [weight / total for weight in weights]
    values = np.asarray(weights, np.float64)
    normalised: list[float] = (values / values.sum()).tolist()
    return normalised


def member_sizes(weights: Sequence[float], samples: int, style: IndexStyle) -> tuple[list[int], int]:
    """Samples to ask of each member for a blend of `samples`, and the size of the blend; the weights add up to 1.

    Megatron core rounds each member's share up and blends the sum. GPT-NeoX rounds once, and blends more than it uses,
    of which the first `samples` are taken here.
    """
    if style == "neox":
        return [math.ceil(samples * weight * (1 + SURPLUS)) for weight in weights], samples
    wanted = [math.ceil(samples * weight) for weight in weights]
    return [math.ceil(count * (1 + SURPLUS)) for count in wanted], sum(wanted)


def build_blend(weights: Sequence[float], size: int) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """(dataset index, dataset sample index) of `size` samples.

    The weights are normalised (once more, if they already were), as Megatron core does at this place.
    """
    if size == 0:
        return np.empty(0, np.int16), np.empty(0, np.int64)
    return helpers.build_blend(np.asarray(shares(weights)), size)


def build_exhaustive_blend(sizes: Sequence[int]) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """(dataset index, dataset sample index) of every sample of every data set once, in proportion to their sizes."""
    return helpers.build_exhaustive_blend(np.asarray(sizes, np.int64))
