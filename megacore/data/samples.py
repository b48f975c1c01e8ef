"""What every data set of samples offers, and the arrays that samples are read into."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Batch = npt.NDArray[np.int64]
"""Rows of ids [b, width]; -1 is padding, which counts in no loss.

GPT: s + 1 ids, inputs and their labels, shifted by one. BERT: 3 s + 1, tokens, labels (-1 where nothing is predicted),
segments, and whether the second segment is not the first one's continuation. T5: s + s_d, what the encoder reads and
what the decoder writes. `megacore.models.inputs` takes them apart.
"""
Indices = Sequence[int] | npt.NDArray[np.integer[Any]]
Rows = npt.NDArray[np.int64]


class Dataset(Protocol):
    """Samples in the order in which they are read."""

    seq_length: int
    """Tokens of a sample, s."""
    width: int
    """Ids of a row."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def gather(self, indices: Indices, out: Batch | None = None) -> Batch:
        """Samples as one batch [b, width], in `out` if it is given. Raises IndexError, DataFormatError."""
        ...


class MemberDataset(Dataset, Protocol):
    """A data set of one pair of token files, which others can be made of."""

    def gather(self, indices: Indices, out: Batch | None = None, rows: Rows | None = None) -> Batch:
        """Samples as one batch [b, width].

        Args:
            indices: of the samples, in shuffled order.
            out: filled and returned instead of a new array; C-contiguous.
            rows: of `out`, for each index; None means the first ones.

        Raises:
            IndexError: the split has no such sample.
            DataFormatError: the maps do not belong to the tokens.
        """
        ...


def as_array(indices: Indices) -> npt.NDArray[np.int64]:
    """Indices as the compiled parts take them."""
    if isinstance(indices, range):
        return np.arange(indices.start, indices.stop, indices.step, dtype=np.int64)
    return np.ascontiguousarray(indices, dtype=np.int64)


def empty_batch(samples: int, width: int) -> Batch:
    """A batch to be filled."""
    return np.empty((samples, width), np.int64)
