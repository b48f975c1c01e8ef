"""Token files: PREFIX.bin holds the tokens, PREFIX.idx says where each sequence and document lies.

The form is Megatron-LM's (https://github.com/NVIDIA/Megatron-LM). `.idx`, little endian, unpadded: magic (9
bytes), u64 version, u8 dtype code, u64 S sequences, u64 D = documents + 1, i32[S] lengths in tokens, i64[S] byte
offsets into `.bin`, i64[D] first sequence of each document, and i8[S] modes in multimodal files only.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from megacore.artifact.files import workspace_errors
from megacore.errors import DataFormatError

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
_MAX_LENGTH = 2**31 - 1
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


class IndexedDataset:
    """Reader of a pair of token files, memory-mapped and checked as a whole when it is opened.

    `dataset[i]` is sequence i as a read-only view of the tokens. Raises DataFormatError for a file that is
    missing or damaged; nothing in the files can make a later access leave the mapped range.
    """

    def __init__(self, prefix: str | Path) -> None:
        """Open PREFIX.bin and PREFIX.idx."""
        self.prefix = str(prefix)
        index = _map_file(idx_path(prefix))
        self.dtype, sequences, entries = _read_header(idx_path(prefix), index)
        self.lengths: npt.NDArray[np.int32] = index[34 : 34 + 4 * sequences].view("<i4")
        """i32[S]: tokens of each sequence."""
        self.pointers: npt.NDArray[np.int64] = index[34 + 4 * sequences : 34 + 12 * sequences].view("<i8")
        """i64[S]: byte offset of each sequence in `.bin`."""
        start = 34 + 12 * sequences
        self.document_indices: npt.NDArray[np.int64] = index[start : start + 8 * entries].view("<i8")
        """i64[D]: sequence at which each document starts; the last entry is S."""
        data = _map_file(bin_path(prefix))
        self._check(data.size)
        self.tokens: npt.NDArray[Any] = data.view(self.dtype)
        """Every token, back to back."""

    @property
    def documents(self) -> int:
        """Number of documents, empty ones included."""
        return len(self.document_indices) - 1

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> npt.NDArray[Any]:
        return self.get(sequence)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """`length` tokens (default: all that follow) of a sequence from `offset` on, as a view.

        Raises IndexError when the sequence has no such range.
        """
        if not 0 <= sequence < len(self):
            raise IndexError(f"{self.prefix} has no sequence {sequence}: it has {len(self)}")
        available = int(self.lengths[sequence]) - offset
        length = available if length is None else length
        if offset < 0 or not 0 <= length <= available:
            raise IndexError(f"{self.prefix}: sequence {sequence} has no {length} tokens from {offset} on")
        start = int(self.pointers[sequence]) // self.dtype.itemsize + offset
        return self.tokens[start : start + length]

    def token_range(self, first: int, last: int) -> npt.NDArray[Any]:
        """The tokens of the sequences first … last-1, as one view."""
        return self.tokens[self._token_offset(first) : self._token_offset(last)]

    def count_tokens(self, first: int, last: int) -> int:
        """Number of tokens in the sequences first … last-1."""
        return self._token_offset(last) - self._token_offset(first)

    def _token_offset(self, sequence: int) -> int:
        if sequence == len(self):
            return len(self.tokens)
        return int(self.pointers[sequence]) // self.dtype.itemsize

    def _check(self, size: int) -> None:
        """Every length, pointer and document index, and the size of `.bin`. Raises DataFormatError."""
        path, itemsize = idx_path(self.prefix), self.dtype.itemsize
        expected = 0
        for block in _blocks(len(self.lengths)):
            lengths = self.lengths[block].astype(np.int64)
            if lengths.min() < 0:
                bad = block.start + int(lengths.argmin())
                raise DataFormatError(f"{path} gives sequence {bad} the length {lengths.min()}: write the files again")
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
            raise DataFormatError(
                f"{bin_path(self.prefix)} has {size} bytes, but its index counts {expected // itemsize} tokens of "
                f"{itemsize} bytes = {expected}: the two files do not belong together, or one was cut off"
            )
        self._check_documents(path)

    def _check_documents(self, path: Path) -> None:
        starts = self.document_indices
        if starts[0] != 0 or starts[-1] != len(self):
            raise DataFormatError(
                f"{path}: its documents span the sequences {starts[0]} to {starts[-1]} instead of 0 to {len(self)}: "
                "write the files again"
            )
        for block in _blocks(len(starts) - 1):
            falling = np.flatnonzero(starts[block.start : block.stop] > starts[block.start + 1 : block.stop + 1])
            if falling.size:
                bad = block.start + int(falling[0])
                raise DataFormatError(f"{path}: document {bad + 1} starts before document {bad}: write the files again")


def _blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, _BLOCK):
        yield slice(start, min(start + _BLOCK, count))


def _map_file(path: Path) -> npt.NDArray[np.uint8]:
    try:
        if path.stat().st_size == 0:  # nothing to map: the operating system refuses empty ranges
            return np.empty(0, np.uint8)
        return np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    except FileNotFoundError as error:
        raise DataFormatError(
            f"{path} does not exist: give the path of a pair of token files without .bin/.idx"
        ) from error
    except OSError as error:
        raise DataFormatError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_header(path: Path, index: npt.NDArray[np.uint8]) -> tuple[np.dtype[Any], int, int]:
    """(token type, S, D) of an index whose size agrees with them. Raises DataFormatError."""
    if index.size < HEADER.size:
        raise DataFormatError(f"{path} has {index.size} bytes, less than the header's {HEADER.size}: write it again")
    magic, version, code, sequences, entries = HEADER.unpack(index[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise DataFormatError(f"{path} begins with {magic!r} instead of {MAGIC!r}: it is not an index of token files")
    if version != FORMAT_VERSION:
        raise DataFormatError(f"{path} has format version {version}; only {FORMAT_VERSION} is known")
    dtype = DTYPES.get(code)
    if dtype is None or dtype.kind == "f":
        raise DataFormatError(f"{path} has dtype code {code}: tokens are integers (codes 1 to 5, or 8 for u16)")
    if entries < 1:
        raise DataFormatError(f"{path} has no document entries: even an index of nothing has one")
    expected = HEADER.size + 12 * sequences + 8 * entries
    if index.size not in (expected, expected + sequences):
        raise DataFormatError(
            f"{path} has {index.size} bytes, but {sequences} sequences and {entries} document entries take "
            f"{expected} (or {expected + sequences} with modes): it was cut off or is damaged"
        )
    return dtype, sequences, entries


class IndexedDatasetWriter:
    """Writes a pair of token files, document by document, as a context manager.

    Tokens are streamed; 20 bytes per document stay in memory. When the block ends with an exception, no file is
    left. Raises WorkspaceError when the disk refuses.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        """Start PREFIX.bin with tokens of `dtype`, one of DTYPES."""
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.tokens = 0
        self._code = next(code for code, known in DTYPES.items() if known == self.dtype)
        self._lengths = array("i")
        self._document_indices = array("q", [0])
        with workspace_errors(bin_path(prefix)):
            self._file = open(bin_path(prefix), "wb", buffering=1 << 20)  # noqa: SIM115 (closed by __exit__)

    @property
    def sequences(self) -> int:
        """Sequences written so far."""
        return len(self._lengths)

    @property
    def documents(self) -> int:
        """Documents written so far, empty ones included."""
        return len(self._document_indices) - 1

    def add_document(self, ids: Sequence[int] | npt.NDArray[Any]) -> None:
        """Append a document of one sequence; an empty one adds a document entry and no sequence."""
        tokens = np.asarray(ids, dtype=self.dtype)
        if tokens.size > _MAX_LENGTH:
            raise DataFormatError(
                f"document {self.documents} has {tokens.size} tokens; the format ends at {_MAX_LENGTH}: divide it"
            )
        if tokens.size:
            with workspace_errors(bin_path(self.prefix)):
                self._file.write(tokens.data)
            self._lengths.append(tokens.size)
            self.tokens += tokens.size
        self._document_indices.append(len(self._lengths))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with workspace_errors(bin_path(self.prefix)):
                self._file.close()
            if kind is None:
                self._write_index()
                return
        except BaseException:
            self._discard()
            raise
        self._discard()

    def _discard(self) -> None:
        for path in (bin_path(self.prefix), idx_path(self.prefix)):
            path.unlink(missing_ok=True)

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, np.int32)
        path = idx_path(self.prefix)
        with workspace_errors(path), open(path, "wb") as file:
            file.write(HEADER.pack(MAGIC, FORMAT_VERSION, self._code, len(lengths), len(self._document_indices)))
            file.write(lengths.astype("<i4", copy=False).data)
            start = 0
            for block in _blocks(len(lengths)):
                ends = start + np.cumsum(lengths[block], dtype="<i8") * self.dtype.itemsize
                file.write((ends - lengths[block].astype("<i8") * self.dtype.itemsize).data)
                start = int(ends[-1])
            file.write(np.frombuffer(self._document_indices, np.int64).astype("<i8", copy=False).data)
