"""Origins of the documents in token files, and reading of a document from its source.

`documents.json`, written by the tokenize stage, lists the files in the order in which their
documents were read. If documents were permuted afterwards, document i of the token files is the
order[i]-th document read, where order is numpy's `RandomState(shuffle_seed)` shuffle of
0 … documents - 1, or that of `partitions`.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from megacore.artifact.files import read_json, reason_of
from megacore.corpus import local_files
from megacore.corpus.documents import parse_document
from megacore.corpus.formats import BOM, decompress, file_format_of, open_file, unreadable
from megacore.errors import DataFormatError
from megacore.paths import exists
from megacore.token_files.indexed_dataset import TOKENS_NAMES
from megacore.token_files.indexed_dataset_writer import partition_order
from megacore.tokenizer.records import DOCUMENTS_NAME, FORMAT

_SCAN_BYTES = 1 << 22


@dataclass(frozen=True)
class OriginFile:
    """A file, or a part of a file, from which documents were read."""

    path: str
    """Absolute path."""
    key: str
    """Field or column with the text."""
    documents: int
    """Number of documents read, in the order of the lines."""
    skipped_lines: tuple[int, ...]
    """Lines (in parquet files: rows) without a document, ascending, counted from 1 in the file."""
    first_line: int | None
    """First line of the part; None in an unmerged shard that begins inside a file."""
    size: int | None = None
    """Size in bytes of the complete file when it was read."""

    def line(self, number: int) -> int | None:
        """Return the line of the part's document `number`, counted from 0.

        Returns None if the first line of the part is unknown.
        """
        if self.first_line is None:
            return None
        line = self.first_line + number
        for skipped in self.skipped_lines:
            if skipped > line:
                break
            line += 1
        return line


@dataclass(frozen=True)
class DocumentPlace:
    """Location of a document in its source."""

    path: str
    line: int
    """Line, or row of a parquet file, from 1."""
    key: str
    """Field or column with the text."""
    size: int | None = None
    """Size in bytes of the file when it was read; None if unknown."""


@dataclass(frozen=True)
class Origins:
    """Contents of a `documents.json`."""

    path: Path
    """Path of the `documents.json`."""
    files: tuple[OriginFile, ...]
    """Source files in the order in which their documents were read."""
    shuffle_seed: int | None
    """Seed of the permutation of documents; None if they are in reading order."""
    append_eod: bool
    """True if each document ends with the end-of-document token."""
    split_sentences: bool
    """True if each sentence is a sequence."""
    tokenizer: dict[str, Any]
    """`directory` (or None), `eod_id`, `vocab_size` etc. of the tokenizer."""
    partitions: int
    """Number of partitions whose order the documents have (`partition_order`)."""
    prefix: str | None
    """Prefix of ready-made token files that were linked; the origins of their documents are not
    recorded here."""

    @classmethod
    def read(cls, path: Path) -> "Origins":
        """Read a `documents.json`. Raises DataFormatError."""
        try:
            values = read_json(path)
            if values["format"] != FORMAT:
                raise DataFormatError(
                    f"{path} has format {values['format']!r}; only {FORMAT} is known: tokenize "
                    "again"
                )
            seed = None if values["shuffle_seed"] is None else int(values["shuffle_seed"])
            if seed is not None and not 0 <= seed < 2**32:
                raise ValueError(f"no shuffle has the seed {seed}")
            return cls(
                path=path,
                files=tuple(_origin_file(path.parent, entry) for entry in values["files"]),
                shuffle_seed=seed,
                append_eod=bool(values["append_eod"]),
                split_sentences=bool(values["split_sentences"]),
                tokenizer=dict(values["tokenizer"]),
                partitions=_partitions(values),
                prefix=None
                if values.get("prefix") is None
                else os.path.normpath(path.parent / str(values["prefix"])),
            )
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise DataFormatError(
                f"{path} is damaged ({reason_of(error)}): tokenize again"
            ) from error

    @property
    def documents(self) -> int:
        """Number of documents of all files."""
        return self._ends[-1] if self._ends else 0

    @property
    def tokenizer_path(self) -> Path | None:
        """Path of the tokenizer's directory or file; None if not recorded or no longer there."""
        name = self.tokenizer.get("directory")
        path = Path(os.path.normpath(self.path.parent / str(name)))
        return path if name and exists(path) else None

    def place(self, document: int) -> DocumentPlace | None:
        """Return the location from which a document was read, or None if unknown.

        Raises IndexError if there is no such document.
        """
        if self.prefix is not None:
            return None
        if not 0 <= document < self.documents:
            raise IndexError(f"{self.path} has no document {document}: it has {self.documents}")
        read = document if self._order is None else int(self._order[document])
        number = bisect_right(self._ends, read)
        file = self.files[number]
        line = file.line(read - (self._ends[number] - file.documents))
        return None if line is None else DocumentPlace(file.path, line, file.key, file.size)

    @cached_property
    def _ends(self) -> list[int]:
        """Cumulative numbers of documents of the files."""
        return list(accumulate(file.documents for file in self.files))

    @cached_property
    def _order(self) -> npt.NDArray[np.int64] | None:
        if self.partitions > 1:
            return partition_order(self.documents, self.partitions)
        if self.shuffle_seed is None:
            return None
        order = np.arange(self.documents)
        np.random.RandomState(self.shuffle_seed).shuffle(order)
        return order


def find_origins(prefix: str | Path, documents: int) -> Origins | None:
    """Return the origins of the `documents` documents of PREFIX.bin, or None if not recorded.

    Looks for PREFIX.documents.json and, for files of the tokenize stage, for documents.json in
    their directory. Raises DataFormatError if the file is damaged or has another number of
    documents.
    """
    prefixed = Path(f"{prefix}.{DOCUMENTS_NAME}")
    unprefixed = Path(prefix).with_name(DOCUMENTS_NAME)
    candidates = [prefixed, unprefixed] if Path(prefix).name in TOKENS_NAMES else [prefixed]
    for path in candidates:
        if exists(path):
            origins = Origins.read(path)
            if origins.prefix not in (None, str(prefix)):
                return find_origins(str(origins.prefix), documents) or origins
            if origins.documents != documents:
                raise DataFormatError(
                    f"{path} counts {origins.documents} documents, but {prefix}.idx has "
                    f"{documents}: they do not belong together; tokenize again"
                )
            return origins
    return None


def _partitions(values: dict[str, Any]) -> int:
    partitions = int(values.get("partitions", 1))
    if partitions < 1:
        raise ValueError(f"there cannot be {partitions} partitions")
    return partitions


def _origin_file(directory: Path, entry: dict[str, Any]) -> OriginFile:
    file = OriginFile(
        path=os.path.normpath(directory / str(entry["path"])),
        key=str(entry["key"]),
        documents=int(entry["documents"]),
        skipped_lines=tuple(int(line) for line in entry["skipped_lines"]),
        first_line=None if entry["first_line"] is None else int(entry["first_line"]),
        size=None if entry.get("size") is None else int(entry["size"]),
    )
    if (
        file.documents < 0
        or file.first_line == 0
        or list(file.skipped_lines) != sorted(set(file.skipped_lines))
    ):
        raise ValueError(f"its entry of {file.path} has impossible counts")
    return file


@dataclass(frozen=True)
class SourceDocument:
    """A document read from its source file."""

    text: str
    source: str | None
    """Value of the line's field `source`: in a collected corpus, the file or row that it was copied
    from."""


def read_document(place: DocumentPlace) -> SourceDocument:
    """Read the document at a line or row of a file, without keeping other lines in memory.

    Raises DataFormatError if the file is missing, has changed, or no longer has such a line.
    """
    file_format = file_format_of(place.path)
    size = os.path.getsize(place.path)
    if place.size not in (None, size):
        raise DataFormatError(
            f"{place.path} has {size} bytes and had {place.size} when it was tokenized: line "
            f"{place.line} may be another text now"
        )
    if file_format == "parquet":
        return SourceDocument(_row(place), None)
    pieces = _pieces(place.path) if file_format == "plain" else decompress(place.path, file_format)
    line = _line(pieces, place)
    text = parse_document(line, place.key, f"{place.path}:{place.line}")
    source = _source_of(line)
    return SourceDocument(text, source)


def _row(place: DocumentPlace) -> str:
    first = 1
    for group, rows in enumerate(local_files.group_rows(place.path)):
        if place.line < first + rows:
            for column in local_files.read_column(
                place.path, place.key, group, group + 1, _SCAN_BYTES
            ):
                if place.line < first + len(column):
                    return _text(column[place.line - first].as_py(), place)
                first += len(column)
        first += rows
    raise _missing(place, first - 1, "rows")


def _text(value: Any, place: DocumentPlace) -> str:
    if isinstance(value, str):
        return value
    raise DataFormatError(
        f"{place.path} row {place.line} is no text under {place.key!r}: it has changed"
    )


def _line(pieces: Iterator[bytes], place: DocumentPlace) -> bytes:
    """Return a line of a file read in pieces, without its newline and byte order mark."""
    target, newlines, last = place.line - 1, 0, b"\n"
    parts: list[bytes] = []
    for piece in filter(None, pieces):
        start, last = 0, piece[-1:]
        if newlines < target:
            count = piece.count(b"\n")
            if newlines + count < target:
                newlines += count
                continue
            for _ in range(target - newlines):
                start = piece.index(b"\n", start) + 1
            newlines = target
        end = piece.find(b"\n", start)
        parts.append(piece[start:] if end < 0 else piece[start:end])
        if end >= 0:
            break
    else:
        if not any(parts):
            raise _missing(place, newlines + (last != b"\n"), "lines")
    return b"".join(parts).removeprefix(BOM)


def _pieces(path: str) -> Iterator[bytes]:
    try:
        with open_file(path) as file:
            while piece := file.read(_SCAN_BYTES):
                yield piece
    except OSError as error:
        raise unreadable(path, error) from error


def _missing(place: DocumentPlace, count: int, unit: str) -> DataFormatError:
    return DataFormatError(
        f"{place.path} has {count} {unit}, not {place.line}: it has changed since its documents "
        "were tokenized"
    )


def _source_of(line: bytes) -> str | None:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:  # a line that only Python's json accepts
        return None
    source = value.get("source") if isinstance(value, dict) else None
    return source if isinstance(source, str) else None
