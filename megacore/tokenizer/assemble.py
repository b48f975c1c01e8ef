"""The tokens of a batch as they are stored: end-of-document tokens put in, ids checked and narrowed."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.errors import DataFormatError
from megacore.tokenizer.load import Encoded


@dataclass(frozen=True)
class TokenBatch:
    """Consecutive documents as `IndexedDatasetWriter.add_batch` takes them."""

    ids: npt.NDArray[Any]
    """[tokens] of all sequences, end to end."""
    lengths: npt.NDArray[np.int64]
    """[sequences], none of them 0."""
    sequences: npt.NDArray[np.int64]
    """[documents]: how many sequences each has."""


def assemble(
    encoded: Encoded,
    pieces: npt.NDArray[np.int64] | None,
    *,
    eod_id: int | None,
    vocab_size: int,
    dtype: np.dtype[Any],
) -> TokenBatch:
    """Make sequences of encoded texts, of which the next `pieces[i]` (None: one) belong to document i.

    A text without a token is no sequence, and a document without one gets no `eod_id` at its end. Raises
    DataFormatError for an id that is not in the vocabulary.
    """
    ids = encoded.ids
    if ids.size and (int(ids.max()) >= vocab_size or (ids.dtype.kind == "i" and int(ids.min()) < 0)):
        bad = int(ids[(ids >= vocab_size) | (ids < 0)][0])
        raise DataFormatError(
            f"the tokenizer gave the token id {bad}, but its vocabulary has {vocab_size} entries: its files are damaged"
        )
    full = encoded.lengths > 0
    lengths = encoded.lengths[full]
    if pieces is None:
        sequences = full.astype(np.int64)
    else:
        before = np.concatenate([[0], np.cumsum(full)])
        ends = np.cumsum(pieces)
        sequences = before[ends] - before[ends - pieces]
    if eod_id is None:
        return TokenBatch(ids.astype(dtype, copy=False), lengths, sequences)
    last = np.cumsum(sequences)[sequences > 0] - 1
    ends = np.cumsum(lengths)[last] + np.arange(len(last))
    stored = np.empty(ids.size + len(last), dtype)
    is_text = np.ones(stored.size, np.bool_)
    is_text[ends] = False
    stored[is_text] = ids
    stored[ends] = eod_id
    lengths[last] += 1
    return TokenBatch(stored, lengths, sequences)
