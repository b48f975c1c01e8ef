"""The index maps' inner walks in NumPy: the definition that the compiled helpers are held against."""

from typing import Any

import numpy as np
import numpy.typing as npt


def build_sample_index(
    lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    seq_length: int,
    num_samples: int,
    extra: int,
    dtype: npt.DTypeLike = np.int32,
) -> npt.NDArray[Any]:
    """Where each sample begins, shape (num_samples + 1, 2): position in `document_index`, token offset there.

    Consecutive samples of `seq_length` + `extra` tokens overlap by `extra`. The last row is where one more sample
    would begin. Raises ValueError when the documents end first.
    """
    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    if num_samples and (not len(ends) or ends[-1] < num_samples * seq_length + extra):
        raise ValueError("the documents end before the samples do")
    rows = np.zeros((num_samples + 1, 2), dtype)
    # A sample's boundary lies in the document of the last token read so far, the overlap included.
    last_read = np.arange(1, num_samples + 1, dtype=np.int64) * seq_length + extra
    position = np.searchsorted(ends, last_read, side="left")
    start = ends[position] - lengths[document_index[position]]
    rows[1:, 0] = position
    rows[1:, 1] = last_read - extra - start
    return rows


def shuffle(values: npt.NDArray[Any], seed: int) -> None:
    """Shuffle in place as the first use of `numpy.random.RandomState(seed)` does (Fisher and Yates, from the end)."""
    np.random.RandomState(seed).shuffle(values)
