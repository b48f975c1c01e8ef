"""Tests of segments of files and their division into shards."""

from pathlib import Path

import pytest

from megacore.corpus.blocks import read_blocks
from megacore.corpus.documents import SourceFile, write_sources
from megacore.corpus.segments import (
    Segment,
    divide,
    jsonl_segments,
    numbered,
    page_segments,
    segments,
)
from megacore.errors import DataFormatError
from tests.corpus._files import write_form

TEXTS = [f"document {number} " + "x" * (number * 37 % 91) for number in range(40)]


def texts_of(parts: tuple[Segment, ...] | list[Segment]) -> list[str]:
    return [text for block in read_blocks(parts, 100) for text in block.texts()[0]]


@pytest.mark.parametrize("size", [1, 100, 1000, 10**9])
def test_shards_contain_every_document_once_in_order(tmp_path: Path, size: int) -> None:
    names = ("a.jsonl", "b.parquet", "c.jsonl", "d.jsonl.gz", "e.jsonl.zst", "f.parquet")
    paths = [write_form(tmp_path / name, TEXTS[7 * number :]) for number, name in enumerate(names)]
    (tmp_path / "empty.jsonl").write_bytes(b"")
    all_segments = jsonl_segments([*paths, tmp_path / "empty.jsonl"], "text")
    shards = divide(all_segments, size)
    assert [text for shard in shards for text in texts_of(shard)] == texts_of(all_segments)
    assert all(shards)
    if size == 1:
        lines_and_groups = (
            len(TEXTS)
            + (len(TEXTS) - 7 + 1) // 2
            + len(TEXTS)
            - 14
            + 2
            + (len(TEXTS) - 35 + 1) // 2
        )
        assert len(shards) == lines_and_groups + 1
    if size == 10**9:
        assert shards == [tuple(all_segments)]


def test_shards_have_about_the_requested_size(tmp_path: Path) -> None:
    path = write_form(tmp_path / "a.jsonl", TEXTS)
    ends = [shard[-1].stop for shard in divide(jsonl_segments([path], "text"), 1000)]
    assert ends[-1] is None
    sizes = [stop - start for start, stop in zip([0, *ends], ends[:-1], strict=False)]
    assert all(1000 <= size < 1130 for size in sizes)


def test_a_shard_may_end_with_a_part_of_the_next_file(tmp_path: Path) -> None:
    paths = [write_form(tmp_path / name, TEXTS) for name in ("a.jsonl", "b.jsonl")]
    mixed = divide(jsonl_segments(paths, "text"), paths[0].stat().st_size + 10)
    assert [len(shard) for shard in mixed] == [2, 1]
    assert mixed[1][0].start == mixed[0][1].stop


def test_a_shard_may_end_exactly_at_the_start_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"aa\nbb\ncc\n")
    for size, cuts in {
        1: [3, 6, None],
        3: [3, 6, None],
        4: [6, None],
        6: [6, None],
        7: [None],
        9: [None],
    }.items():
        assert [shard[0].stop for shard in divide(jsonl_segments([path], "text"), size)] == cuts


def test_the_parts_of_a_web_archive_in_one_shard_are_joined(tmp_path: Path) -> None:
    """A shard has 16 places to cut, and a curation with one entry for each would be too large."""
    (tmp_path / "a.warc").write_bytes(b"x" * 100)
    file = SourceFile.of(tmp_path / "a.warc")
    parts = page_segments([file, file], [[[byte, byte + 1] for byte in range(0, 100, 10)]] * 2)
    assert [
        [(part.start, part.stop, part.first_page) for part in shard] for shard in divide(parts, 40)
    ] == [
        [(0, 40, 1)],
        [(40, 80, 41)],
        [(80, 100, 81), (0, 20, 1)],
        [(20, 60, 21)],
        [(60, 100, 61)],
    ]


def test_first_line_counts_from_the_start_of_the_file(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.parquet"):
        path = write_form(tmp_path / name, TEXTS)
        line = 1
        for ((segment, number),) in numbered(divide(jsonl_segments([path], "text"), 300)):
            assert number == line
            line += len(texts_of([segment]))
        assert line == len(TEXTS) + 1


def test_files_inside_a_moved_corpus_are_found(tmp_path: Path) -> None:
    directory = tmp_path / "corpus"
    directory.mkdir()
    path = write_form(directory / "a.jsonl", TEXTS)
    write_sources(directory, "http", [SourceFile("a.jsonl", path.stat().st_size, None)], key="text")
    moved = directory.rename(tmp_path / "moved")
    (moved / "a.jsonl").touch()
    assert segments(moved) == [Segment(str(moved / "a.jsonl"), "text")]
    (moved / "a.jsonl").write_bytes(b"")
    with pytest.raises(DataFormatError, match="has changed since it was collected"):
        segments(moved)


def test_missing_files_and_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match="cannot be read: No such file"):
        jsonl_segments([tmp_path / "none.jsonl"], "text")
    with pytest.raises(DataFormatError, match="is not a file"):
        jsonl_segments([tmp_path], "text")
