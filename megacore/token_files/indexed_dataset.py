"""Reader of token files: PREFIX.bin with the tokens, PREFIX.idx with sequences and documents.

The format is that of Megatron-LM (https://github.com/NVIDIA/Megatron-LM). `.idx` is little endian
and unpadded: magic (9 bytes), u64 version, u8 dtype code, u64 S sequences, u64 D = documents + 1,
i32[S] lengths in tokens, i64[S] byte offsets into `.bin`, i64[D] first sequence of each document,
and i8[S] modes in multimodal files only.

A tokens directory contains a pair of token files, or `members.json` with the tokens directories of
a blend.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.artifact.files import access_error, read_json, reason_of, write_json
from megacore.errors import DataFormatError
from megacore.paths import exists

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
"""Token types by the dtype code in the header."""
UINT16_LIMIT = 65500
"""Vocabularies below this many entries are stored as u16, others as i32."""
MAX_LENGTH = 2**31 - 1
"""Maximum number of tokens of a sequence, whose length is stored as an i32."""
_BLOCK = 1 << 20
"""Rows that are checked or written at a time, which bounds the size of temporary arrays."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type in which tokens of a vocabulary of this size are stored."""
    return DTYPES[8] if vocab_size < UINT16_LIMIT else DTYPES[4]


def bin_path(prefix: str | Path) -> Path:
    """Return the path of the `.bin` file of `prefix`."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the path of the `.idx` file of `prefix`."""
    return Path(f"{prefix}.idx")


def blocks(count: int) -> Iterator[slice]:
    """Yield the rows 0 … count-1 as slices of bounded size."""
    for start in range(0, count, _BLOCK):
        yield slice(start, min(start + _BLOCK, count))


BLEND_VERSION = 1
"""Version of the blend stage, increased whenever its output changes."""
MEMBERS_NAME = "members.json"
TOKENS_NAMES = ("tokens_text_document", "tokens_text_sentence")
"""Possible names of token files without .bin/.idx: one sequence per document, or per sentence."""


class IndexedDataset:
    """A memory-mapped pair of token files, checked completely when it is opened.

    `dataset[i]` is sequence i as a read-only view of the tokens. Raises DataFormatError for a file
    that is missing or damaged, so that no later access can leave the mapped range.
    """

    def __init__(self, prefix: str | Path) -> None:
        """Open PREFIX.bin and PREFIX.idx."""
        self.prefix = str(prefix)
        index = _map_file(idx_path(prefix))
        self.dtype, sequences, entries = _read_header(idx_path(prefix), index)
        self.lengths: npt.NDArray[np.int32] = index[34 : 34 + 4 * sequences].view("<i4")
        """i32[S]: number of tokens of each sequence."""
        self.pointers: npt.NDArray[np.int64] = index[34 + 4 * sequences : 34 + 12 * sequences].view(
            "<i8"
        )
        """i64[S]: byte offset of each sequence in `.bin`."""
        start = 34 + 12 * sequences
        self.document_indices: npt.NDArray[np.int64] = index[start : start + 8 * entries].view(
            "<i8"
        )
        """i64[D]: index of the first sequence of each document; the last entry is S."""
        data = _map_file(bin_path(prefix))
        self._check(data.size)
        self.tokens: npt.NDArray[Any] = data.view(self.dtype)
        """Tokens of all sequences, concatenated."""

    @property
    def documents(self) -> int:
        """Number of documents, empty ones included."""
        return len(self.document_indices) - 1

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> npt.NDArray[Any]:
        return self.get(sequence)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Return a view of `length` tokens (default: the rest) of a sequence, from `offset` on.

        Raises IndexError if the sequence has no such range.
        """
        if not 0 <= sequence < len(self):
            raise IndexError(f"{self.prefix} has no sequence {sequence}: it has {len(self)}")
        available = int(self.lengths[sequence]) - offset
        length = available if length is None else length
        if offset < 0 or not 0 <= length <= available:
            raise IndexError(
                f"{self.prefix}: sequence {sequence} has no {length} tokens from {offset} on"
            )
        start = int(self.pointers[sequence]) // self.dtype.itemsize + offset
        return self.tokens[start : start + length]

    def token_range(self, first: int, last: int) -> npt.NDArray[Any]:
        """Return the tokens of the sequences first … last-1 as one view."""
        return self.tokens[self._token_offset(first) : self._token_offset(last)]

    def count_tokens(self, first: int, last: int) -> int:
        """Return the number of tokens in the sequences first … last-1."""
        return self._token_offset(last) - self._token_offset(first)

    def _token_offset(self, sequence: int) -> int:
        if sequence == len(self):
            return len(self.tokens)
        return int(self.pointers[sequence]) // self.dtype.itemsize

    def _check(self, size: int) -> None:
        """Check every length, pointer and document index, and the size of `.bin`.

        Raises DataFormatError.
        """
        path, itemsize = idx_path(self.prefix), self.dtype.itemsize
        expected = 0
        for block in blocks(len(self.lengths)):
            lengths = self.lengths[block].astype(np.int64)
            if lengths.min() < 0:
                bad = block.start + int(lengths.argmin())
                raise DataFormatError(
                    f"{path} gives sequence {bad} the length {lengths.min()}: write the files again"
                )
            ends = expected + np.cumsum(lengths) * itemsize
            wrong = np.flatnonzero(self.pointers[block] != ends - lengths * itemsize)
            if wrong.size:
                bad = block.start + int(wrong[0])
                raise DataFormatError(
                    f"{path} puts sequence {bad} at byte {self.pointers[bad]} instead of "
                    f"{ends[wrong[0]] - lengths[wrong[0]] * itemsize}: write the files again"
                )
            expected = int(ends[-1])
        if expected != size:
            raise DataFormatError(self._wrong_size(size, expected))
        self._check_documents(path)

    def _wrong_size(self, size: int, expected: int) -> str:
        itemsize, starts = self.dtype.itemsize, self.document_indices
        nonempty = sum(
            int(
                np.count_nonzero(
                    starts[block.start : block.stop] < starts[block.start + 1 : block.stop + 1]
                )
            )
            for block in blocks(len(starts) - 1)
        )
        difference = (
            f"{bin_path(self.prefix)} has {size} bytes, but its index counts "
            f"{expected // itemsize} tokens of {itemsize} bytes = {expected}: "
        )
        if size == expected + nonempty * itemsize:
            return (
                f"{difference}one token more per document is what "
                "Megatron-DeepSpeed's preprocess_data.py writes with --append-eod, whose index "
                "does not count the end-of-document tokens; tokenize the text again with `megacore "
                "tokenize --append-eod`"
            )
        return f"{difference}the two files do not belong together, or one was cut off"

    def _check_documents(self, path: Path) -> None:
        starts = self.document_indices
        if starts[0] != 0 or starts[-1] != len(self):
            raise DataFormatError(
                f"{path}: its documents span the sequences {starts[0]} to {starts[-1]} instead of "
                f"0 to {len(self)}: write the files again"
            )
        for block in blocks(len(starts) - 1):
            falling = np.flatnonzero(
                starts[block.start : block.stop] > starts[block.start + 1 : block.stop + 1]
            )
            if falling.size:
                bad = block.start + int(falling[0])
                raise DataFormatError(
                    f"{path}: document {bad + 1} starts before document {bad}: write the files "
                    "again"
                )


def _map_file(path: Path) -> npt.NDArray[np.uint8]:
    try:
        if path.stat().st_size == 0:  # the operating system cannot map an empty file
            return np.empty(0, np.uint8)
        return np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    except FileNotFoundError as error:
        raise DataFormatError(
            f"{path} does not exist: give the path of a pair of token files without .bin/.idx"
        ) from error
    except OSError as error:
        raise access_error(error, path) or DataFormatError(
            f"{path} cannot be read: {error.strerror or error}"
        ) from error


def _read_header(path: Path, index: npt.NDArray[np.uint8]) -> tuple[np.dtype[Any], int, int]:
    """Return token type, S and D of an index after checking its size. Raises DataFormatError."""
    if index.size < HEADER.size:
        raise DataFormatError(
            f"{path} has {index.size} bytes, less than the header's {HEADER.size}: write it again"
        )
    magic, version, code, sequences, entries = HEADER.unpack(index[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise DataFormatError(
            f"{path} begins with {magic!r} instead of {MAGIC!r}: it is not an index of token files"
        )
    if version != FORMAT_VERSION:
        raise DataFormatError(
            f"{path} has format version {version}, not {FORMAT_VERSION}: write it again"
        )
    dtype = DTYPES.get(code)
    if dtype is None or dtype.kind == "f":
        raise DataFormatError(
            f"{path} has dtype code {code}: tokens are integers (codes 1 to 5, or 8 for u16)"
        )
    if entries < 1:
        raise DataFormatError(f"{path} has no document entries: even an index of nothing has one")
    expected = HEADER.size + 12 * sequences + 8 * entries
    if index.size not in (expected, expected + sequences):
        raise DataFormatError(
            f"{path} has {index.size} bytes, but {sequences} sequences and {entries} document "
            f"entries take {expected} (or {expected + sequences} with modes): it was cut off or is "
            "damaged"
        )
    return dtype, sequences, entries


def write_members(directory: Path, members: Sequence[Path]) -> None:
    """Write `members.json`, which lists the tokens directories of a blend in this order."""
    write_json(
        directory / MEMBERS_NAME,
        {"members": [os.path.relpath(member, directory) for member in members]},
    )


def token_prefixes(directory: str | Path) -> tuple[str, ...]:
    """Return the prefix of a directory's token files, or those of its members.

    Raises DataFormatError if the directory, or a member, has no token files.
    """
    listing = Path(directory, MEMBERS_NAME)
    if not exists(listing):
        prefix = _prefix(Path(directory))
        if prefix is None:
            raise DataFormatError(
                f"{directory} has neither token files nor {MEMBERS_NAME}: run the tokenize stage "
                "again"
            )
        return (prefix,)
    prefixes = []
    for member in _members(listing):
        prefix = _prefix(member)
        if prefix is None:
            raise DataFormatError(
                f"{listing} names {member}, which has no token files: run the flow again"
            )
        prefixes.append(prefix)
    return tuple(prefixes)


def _prefix(directory: Path) -> str | None:
    """Return the prefix of the token files in a directory, or None if it has none."""
    prefixes = (directory / name for name in TOKENS_NAMES)
    return next((str(prefix) for prefix in prefixes if exists(idx_path(prefix))), None)


def _members(listing: Path) -> list[Path]:
    try:
        members = read_json(listing)["members"]
        if not isinstance(members, list) or not members:
            raise TypeError(f"its members are {members!r}")
        return [Path(os.path.normpath(listing.parent / str(member))) for member in members]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataFormatError(
            f"{listing} is damaged ({reason_of(error)}): run the flow again"
        ) from error
