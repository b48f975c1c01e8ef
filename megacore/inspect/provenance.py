"""Where documents of token files came from, and one of them read back from there.

`documents.json`, which tokenizing leaves behind, lists the files in the order in which their
documents were read. When documents were permuted afterwards, document i of the token files is
number order[i] of that order, order being numpy's `RandomState(shuffle_seed)` shuffle of
0 … documents - 1.
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

from megacore.artifact.files import read_json
from megacore.corpus import local_files
from megacore.corpus.documents import parse_document
from megacore.corpus.formats import BOM, decompress, file_format_of, open_file, unreadable
from megacore.errors import DataFormatError
from megacore.token_files.indexed_dataset import TOKENS_NAMES

DOCUMENTS_NAME = "documents.json"
FORMAT = 1
_SCAN_BYTES = 1 << 22


@dataclass(frozen=True)
class OriginFile:
    """A file, or a part of one, that documents were read from."""

    path: str
    """Absolute."""
    key: str
    """Field or column that holds the text."""
    documents: int
    """Documents read from it, in the order of its lines."""
    skipped_lines: tuple[int, ...]
    """Lines that held no document, ascending; lines (in parquet files: rows) count from 1 in the
    file."""
    first_line: int | None
    """Line at which the part begins; None in a shard that begins inside of a file and is not merged
    yet."""
    size: int | None = None
    """Bytes of the whole file when it was read."""

    def line(self, number: int) -> int | None:
        """The line of the part's document `number`, counted from 0.

        None when its beginning is unknown.
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
    """Where a document stands in its source."""

    path: str
    line: int
    """From 1; in a parquet file the row."""
    key: str
    """Field or column that holds the text."""
    size: int | None = None
    """Bytes of the file when it was read; None where that is not known."""


@dataclass(frozen=True)
class Origins:
    """What `documents.json` says."""

    path: Path
    """The file itself."""
    files: tuple[OriginFile, ...]
    """In the order in which documents were read."""
    shuffle_seed: int | None
    """Of the permutation of documents; None when they are stored as they were read."""
    append_eod: bool
    """Whether each document ends with the end-of-document token."""
    split_sentences: bool
    """Whether each sentence is a sequence."""
    tokenizer: dict[str, Any]
    """`directory` (or None), `eod_id`, `vocab_size` and the like."""
    prefix: str | None
    """Ready-made token files that were linked: where their documents came from is not known
    here."""

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
                prefix=None
                if values.get("prefix") is None
                else os.path.normpath(path.parent / str(values["prefix"])),
            )
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise DataFormatError(f"{path} is damaged ({error}): tokenize again") from error

    @property
    def documents(self) -> int:
        """Documents of all files."""
        return self._ends[-1] if self._ends else 0

    @property
    def tokenizer_path(self) -> Path | None:
        """Where the tokenizer lies (its directory, or its file), if it is named and still there."""
        name = self.tokenizer.get("directory")
        path = Path(os.path.normpath(self.path.parent / str(name)))
        return path if name and path.exists() else None

    def place(self, document: int) -> DocumentPlace | None:
        """Where document `document` of the token files was read, if that is known.

        Raises IndexError.
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
        """Documents up to and with each file."""
        return list(accumulate(file.documents for file in self.files))

    @cached_property
    def _order(self) -> npt.NDArray[np.int64] | None:
        if self.shuffle_seed is None:
            return None
        order = np.arange(self.documents)
        np.random.RandomState(self.shuffle_seed).shuffle(order)
        return order


def find_origins(prefix: str | Path, documents: int) -> Origins | None:
    """What is known of the `documents` documents of PREFIX.bin; None when nobody wrote it down.

    Looks for PREFIX.documents.json and, for the files of the tokenize stage, documents.json beside
    them. Raises DataFormatError for a file that is damaged or counts other documents.
    """
    beside = Path(f"{prefix}.{DOCUMENTS_NAME}")
    inside = Path(prefix).with_name(DOCUMENTS_NAME)
    candidates = [beside, inside] if Path(prefix).name in TOKENS_NAMES else [beside]
    for path in candidates:
        if path.exists():
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
        raise ValueError(f"its entry of {file.path} counts what cannot be")
    return file


@dataclass(frozen=True)
class SourceDocument:
    """A document as its source has it."""

    text: str
    source: str | None
    """What the line itself names as its source: in a collected corpus the file or row it was copied
    from."""


def read_document(place: DocumentPlace) -> SourceDocument:
    """The document at a file and line, or row; memory is that of the line.

    Raises DataFormatError for a file that is gone or has changed, or that no longer has such a
    line.
    """
    form = file_format_of(place.path)
    size = os.path.getsize(place.path)
    if place.size not in (None, size):
        raise DataFormatError(
            f"{place.path} has {size} bytes and had {place.size} when it was tokenized: line "
            f"{place.line} may be another text now"
        )
    if form == "parquet":
        return SourceDocument(_row(place), None)
    pieces = _pieces(place.path) if form == "plain" else decompress(place.path, form)
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
    """The line of a file that comes in pieces, without its end and without a byte order mark."""
    wanted, passed, last = place.line - 1, 0, b"\n"
    found: list[bytes] = []
    for piece in filter(None, pieces):
        start, last = 0, piece[-1:]
        if passed < wanted:
            count = piece.count(b"\n")
            if passed + count < wanted:
                passed += count
                continue
            for _ in range(wanted - passed):
                start = piece.index(b"\n", start) + 1
            passed = wanted
        end = piece.find(b"\n", start)
        found.append(piece[start:] if end < 0 else piece[start:end])
        if end >= 0:
            break
    else:
        if not any(found):
            raise _missing(place, passed + (last != b"\n"), "lines")
    return b"".join(found).removeprefix(BOM)


def _pieces(path: str) -> Iterator[bytes]:
    try:
        with open_file(path) as file:
            while piece := file.read(_SCAN_BYTES):
                yield piece
    except OSError as error:
        raise unreadable(path, error) from error


def _missing(place: DocumentPlace, count: int, what: str) -> DataFormatError:
    return DataFormatError(
        f"{place.path} has {count} {what}, not {place.line}: it has changed since its documents "
        "were tokenized"
    )


def _source_of(line: bytes) -> str | None:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:  # a line that is JSON to Python's reader alone
        return None
    source = value.get("source") if isinstance(value, dict) else None
    return source if isinstance(source, str) else None
