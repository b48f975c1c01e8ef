"""Segments of a corpus's files, and their division into shards of whole documents."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from megacore.corpus import local_files
from megacore.corpus.documents import CORPUS_NAME, SourceFile, read_sources
from megacore.corpus.formats import file_format_of, open_file
from megacore.errors import DataFormatError

_SCAN_BYTES = 1 << 20


@dataclass(frozen=True)
class Segment:
    """A range of whole documents in one file; a shard consists of segments."""

    path: str
    """Absolute path."""
    key: str
    """Name of the field or column with the text."""
    start: int = 0
    """Start: the byte at which a line starts, or a row group; 0 in a compressed file."""
    stop: int | None = None
    """End (exclusive); None for the end of the file."""
    first_page: int | None = None
    """Number of the first page, from 1, of a WARC file; None for files of other formats."""
    written: bool = False
    """True for lines of curation, which add a source and JSON's escapes to a document's bytes."""


def segments(directory: Path) -> list[Segment]:
    """Return the files of a corpus directory in the order of their documents.

    Raises DataFormatError if a file has changed, or if the corpus consists of token files and has
    no text.
    """
    sources = read_sources(directory)
    if sources is None:
        return jsonl_segments([directory / CORPUS_NAME], "text")
    facts, files = sources
    if facts["kind"] == "warc":
        return page_segments(files, facts["cuts"])
    if facts["kind"] == "prefix":
        raise DataFormatError(
            f"{directory} refers to ready-made tokens and has no text: give data.tokenizer a "
            "tokenizer that exists (gpt2-bpe or hf), since none can be trained on them"
        )
    written = bool(facts.get("written"))
    return [Segment(file.path, facts["key"], written=written) for file in files]


def jsonl_segments(paths: Sequence[str | Path], key: str) -> list[Segment]:
    """Return a segment for each complete file: JSON Lines (plain or compressed) or parquet.

    Raises DataFormatError if a file is missing.
    """
    return [Segment(SourceFile.of(Path(path)).path, key) for path in paths]


def page_segments(
    files: Sequence[SourceFile], cuts: Sequence[Sequence[Sequence[int]]]
) -> list[Segment]:
    """Return segments of WARC files.

    Args:
        files: the files in order.
        cuts: places in each file at which a segment starts, from 0, each as byte and number of the
            next page.
    """
    return [
        Segment(file.path, "", start, stop, first_page=page)
        for file, places in zip(files, cuts, strict=True)
        for (start, page), (stop, _) in pairwise([*places, (file.size, 0)])
    ]


def divide(segments: Iterable[Segment], size: int) -> list[tuple[Segment, ...]]:
    """Divide segments into shards of at least `size` bytes each (except the last), in order.

    JSON Lines files are cut at the first line end after `size` bytes, parquet files between row
    groups (whose size is that of the uncompressed text column). Segments of WARC files, and other
    compressed files, are never cut; their size is that on disk. Neighbours of one file in one shard
    are joined.
    """
    shards: list[tuple[Segment, ...]] = []
    shard: list[Segment] = []
    room = size
    for segment in segments:
        for piece, taken in _pieces(segment, size, room):
            if shard and shard[-1].path == piece.path and shard[-1].stop == piece.start:
                piece = replace(shard.pop(), stop=piece.stop)
            shard.append(piece)
            room -= taken
            if room <= 0:
                shards.append(tuple(shard))
                shard, room = [], size
    return [*shards, tuple(shard)] if shard else shards


def numbered(shards: Iterable[Sequence[Segment]]) -> Iterator[list[tuple[Segment, int]]]:
    """Yield the segments of each shard with the numbers, from 1, of their first lines or rows.

    Each file is read once.
    """
    path, offset, line = "", 0, 1
    for shard in shards:
        parts = []
        for part in shard:
            if part.path != path or part.start < offset:
                path, offset, line = part.path, 0, 1
            if part.first_page is not None:
                line = part.first_page
            elif part.start > offset:
                if file_format_of(path) == "parquet":
                    line += sum(local_files.group_rows(path)[offset : part.start])
                else:
                    line += count_newlines(path, offset, part.start)
                offset = part.start
            parts.append((part, line))
        yield parts


def count_newlines(path: str | Path, start: int, stop: int) -> int:
    """Return the number of newlines in the bytes start … stop-1 of a file."""
    count = 0
    with open_file(path) as file:
        file.seek(start)
        while start < stop and (data := file.read(min(_SCAN_BYTES, stop - start))):
            count += data.count(b"\n")
            start += len(data)
    return count


def _pieces(segment: Segment, size: int, room: int) -> Iterable[tuple[Segment, int]]:
    """Return parts of a segment with their bytes; the first fills `room`, the others `size`."""
    if segment.first_page is not None and segment.stop is not None:
        return [(segment, segment.stop - segment.start)]
    file_format = file_format_of(segment.path)
    if file_format == "plain":
        return _line_pieces(segment, size, room)
    if file_format == "parquet":
        return _group_pieces(segment, size, room)
    return [(segment, os.path.getsize(segment.path))]


def _line_pieces(segment: Segment, size: int, room: int) -> Iterable[tuple[Segment, int]]:
    stop = os.path.getsize(segment.path) if segment.stop is None else segment.stop
    start = segment.start
    with open_file(segment.path) as file:
        while stop - start > room:
            # Read from one byte earlier: if it is a newline, the cut is exactly at start + room.
            file.seek(start + room - 1)
            while (part := file.readline(_SCAN_BYTES)) and not part.endswith(b"\n"):
                pass
            if (cut := file.tell()) >= stop:
                break
            yield replace(segment, start=start, stop=cut), cut - start
            start, room = cut, size
    yield replace(segment, start=start), stop - start


def _group_pieces(segment: Segment, size: int, room: int) -> Iterable[tuple[Segment, int]]:
    sizes = local_files.group_sizes(segment.path, segment.key)
    start, taken = segment.start, 0
    stop = len(sizes) if segment.stop is None else segment.stop
    for group in range(start, stop - 1):
        taken += sizes[group]
        if taken >= room:
            yield replace(segment, start=start, stop=group + 1), taken
            start, room, taken = group + 1, size, 0
    yield replace(segment, start=start), sum(sizes[start:stop])
