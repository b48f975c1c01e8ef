"""Property tests of blocks and shards: each document is read exactly once, in order."""

import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.corpus.blocks import read_blocks
from megacore.corpus.local_files import count_documents
from megacore.corpus.segments import Segment, divide, jsonl_segments, numbered

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
BAD = st.sampled_from(
    [
        b"",
        b"  ",
        b"{",
        b"[]",
        b'{"body": "x"}',
        b'{"text": 1}',
        b'{"text": "\\udc00"}',
        b"\x00",
        b"\xff",
    ]
)
END = st.sampled_from([b"\n", b"\r\n"])
LINE = st.tuples(st.one_of(TEXT, TEXT, BAD), END)
FILE = st.tuples(st.lists(LINE, max_size=12), st.booleans(), st.booleans())
"""Lines, True if the last one has a line end, True if the file has a byte order mark."""
COMPRESS = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": zstandard.compress}
TextsAndBadLines = tuple[list[str], list[tuple[str, int]]]


def encode(
    lines: Sequence[tuple[str | bytes, bytes]], ended: bool, bom: bool, escape: bool
) -> tuple[bytes, list]:
    """Return the content of a file and the lines that a reader must find in it."""
    raw = [
        value
        if isinstance(value, bytes)
        else json.dumps({"text": value}, ensure_ascii=escape).encode()
        for value, _ in lines
    ]
    content = b"".join(line + end for line, (_, end) in zip(raw, lines, strict=True))
    expected = [value for value, _ in lines]
    if lines and not ended:
        content = content.removesuffix(lines[-1][1])
        # An empty rest after the last line end is not a line.
        expected = expected if raw[-1] else expected[:-1]
    return (b"\xef\xbb\xbf" if bom else b"") + content, expected


def read(parts: Sequence[Segment], block_bytes: int) -> TextsAndBadLines:
    """Return the texts, and file and number of each bad line."""
    texts: list[str] = []
    bad: list[tuple[str, int]] = []
    for block in read_blocks(parts, block_bytes):
        good, problems = block.texts()
        assert [problem.position for problem in problems] == sorted(
            problem.position for problem in problems
        )
        assert all(
            problem.reason.startswith(f"{problem.path}:{problem.line} ") for problem in problems
        )
        texts += good
        bad += [(problem.path, problem.line) for problem in problems]
    return texts, bad


@settings(max_examples=60, deadline=None)
@given(
    files=st.lists(st.tuples(FILE, st.sampled_from(sorted(COMPRESS))), min_size=1, max_size=3),
    escape=st.booleans(),
    block_bytes=st.integers(1, 200),
    shard_bytes=st.integers(1, 300),
)
def test_any_lines_are_read_once_in_blocks_and_shards(
    files: list, escape: bool, block_bytes: int, shard_bytes: int
) -> None:
    with TemporaryDirectory() as folder:
        paths, expected = [], ([], [])
        for number, ((lines, ended, bom), suffix) in enumerate(files):
            content, values = encode(lines, ended, bom, escape)
            paths.append(Path(folder, f"{number}{suffix}"))
            paths[-1].write_bytes(COMPRESS[suffix](content))
            assert count_documents(paths[-1], "text") == len(values)
            expected[0].extend(value for value in values if isinstance(value, str))
            bad = [line for line, value in enumerate(values, 1) if isinstance(value, bytes)]
            expected[1].extend((str(paths[-1]), line) for line in bad)
        segments = jsonl_segments(paths, "text")
        assert read(segments, block_bytes) == expected
        shards = divide(segments, shard_bytes)
        assert read([part for shard in shards for part in shard], block_bytes) == expected
        parts = [read(shard, block_bytes) for shard in shards]
        assert (
            [text for texts, _ in parts for text in texts],
            [line for _, bad in parts for line in bad],
        ) == expected
        assert_contiguous(segments, [part for shard in shards for part in shard])


def assert_contiguous(segments: Sequence[Segment], parts: Sequence[Segment]) -> None:
    """Check that the parts of each file are contiguous and begin at the right line numbers."""
    for segment in segments:
        file_parts = [part for part in parts if part.path == segment.path]
        assert file_parts[0].start == 0
        assert file_parts[-1].stop is None
        content = Path(segment.path).read_bytes()
        for before, after in itertools.pairwise(file_parts):
            assert before.stop == after.start
            assert content[after.start - 1 : after.start] == b"\n"
        for part, line in next(numbered([file_parts])):
            assert line == 1 + content[: part.start].count(b"\n")


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.one_of(TEXT, TEXT, st.none()), max_size=20),
    group=st.integers(1, 7),
    block_bytes=st.integers(1, 300),
    shard_bytes=st.integers(1, 300),
)
def test_any_parquet_rows_are_read_once_in_blocks_and_shards(
    rows: list[str | None], group: int, block_bytes: int, shard_bytes: int
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "a.parquet")
        pq.write_table(pa.table({"text": pa.array(rows, pa.string())}), path, row_group_size=group)
        segments = jsonl_segments([path], "text")
        shards = divide(segments, shard_bytes)
        for parts in (segments, [part for shard in shards for part in shard]):
            texts, bad = [], []
            for block in read_blocks(parts, block_bytes):
                good, problems = block.texts()
                texts += good
                bad += [problem.line for problem in problems]
            assert texts == [row for row in rows if row is not None]
            assert bad == [number for number, row in enumerate(rows, 1) if row is None]
        starts = [part.start for shard in shards for part in shard]
        assert [line for shard in numbered(shards) for _, line in shard] == [
            1 + start * group for start in starts
        ]
