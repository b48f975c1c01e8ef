"""Blocks of bounded size with the documents of a corpus: one thread reads, others parse."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import Any

import orjson

from megacore.config.data import OnBadLine
from megacore.corpus import local_files
from megacore.corpus.documents import parse_document
from megacore.corpus.formats import (
    BOM,
    DOCUMENT_BYTES,
    FileFormat,
    file_format_of,
    long_line,
    open_file,
    pieces,
    too_large,
    too_long,
    unreadable,
    written_line_bytes,
)
from megacore.corpus.segments import Segment, count_newlines, segments
from megacore.errors import DataFormatError

DEFAULT_BLOCK_BYTES = 1 << 24


@dataclass(frozen=True)
class BadLine:
    """A line or row without a valid document."""

    path: str
    line: int
    """Number in the file, from 1."""
    reason: str
    """Message with file and line, the problem and a remedy."""
    position: int
    """Number of valid documents of the block before this line."""


class Block(ABC):
    """Consecutive whole documents of one segment."""

    def __init__(self, segment: Segment, size: int) -> None:
        self.segment = segment
        self.size = size
        """Bytes of input: lines of the (decompressed) file, or texts of rows."""

    @property
    def path(self) -> str:
        """Path of the segment's file."""
        return self.segment.path

    @abstractmethod
    def texts(self) -> tuple[list[str], list[BadLine]]:
        """Return the texts of the documents in order, and the bad lines. Thread-safe."""


class LineBlock(Block):
    """Lines of a JSON Lines file."""

    def __init__(
        self, segment: Segment, data: bytes, size: int, *, first: Callable[[], int]
    ) -> None:
        """Create a block of the first `size` bytes of `data`, which are whole lines.

        The remaining bytes, if any, are the start of one more line. `first` returns the number of
        the first line and is called only if a line is bad.
        """
        super().__init__(segment, size)
        self._data = data
        self._first = first

    def lines(self) -> list[bytes]:
        """Return the lines without their newlines."""
        lines = self._data.split(b"\n")
        if len(self._data) > self.size or not lines[-1]:
            lines.pop()
        return lines

    def texts(self) -> tuple[list[str], list[BadLine]]:
        """Return the texts under the key, and the lines without one."""
        key, lines = self.segment.key, self.lines()
        try:
            texts = [orjson.loads(line)[key] for line in lines]
        except (ValueError, LookupError, TypeError):
            return self._texts_one_by_one(lines)
        return (texts, []) if set(map(type, texts)) <= {str} else self._texts_one_by_one(lines)

    def _texts_one_by_one(self, lines: list[bytes]) -> tuple[list[str], list[BadLine]]:
        texts: list[str] = []
        bad: list[BadLine] = []
        for number, line in enumerate(lines, self._first()):
            try:
                texts.append(parse_document(line, self.segment.key, f"{self.path}:{number}"))
            except DataFormatError as error:
                bad.append(BadLine(self.path, number, str(error), len(texts)))
        return texts, bad


class RowBlock(Block):
    """Rows of a parquet file."""

    def __init__(self, segment: Segment, column: Any, first_row: int) -> None:
        """Create a block of an arrow array with the texts of the rows from `first_row` on."""
        super().__init__(segment, column.nbytes)
        self._column = column
        self._first_row = first_row

    def texts(self) -> tuple[list[str], list[BadLine]]:
        """Return the texts of the column, and the rows that are null or not UTF-8."""
        rows = self.rows()
        texts = [row for row in rows if isinstance(row, str)]
        if len(texts) == len(rows):
            return texts, []
        bad: list[BadLine] = []
        for place, row in enumerate(rows):
            if isinstance(row, BadLine):
                bad.append(replace(row, position=place - len(bad)))
        return texts, bad

    def rows(self) -> list[str | BadLine]:
        """Return the text of each row, or its problem, without position, in its place."""
        key, first = self.segment.key, self._first_row
        return [
            _bad_row(self.path, number, f"is null under {key!r}") if value is None else value
            for number, value in enumerate(_values(self.path, key, self._column, first), first)
        ]


def read_rows(segment: Segment, first_row: int) -> Iterator[dict[str, Any] | BadLine]:
    """Yield the fields of each row of a parquet segment, or its problem, without position.

    `first_row` is the number of the first one. A row must have a text under the segment's key.
    """
    path, key = segment.path, segment.key
    for batch in local_files.read_batches(path, None, segment.start, segment.stop):
        names = batch.schema.names
        columns = [
            RowBlock(segment, column, first_row).rows()
            if name == key
            else _values(path, name, column, first_row)
            for name, column in zip(names, batch.columns, strict=True)
        ]
        for values in zip(*columns, strict=True):
            bad = next((value for value in values if isinstance(value, BadLine)), None)
            yield dict(zip(names, values, strict=True)) if bad is None else bad
        first_row += len(batch)


def read_columns(path: str | Path, names: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the fields `names` of each row of a parquet file.

    A value that is not UTF-8 is a BadLine, without position.
    """
    first_row = 1
    for batch in local_files.read_batches(path, names):
        columns = [
            _values(str(path), name, column, first_row)
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        ]
        for values in zip(*columns, strict=True):
            yield dict(zip(batch.schema.names, values, strict=True))
        first_row += len(batch)


def _values(path: str, name: str, column: Any, first_row: int) -> list[Any]:
    """Return the values of an arrow array; one that is not UTF-8 as a BadLine."""
    try:
        values: list[Any] = column.to_pylist()
        return values
    except UnicodeDecodeError:
        values = []
    for number, scalar in enumerate(column, first_row):
        try:
            values.append(scalar.as_py())
        except UnicodeDecodeError as error:
            values.append(_bad_row(path, number, f"is not UTF-8 under {name!r} ({error.reason})"))
    return values


def _bad_row(path: str, number: int, problem: str) -> BadLine:
    return BadLine(path, number, f"{path} row {number} {problem}: repair or remove the row", 0)


def read_blocks(
    segments: Iterable[Segment],
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    document_bytes: int = DOCUMENT_BYTES,
) -> Iterator[Block]:
    """Yield the documents of the segments in order, in blocks of about `block_bytes` of input.

    A longer line forms a separate block. Memory holds one block at a time. Raises DataFormatError
    for a file that is missing or damaged, or that changes while it is read, and for a line or row
    of more than `document_bytes`, which is not read completely; `Block.texts` returns the bad
    lines.
    """
    for segment in segments:
        file_format = file_format_of(segment.path)
        try:
            yield from _reader(file_format)(segment, block_bytes, document_bytes)
        except OSError as error:
            raise unreadable(segment.path, error) from error


def iterate_texts(
    directory: Path, *, on_bad_line: OnBadLine = "stop", document_bytes: int = DOCUMENT_BYTES
) -> Iterator[str]:
    """Yield the texts of a corpus directory in order, with one block in memory at a time.

    Raises DataFormatError, also for a bad line if `on_bad_line` is stop, and for a document of more
    than `document_bytes`.
    """
    for block in read_blocks(segments(directory), document_bytes=document_bytes):
        texts, bad = block.texts()
        if bad and on_bad_line == "stop":
            yield from texts[: bad[0].position]
            raise DataFormatError(bad[0].reason)
        yield from texts


def _reader(file_format: FileFormat) -> Callable[[Segment, int, int], Iterator[Block]]:
    match file_format:
        case "plain":
            return _plain_blocks
        case "parquet":
            return _row_blocks
        case _:
            return partial(_decompressed_blocks, file_format)


class _LineNumbers:
    """Line numbers of byte offsets in one file.

    Lines are counted on request, from the nearest earlier offset with a known number.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._known = [(0, 1)]
        self._lock = Lock()

    def at(self, offset: int) -> int:
        """Return the number, from 1, of the line that starts at `offset`."""
        with self._lock:
            place = bisect_right(self._known, offset, key=itemgetter(0))
            start, line = self._known[place - 1]
            if start < offset:
                line += count_newlines(self._path, start, offset)
                self._known.insert(place, (offset, line))
            return line


def _plain_blocks(segment: Segment, block_bytes: int, document_bytes: int) -> Iterator[Block]:
    limit = written_line_bytes(document_bytes) if segment.written else document_bytes
    with open_file(segment.path) as file:
        stop = file.seek(0, 2) if segment.stop is None else segment.stop
        offset, numbers, length = segment.start, _LineNumbers(segment.path), block_bytes
        if not offset:
            file.seek(0)
            offset = len(BOM) if file.read(len(BOM)) == BOM else 0
        while offset < stop:
            length = min(length, stop - offset)
            file.seek(offset)
            data = file.read(length)
            if len(data) < length:
                raise DataFormatError(
                    f"{segment.path} became shorter while it was read: start again when it is whole"
                )
            size = length if offset + length == stop else data.rfind(b"\n") + 1
            long = long_line(data, limit)
            if long is not None:
                raise too_long(segment.path, "plain", offset + long, limit)
            if size:
                # The incomplete line beyond `size` is read again with the next block, which is
                # cheaper than copying it.
                block = LineBlock(segment, data, size, first=partial(numbers.at, offset))
                if segment.written and long_line(data, document_bytes) is not None:
                    _check_texts(block, numbers.at(offset), document_bytes)
                yield block
                offset, length = offset + size, block_bytes
            else:
                length = min(2 * length, limit + 1)


def _check_texts(block: LineBlock, first_line: int, document_bytes: int) -> None:
    """Raise DataFormatError if a text, without what its line adds, is over `document_bytes`."""
    for number, line in enumerate(block.lines(), first_line):
        if len(line) > document_bytes:
            place = f"{block.path}:{number}"
            size = len(parse_document(line, block.segment.key, place).encode())
            if size > document_bytes:
                raise too_large(place, f"{size:,} bytes", document_bytes)


def _decompressed_blocks(
    file_format: FileFormat, segment: Segment, block_bytes: int, document_bytes: int
) -> Iterator[Block]:
    number, parts, length = 1, [b""], 0
    for data in pieces(segment.path, file_format, document_bytes):
        parts.append(data)
        length += len(data)
        if length < block_bytes or b"\n" not in data:
            continue
        data = b"".join(parts)
        size = data.rfind(b"\n") + 1
        yield LineBlock(segment, data, size, first=partial(int, number))
        number += data.count(b"\n")
        parts, length = [data[size:]], len(data) - size
    if length:
        yield LineBlock(segment, b"".join(parts), length, first=partial(int, number))


def _row_blocks(segment: Segment, block_bytes: int, document_bytes: int) -> Iterator[Block]:
    row = 1 + sum(local_files.group_rows(segment.path)[: segment.start] if segment.start else ())
    for column in local_files.read_column(
        segment.path, segment.key, segment.start, segment.stop, block_bytes, document_bytes
    ):
        yield RowBlock(segment, column, row)
        row += len(column)
