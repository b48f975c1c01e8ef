"""How long sequences are: their distribution, in memory that does not grow with their number."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_BLOCK = 1 << 20
_LOW_BITS = 16
"""A quantile is found in two passes, by the upper and then by the lower half of a length's 32 bits."""

Lengths = npt.NDArray[np.int32]


@dataclass(frozen=True)
class LengthSummary:
    """The distribution of lengths in numbers, all in tokens; there is at least one sequence."""

    sequences: int
    """How many there are."""
    tokens: int
    """Their sum."""
    shortest: int
    median: int
    """By nearest rank: the least length that half of the sequences do not exceed."""
    p95: int
    """The least length that 95 % of the sequences do not exceed."""
    longest: int

    @property
    def mean(self) -> float:
        """Tokens per sequence."""
        return self.tokens / self.sequences


@dataclass(frozen=True)
class LengthBins:
    """Lengths counted in bins of growing width: bin i holds edges[i] … edges[i + 1] - 1 tokens."""

    edges: npt.NDArray[np.int64]
    """Shape [bins + 1], ascending."""
    sequences: npt.NDArray[np.int64]
    """Sequences per bin."""
    tokens: npt.NDArray[np.int64]
    """Tokens of the sequences per bin."""


def summarize_lengths(lengths: Lengths) -> LengthSummary | None:
    """The distribution of sequence lengths; None when there is no sequence."""
    if not len(lengths):
        return None
    shortest, longest, tokens = int(lengths[0]), int(lengths[0]), 0
    for block in _blocks(lengths):
        shortest, longest = min(shortest, int(block.min())), max(longest, int(block.max()))
        tokens += int(block.sum(dtype=np.int64))
    # Nearest rank, counted from 0: the ceil(q n)-th smallest.
    ranks = [-(-len(lengths) * percent // 100) - 1 for percent in (50, 95)]
    median, p95 = ranked(lengths, ranks)
    return LengthSummary(len(lengths), tokens, shortest, median, p95, longest)


def ranked(lengths: Lengths, ranks: Sequence[int]) -> list[int]:
    """The lengths at these places in ascending order, as sorted(lengths)[rank] without sorting."""
    high = np.zeros(1 << (31 - _LOW_BITS), np.int64)
    for block in _blocks(lengths):
        high += np.bincount(block >> _LOW_BITS, minlength=len(high))
    ends = np.cumsum(high)
    found = []
    for rank in ranks:
        bucket = int(np.searchsorted(ends, rank, side="right"))
        low = np.zeros(1 << _LOW_BITS, np.int64)
        for block in _blocks(lengths):
            inside = block[block >> _LOW_BITS == bucket]
            low += np.bincount(inside & ((1 << _LOW_BITS) - 1), minlength=len(low))
        before = int(ends[bucket] - high[bucket])
        found.append((bucket << _LOW_BITS) + int(np.searchsorted(np.cumsum(low), rank - before, side="right")))
    return found


def bin_lengths(lengths: Lengths, per_octave: int = 1) -> LengthBins:
    """Count lengths in `per_octave` bins for each doubling, from the shortest to the longest.

    With 1 the bins are 1, 2-3, 4-7, 8-15 …; lengths of 0, where there are any, have a bin of their own.
    """
    summary = summarize_lengths(lengths)
    if summary is None:
        nothing = np.zeros(0, np.int64)
        return LengthBins(np.ones(1, np.int64), nothing, nothing)
    octaves = summary.longest.bit_length() + 1
    powers = 2.0 ** (np.arange(octaves * per_octave + 1) / per_octave)
    edges = np.unique(np.concatenate([[0], np.ceil(powers)]).astype(np.int64))
    first = int(np.searchsorted(edges, summary.shortest, side="right")) - 1
    last = int(np.searchsorted(edges, summary.longest, side="right"))
    edges = edges[first : last + 1]
    sequences, tokens = np.zeros(len(edges) - 1, np.int64), np.zeros(len(edges) - 1, np.int64)
    for block in _blocks(lengths):
        place = np.searchsorted(edges, block, side="right") - 1
        sequences += np.bincount(place, minlength=len(sequences))
        # Sums of doubles are exact up to 2^53, which no block of 2^20 lengths below 2^31 reaches.
        tokens += np.bincount(place, weights=block, minlength=len(tokens)).astype(np.int64)
    return LengthBins(edges, sequences, tokens)


def _blocks(lengths: Lengths) -> Iterator[Lengths]:
    for start in range(0, len(lengths), _BLOCK):
        yield lengths[start : start + _BLOCK]
