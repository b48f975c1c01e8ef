"""Samples that keep documents whole, padded at the end: the sample index of the two forms that are not `packed`.

The names are GPT-NeoX's (https://github.com/EleutherAI/gpt-neox, `pack_impl`). As there, `pack_until_overflow` puts
whole documents into a sample as long as they fit, and `unpacked` puts one into each. Otherwise than there:

* with `pack_until_overflow` a document longer than a sample is divided into consecutive ones, which share their ends
  as those of `packed` do, so that each of its tokens is learnt; NeoX keeps its first tokens alone. The rest of such a
  document is filled up like any other. With `unpacked` both keep the first tokens;
* padding is -1, which counts in no loss; NeoX pads with token 0, which it learns;
* the documents are those of the document index, in its order, to the end of its last epoch.

The rows mean what those of `packed` do, (position in the document index, token offset there) of each sample's first
token. A sample ends before the next row's document, or, where the next row is within the same document, `extra` tokens
after its offset; what exceeds seq_length + extra is cut.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.data import _compiled
from megacore.data.index_options import Packing

_INT32_MAX = 2**31 - 1


def pack_sample_index(
    lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    seq_length: int,
    packing: Packing,
    extra: int,
) -> npt.NDArray[Any]:
    """Where each sample of whole documents begins, and the end of the last: (samples + 1, 2), i32 or i64.

    Args:
        lengths: tokens of each sequence; empty ones are passed over.
        document_index: the sequences in the order in which they are read, once per epoch.
        seq_length: tokens of a sample, s.
        packing: "pack_until_overflow" or "unpacked".
        extra: 1 when a sample reads one token beyond seq_length as its last label, else 0.
    """
    assert packing != "packed"
    wide = len(document_index) > _INT32_MAX
    if packing == "pack_until_overflow":
        pack = _compiled.pack_until_overflow_int64 if wide else _compiled.pack_until_overflow_int32
        return pack(lengths, document_index, seq_length, extra)
    positions = np.flatnonzero(lengths[document_index])
    rows = np.zeros((len(positions) + 1, 2), np.int64 if wide else np.int32)
    rows[:-1, 0] = positions
    rows[-1, 0] = len(document_index)
    return rows


def least_samples(tokens: int, sequences: int, seq_length: int, packing: Packing, extra: int) -> int:
    """How many samples `pack_sample_index` makes at least, whatever the order of the documents.

    Of `tokens` tokens in `sequences` sequences that are not empty; for all epochs together. With "unpacked" it is
    their number.
    """
    return sequences if packing == "unpacked" else -(-tokens // (seq_length + extra))
