"""Small token files for tests."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter


def write_tokens(prefix: Path, lengths: Sequence[int], dtype: str = "u2") -> str:
    """Write token files whose tokens count upwards through all documents.

    A length of 0 is an empty document.
    """
    start = 0
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for length in lengths:
            writer.add_document(np.arange(start, start + length) % 60000)
            start += length
    return str(prefix)
