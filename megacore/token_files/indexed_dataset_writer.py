"""Writer of token files: from batches of documents, by merging files, or permuted.

Both files are written under temporary names and renamed when they are complete, `.idx` last.
"""

import hashlib
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from megacore.artifact.files import link_or_copy, sync_directory, temporary_of, workspace_errors
from megacore.errors import DataFormatError
from megacore.token_files.indexed_dataset import (
    DTYPES,
    FORMAT_VERSION,
    HEADER,
    MAGIC,
    MAX_LENGTH,
    IndexedDataset,
    bin_path,
    blocks,
    idx_path,
)

_COPY_BYTES = 1 << 24
_GATHER_DOCUMENTS = 1 << 14
"""Number of documents gathered at a time."""


class IndexedDatasetWriter:
    """A context manager that writes a pair of token files.

    Tokens are streamed; 4 bytes per sequence and 8 per document stay in memory. After an exception
    no file is left and an older pair is unchanged. Raises DataFormatError for a token that `dtype`
    cannot hold or a sequence too long for the format, WorkspaceError if writing fails.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        """Create the files of `prefix` for tokens of `dtype`, one of DTYPES."""
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.tokens = 0
        self.empty_documents = 0
        self.sha256: dict[str, str] = {}
        """Hex digests by suffix (`.bin`, `.idx`), set when the files are complete."""
        self._code = next(code for code, known in DTYPES.items() if known == self.dtype)
        self._lengths = array("i")
        self._document_indices = array("q", [0])
        self._digest = hashlib.sha256()
        self._temporary = {path: temporary_of(path) for path in self._paths}
        self._older_index = temporary_of(Path(f"{idx_path(prefix)}.old"))
        with workspace_errors(bin_path(prefix)):
            self._file = open(self._temporary[bin_path(prefix)], "wb", buffering=1 << 20)  # noqa: SIM115 (__exit__)

    @property
    def sequences(self) -> int:
        """Number of sequences written so far."""
        return len(self._lengths)

    @property
    def documents(self) -> int:
        """Number of documents written so far, empty ones included."""
        return len(self._document_indices) - 1

    def add_document(
        self, ids: Sequence[int] | npt.NDArray[Any], lengths: Sequence[int] | None = None
    ) -> None:
        """Append a document of one sequence, or of sequences with the given lengths.

        An empty document has no sequence.
        """
        tokens = np.asarray(ids)
        if tokens.size == 0:
            tokens = tokens.astype(self.dtype)
        parts = (
            [tokens.size] * bool(tokens.size)
            if lengths is None
            else [length for length in lengths if length]
        )
        self.add_batch(tokens, np.array(parts, np.int64), np.array([len(parts)], np.int64))

    def add_batch(
        self,
        ids: npt.NDArray[Any],
        lengths: npt.NDArray[np.integer[Any]],
        sequences: npt.NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """Append documents.

        Args:
            ids: tokens [n] of all sequences.
            lengths: number of tokens of each sequence [S].
            sequences: number of sequences of each document [documents]. If None, each length is
                that of a document, and a length of 0 is an empty document.
        """
        if sequences is None:
            sequences = (lengths > 0).astype(np.int64)
            lengths = lengths[lengths > 0]
        if int(lengths.sum()) != ids.size or int(sequences.sum()) != lengths.size:
            raise ValueError(f"{ids.size} ids in {lengths.size} sequences do not add up")
        if lengths.size and int(lengths.max()) > MAX_LENGTH:
            raise DataFormatError(
                f"a sequence after document {self.documents} has {lengths.max()} tokens; the "
                f"format ends at {MAX_LENGTH}: divide it"
            )
        self._check_ids(ids, lengths, sequences)
        starts = self.sequences + np.cumsum(sequences, dtype=np.int64)
        self._write(ids.astype(self.dtype, copy=False))
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        self._document_indices.frombytes(starts.tobytes())
        self.empty_documents += int(np.count_nonzero(sequences == 0))

    def append(self, dataset: IndexedDataset) -> None:
        """Append all documents of other token files, a part at a time.

        Raises DataFormatError if their token type differs, or if they become shorter meanwhile.
        """
        if dataset.dtype != self.dtype:
            raise DataFormatError(
                f"{dataset.prefix} holds tokens of type {dataset.dtype}, and {self.prefix} of "
                f"{self.dtype}: they were made with different tokenizers"
            )
        first = self.sequences
        size = dataset.tokens.nbytes
        with open(bin_path(dataset.prefix), "rb", buffering=0) as file:
            for start in range(0, size, _COPY_BYTES):
                part = _read(file, start, min(_COPY_BYTES, size - start))
                self._write(np.frombuffer(part, self.dtype))
        for block in blocks(len(dataset)):
            self._lengths.frombytes(dataset.lengths[block].tobytes())
        starts = dataset.document_indices
        for block in blocks(dataset.documents):
            after = starts[block.start + 1 : block.stop + 1]
            self._document_indices.frombytes((after + first).astype(np.int64).tobytes())
            self.empty_documents += int(np.count_nonzero(after == starts[block]))

    def _check_ids(
        self,
        ids: npt.NDArray[Any],
        lengths: npt.NDArray[np.integer[Any]],
        sequences: npt.NDArray[np.integer[Any]],
    ) -> None:
        if ids.dtype == self.dtype or self.dtype.kind == "f":
            return
        limit = np.iinfo(self.dtype).max + 1
        low = -1 if self.dtype.kind == "i" else 0
        if not ids.size or (
            int(ids.max()) < limit and (ids.dtype.kind == "u" or int(ids.min()) >= low)
        ):
            return
        bad = int(np.flatnonzero((ids >= limit) | (ids < low))[0])
        sequence = int(np.searchsorted(np.cumsum(lengths), bad, side="right"))
        document = self.documents + int(
            np.searchsorted(np.cumsum(sequences), sequence, side="right")
        )
        raise DataFormatError(
            f"document {document} has the token id {ids[bad]}, beyond the {limit} that "
            f"{bin_path(self.prefix)} can hold: the tokenizer has another vocabulary"
        )

    def _write(self, tokens: npt.NDArray[Any]) -> None:
        data = np.ascontiguousarray(tokens).data.cast("B") if tokens.size else b""
        with workspace_errors(bin_path(self.prefix)):
            self._file.write(data)
        self._digest.update(data)
        self.tokens += tokens.size

    @property
    def _paths(self) -> tuple[Path, Path]:
        return bin_path(self.prefix), idx_path(self.prefix)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            with suppress(OSError):  # on a full disk; the original error is already being raised
                self._file.close()
            with workspace_errors(bin_path(self.prefix)):
                for temporary in (*self._temporary.values(), self._older_index):
                    temporary.unlink(missing_ok=True)

    def _finish(self) -> None:
        """Complete both files and rename them."""
        data, index = self._paths
        with workspace_errors(data):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        self.sha256 = {
            ".bin": self._digest.hexdigest(),
            ".idx": self._write_index(self._temporary[index]),
        }
        with workspace_errors(data):
            self._older_index.unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                link_or_copy(index, self._older_index)
            index.unlink(missing_ok=True)  # an older index must not be combined with the new .bin
            try:
                os.replace(self._temporary[data], data)
            except OSError:
                with suppress(FileNotFoundError):
                    os.replace(self._older_index, index)
                raise
            os.replace(self._temporary[index], index)
            sync_directory(data.parent)

    def _write_index(self, path: Path) -> str:
        digest = hashlib.sha256()
        with workspace_errors(path), open(path, "wb", buffering=1 << 20) as file:
            for part in self._index_parts():
                file.write(part)
                digest.update(part)
            file.flush()
            os.fsync(file.fileno())
        return digest.hexdigest()

    def _index_parts(self) -> "Iterator[bytes | memoryview]":
        lengths = np.frombuffer(self._lengths, np.int32)
        yield HEADER.pack(
            MAGIC, FORMAT_VERSION, self._code, len(lengths), len(self._document_indices)
        )
        yield lengths.astype("<i4", copy=False).tobytes()
        start = 0
        for block in blocks(len(lengths)):
            ends = start + np.cumsum(lengths[block], dtype="<i8") * self.dtype.itemsize
            yield (ends - lengths[block].astype("<i8") * self.dtype.itemsize).data
            start = int(ends[-1])
        yield np.frombuffer(self._document_indices, np.int64).astype("<i8", copy=False).tobytes()


def partition_order(documents: int, partitions: int) -> npt.NDArray[np.int64]:
    """Return the order of documents that are dealt out to partitions, which are then joined.

    Megatron-LM's tools/preprocess_data.py gives line i to partition i modulo `partitions`.
    """
    order = np.arange(documents)
    return np.concatenate([order[first::partitions] for first in range(partitions)])


def permute(
    dataset: IndexedDataset, order: npt.NDArray[np.int64], writer: IndexedDatasetWriter
) -> None:
    """Append the documents of `dataset`, with all their sequences, to `writer` in another order.

    `order` [documents] has their numbers. Reads are random and writes sequential; only a small part
    of the file is in memory at a time.
    """
    with open(bin_path(dataset.prefix), "rb", buffering=0) as file:
        for start in range(0, len(order), _GATHER_DOCUMENTS):
            chosen = order[start : start + _GATHER_DOCUMENTS]
            first, last = dataset.document_indices[chosen], dataset.document_indices[chosen + 1]
            low, high = _byte_offsets(dataset, first), _byte_offsets(dataset, last)
            for part in _parts(high - low):
                places = zip(low[part].tolist(), (high - low)[part].tolist(), strict=True)
                data = b"".join([_read(file, offset, size) for offset, size in places])
                lengths = dataset.lengths[_ranges(first[part], last[part])]
                writer.add_batch(
                    np.frombuffer(data, dataset.dtype), lengths, last[part] - first[part]
                )


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    """Read bytes with pread: the pages of a mapping would count as memory of this process."""
    data = os.pread(file.fileno(), size, offset)
    while len(data) < size:  # a call returns at most 2 GiB
        rest = os.pread(file.fileno(), size - len(data), offset + len(data))
        if not rest:
            raise DataFormatError(
                f"{file.name} became shorter while it was read: merge or permute token files that "
                "nothing writes"
            )
        data += rest
    return data


def _byte_offsets(
    dataset: IndexedDataset, sequences: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the byte offsets of the sequences [n] in `.bin`; index S gives the end of the file."""
    offsets = np.full(sequences.shape, dataset.tokens.nbytes, np.int64)
    inside = sequences < len(dataset)
    offsets[inside] = dataset.pointers[sequences[inside]]
    return offsets


def _parts(sizes: npt.NDArray[np.int64]) -> Iterator[slice]:
    """Yield slices of consecutive documents of about _COPY_BYTES, at least one document each."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _COPY_BYTES, side="right")))
        yield slice(start, stop)
        start = stop


def _ranges(first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the numbers first[i] … last[i]-1 of all i, concatenated."""
    counts = last - first
    return np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
