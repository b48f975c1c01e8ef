"""Packing by best fit, which divides only documents longer than a sample.

The method is of Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv:2404.10830.
A document longer than a sample is divided into full samples, which overlap as with "packed", and a
rest. Rests and shorter documents are packed by best-fit-decreasing: from the longest to the
shortest, each into the sample with the least sufficient space. The end of a sample is padded.

The document index has one entry for each piece. A row of the sample index is (position, first token
of the piece there); the sample ends before the next row's position, and its pieces after the first
are rests. Each epoch is packed and shuffled separately, so that no document is repeated before all
are read, and the maps of more epochs begin with those of fewer.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.data import _compiled
from megacore.data.index_directory import IndexMaps
from megacore.data.index_plans import INT32_MAX, shuffle_type

Lengths = npt.NDArray[np.int32]


def build_best_fit(
    lengths: Lengths, first: int, last: int, epochs: int, seq_length: int, seed: int, extra: int
) -> IndexMaps:
    """Build the maps of the split with the sequences first … last-1.

    One random state is used for all epochs: for each, it shuffles first the sequences and then the
    samples.
    """
    random_state = _compiled.RandomState(seed)
    samples, pieces = _compiled.count_best_fit(lengths[first:last], seq_length, extra)
    document_index = np.empty(epochs * pieces, np.int32)
    wide = len(document_index) > INT32_MAX
    sample_index: npt.NDArray[Any] = np.empty(
        (epochs * samples + 1, 2), np.int64 if wide else np.int32
    )
    sample_index[-1] = len(document_index), 0
    shuffle_index: npt.NDArray[Any] = np.arange(
        epochs * samples, dtype=shuffle_type(epochs * samples)
    )
    pack = _compiled.pack_best_fit_int64 if wide else _compiled.pack_best_fit_int32
    for epoch in range(epochs):
        sequences = np.arange(first, last, dtype=np.int32)
        random_state.shuffle(sequences)
        position, row = epoch * pieces, epoch * samples
        pack(
            lengths,
            sequences,
            seq_length,
            extra,
            position,
            document_index[position : position + pieces],
            sample_index[row : row + samples],
        )
        random_state.shuffle(shuffle_index[row : row + samples])
    return IndexMaps(document_index, sample_index, shuffle_index)


def rest_starts(lengths: npt.NDArray[Any], seq_length: int, extra: int) -> npt.NDArray[np.int64]:
    """Return the first token of the rest of each document; 0 for one that fits into a sample."""
    longer = lengths.astype(np.int64) - 1 - extra
    return np.where(lengths > seq_length + extra, longer // seq_length * seq_length, 0)


def piece_counts(lengths: npt.NDArray[Any], seq_length: int, extra: int) -> npt.NDArray[np.int64]:
    """Return the number of pieces of each document; 0 for an empty one."""
    return rest_starts(lengths, seq_length, extra) // seq_length + (lengths > 0)
