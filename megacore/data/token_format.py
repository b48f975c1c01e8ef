"""What is common to reading and writing token files: the header, the types, and where the two files are."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
FORMAT_VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
"""By code in the header."""
UINT16_LIMIT = 65500
"""Vocabularies below this many entries are stored as u16, others as i32."""
MAX_LENGTH = 2**31 - 1
"""Tokens of a sequence: its length is an i32."""
_BLOCK = 1 << 20
"""Rows that are checked or written at a time: temporaries stay small for any number of sequences."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type that tokens of a vocabulary are stored in."""
    return DTYPES[8] if vocab_size < UINT16_LIMIT else DTYPES[4]


def bin_path(prefix: str | Path) -> Path:
    """Where the tokens of `prefix` are."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Where the index of `prefix` is."""
    return Path(f"{prefix}.idx")


def blocks(count: int) -> Iterator[slice]:
    """The rows 0 … count-1 in slices of bounded size."""
    for start in range(0, count, _BLOCK):
        yield slice(start, min(start + _BLOCK, count))
