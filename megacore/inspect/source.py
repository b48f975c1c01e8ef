"""Reading back one document from the file that it came from."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from megacore.corpus import parquet
from megacore.corpus.documents import parse_document
from megacore.corpus.formats import BOM, decompress, form_of, open_file, unreadable
from megacore.errors import DataFormatError
from megacore.inspect.provenance import Place

_SCAN_BYTES = 1 << 22


@dataclass(frozen=True)
class SourceDocument:
    """A document as its source has it."""

    text: str
    source: str | None
    """What the line itself names as its source: in a collected corpus the file or row it was copied from."""


def read_document(place: Place) -> SourceDocument:
    """The document at a file and line, or row; memory is that of the line.

    Raises DataFormatError for a file that is gone or has changed, or that no longer has such a line.
    """
    form = form_of(place.path)
    size = os.path.getsize(place.path)
    if place.size not in (None, size):
        raise DataFormatError(
            f"{place.path} has {size} bytes and had {place.size} when it was tokenized: line {place.line} may be "
            "another text now"
        )
    if form == "parquet":
        return SourceDocument(_row(place), None)
    pieces = _pieces(place.path) if form == "plain" else decompress(place.path, form)
    line = _line(pieces, place)
    text = parse_document(line, place.key, f"{place.path}:{place.line}")
    source = _source_of(line)
    return SourceDocument(text, source)


def _row(place: Place) -> str:
    first = 1
    for group, rows in enumerate(parquet.group_rows(place.path)):
        if place.line < first + rows:
            for column in parquet.read_column(place.path, place.key, group, group + 1, _SCAN_BYTES):
                if place.line < first + len(column):
                    return _text(column[place.line - first].as_py(), place)
                first += len(column)
        first += rows
    raise _missing(place, first - 1, "rows")


def _text(value: Any, place: Place) -> str:
    if isinstance(value, str):
        return value
    raise DataFormatError(f"{place.path} row {place.line} is no text under {place.key!r}: it has changed")


def _line(pieces: Iterator[bytes], place: Place) -> bytes:
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


def _missing(place: Place, count: int, what: str) -> DataFormatError:
    return DataFormatError(
        f"{place.path} has {count} {what}, not {place.line}: it has changed since its documents were tokenized"
    )


def _source_of(line: bytes) -> str | None:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:  # a line that is JSON to Python's reader alone
        return None
    source = value.get("source") if isinstance(value, dict) else None
    return source if isinstance(source, str) else None
