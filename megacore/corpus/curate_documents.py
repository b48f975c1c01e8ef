"""Readers and the writer of documents for curation, as datatrove's blocks.

The module imports datatrove, so it is itself imported only where documents are curated or searched.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from megacore.config.data import OnBadLine
from megacore.corpus.blocks import BadLine, LineBlock, RowBlock, read_blocks, read_rows
from megacore.corpus.curate_report import Tally
from megacore.corpus.documents import parse_fields
from megacore.corpus.extract import PLAIN
from megacore.corpus.formats import file_format_of, too_large, written_line_bytes
from megacore.corpus.segments import Segment
from megacore.corpus.web_pages import read_pages
from megacore.errors import DataFormatError, one_line

_BLOCK_BYTES = 1 << 22


class ReadShard(PipelineStep):  # type: ignore[misc]
    """Documents of the segments of one shard of the source; empty ones are removed."""

    type, name = "read", "source"

    def __init__(
        self,
        segments: Iterable[tuple[Segment, int]],
        tally: Tally | None,
        *,
        all_fields: bool,
        named: bool,
        on_bad_line: OnBadLine,
        document_bytes: int,
        extracts: bool = False,
    ) -> None:
        """Take segments with the number of their first line or row.

        `named` means that the field `source` of a document says where it came from. `tally` counts
        the documents; None if they were counted before. `extracts` means that a step extracts text
        from HTML.
        """
        super().__init__()
        self._extracts = extracts
        self._segments, self._tally = tuple(segments), tally
        self._all_fields, self._named = all_fields, named
        self._on_bad_line, self._limit = on_bad_line, document_bytes

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents."""
        for segment, first in self._segments:
            for row in self._read(segment, first):
                if isinstance(row, BadLine):
                    if self._on_bad_line == "stop":
                        raise DataFormatError(row.reason)
                    if self._tally is not None:
                        self._tally.skipped_lines += 1
                    continue
                if self._tally is not None:
                    self._tally.note_read(row)
                if row.text.strip():
                    yield row
                elif self._tally is not None:
                    self._tally.note_removed("empty", "empty", row)

    def _read(self, segment: Segment, first: int) -> Iterator[Document | BadLine]:
        if segment.first_page is not None:
            return self._pages(segment)
        if file_format_of(segment.path) == "parquet":
            return self._rows(segment, first)
        return self._lines(segment, first)

    def _pages(self, segment: Segment) -> Iterator[Document]:
        for page in read_pages(segment, self._limit):
            place = f"{segment.path}:{page.number} {page.url}"
            if page.is_html and not self._extracts:
                raise DataFormatError(
                    f"{place} is HTML: put the step extract_text into data.curate, first or after "
                    "the step url"
                )
            fields: dict[str, Any] = {} if page.is_html else {PLAIN: True}
            if self._all_fields:
                fields |= {"url": page.url, "date": page.date}
            yield Document(text=page.text, id=place, metadata=fields)

    def _lines(self, segment: Segment, number: int) -> Iterator[Document | BadLine]:
        key = segment.key
        for block in read_blocks([segment], _BLOCK_BYTES, self._limit):
            assert isinstance(block, LineBlock)
            for number, line in enumerate(block.lines(), number):  # noqa: B020
                place = f"{segment.path}:{number}"
                try:
                    fields = parse_fields(line, key, place)
                except DataFormatError as error:
                    yield BadLine(segment.path, number, str(error), 0)
                    continue
                yield self._document(fields.pop(key), fields, place)
            number += 1

    def _rows(self, segment: Segment, number: int) -> Iterator[Document | BadLine]:
        path, key = segment.path, segment.key
        rows = read_rows(segment, number) if self._all_fields else self._texts(segment)
        for number, row in enumerate(rows, number):  # noqa: B020
            if isinstance(row, BadLine):
                yield row
                continue
            text = row.pop(key)
            if len(text.encode()) > self._limit:
                raise too_large(f"{path} row {number}", f"{len(text):,} characters", self._limit)
            yield self._document(text, row, f"{path}:{number}")

    def _texts(self, segment: Segment) -> Iterator[dict[str, Any] | BadLine]:
        for block in read_blocks([segment], _BLOCK_BYTES, self._limit):
            assert isinstance(block, RowBlock)
            for row in block.rows():
                yield row if isinstance(row, BadLine) else {segment.key: row}

    def _document(self, text: str, fields: dict[str, Any], place: str) -> Document:
        source = fields.pop("source", None) if self._named else None
        return Document(
            text=text,
            id=source if isinstance(source, str) else place,
            metadata=fields if self._all_fields else {},
        )


class ReadDocuments(PipelineStep):  # type: ignore[misc]
    """Documents that an earlier phase wrote."""

    type, name = "read", "documents"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents."""
        with open(self._path, "rb", buffering=1 << 20) as file:
            for number, line in enumerate(file, 1):
                values = parse_fields(line, "text", f"{self._path}:{number}")
                yield Document(
                    text=values["text"], id=values["source"], metadata=values.get("fields", {})
                )


class WriteDocuments(PipelineStep):  # type: ignore[misc]
    """A JSON Lines file with the documents that pass: for a later phase, or those kept."""

    type, name = "write", "documents"

    def __init__(self, path: Path, tally: Tally | None, limit: int) -> None:
        """Write `path`. With `tally` these are the documents kept, without their fields.

        Their texts have at most `limit` bytes.
        """
        super().__init__()
        self._path, self._tally, self._limit = path, tally, limit

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Write and yield the documents."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "wb", buffering=1 << 20) as file:
            for document in data:
                values = {"text": document.text, "source": document.id}
                if self._tally is None and document.metadata:
                    values["fields"] = document.metadata
                file.write(self._line(document, values))
                if self._tally is not None:
                    self._tally.note_kept(document)
                yield document

    def _line(self, document: Document, values: dict[str, Any]) -> bytes:
        try:
            line = orjson.dumps(values, default=str, option=orjson.OPT_APPEND_NEWLINE)
        except TypeError as error:  # JSONEncodeError is one
            if self._tally is None:  # fields may hold what only Python's json reads and writes
                with suppress(TypeError, ValueError):
                    document.text.encode()
                    return f"{json.dumps(values, default=str)}\n".encode()
            reason = one_line(error)
            raise DataFormatError(
                f"{document.id} cannot be written as JSON ({reason}): repair or remove it, "
                "or correct the step that changes it"
            ) from error
        if self._tally is not None and len(line) > self._limit:
            if (size := len(document.text.encode())) > self._limit:
                raise too_large(document.id, f"{size:,} bytes", self._limit)
            if len(line) - 1 > (limit := written_line_bytes(self._limit)):
                raise too_large(document.id[:200], f"{len(line) - 1:,} bytes as JSON", limit)
        return line
