"""What every data set of samples offers, and the arrays that samples are read into."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Batch = npt.NDArray[np.int64]
"""Token ids [b, s + 1]: s inputs and their labels, shifted by one. -1 is padding: as an input it is any token, as a
label it counts in no loss."""
Indices = Sequence[int] | npt.NDArray[np.integer[Any]]


class Dataset(Protocol):
    """Samples in the order in which they are read."""

    seq_length: int
    """Tokens of a sample, s."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def gather(self, indices: Indices, out: Batch | None = None) -> Batch:
        """Samples as one batch [b, s + 1], in `out` if it is given. Raises IndexError, DataFormatError."""
        ...


def as_array(indices: Indices) -> npt.NDArray[np.int64]:
    """Indices as the compiled parts take them."""
    if isinstance(indices, range):
        return np.arange(indices.start, indices.stop, indices.step, dtype=np.int64)
    return np.ascontiguousarray(indices, dtype=np.int64)


def empty_batch(samples: int, seq_length: int) -> Batch:
    """A batch to be filled."""
    return np.empty((samples, seq_length + 1), np.int64)
