"""Tests of reading documents from files in blocks."""

import gzip
import os
import random
import threading
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megacore.corpus import blocks, formats
from megacore.corpus.blocks import BadLine, iterate_texts, read_blocks
from megacore.corpus.documents import CorpusWriter
from megacore.corpus.local_files import count_documents
from megacore.corpus.segments import Segment, count_newlines, jsonl_segments
from megacore.errors import DataFormatError, TransientFileError
from tests.corpus._files import lines, write_form

TEXTS = ["one", "", "größe\n", "𝄞" * 30, "x" * 500, "last"]
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
BLOCK_BYTES = (1, 7, 64, 1 << 20)


def read(path: Path, block_bytes: int = 64, key: str = "text") -> tuple[list[str], list[BadLine]]:
    texts: list[str] = []
    bad: list[BadLine] = []
    for block in read_blocks(jsonl_segments([path], key), block_bytes):
        assert block.path == str(path)
        assert block.size > 0 or path.suffix == ".parquet"
        good, problems = block.texts()
        texts += good
        bad += problems
    return texts, bad


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("block_bytes", BLOCK_BYTES)
def test_every_format_yields_its_documents_in_order(
    tmp_path: Path, suffix: str, block_bytes: int
) -> None:
    path = write_form(tmp_path / f"a{suffix}", TEXTS)
    assert read(path, block_bytes) == (TEXTS, [])


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".big.parquet"])
def test_blocks_have_about_the_requested_size(tmp_path: Path, suffix: str) -> None:
    texts = [f"{number:0100}" for number in range(80_000)]
    path = write_form(tmp_path / f"a{suffix}", [] if suffix == ".big.parquet" else texts)
    if suffix == ".big.parquet":
        pq.write_table(pa.table({"text": texts}), path, compression="zstd")
    sizes = [block.size for block in read_blocks(jsonl_segments([path], "text"), 1 << 20)]
    high = (1 << 20) if suffix == ".jsonl" else (1 << 21)
    assert all((1 << 20) - 200 <= size <= high for size in sizes[:-1])
    assert 0 < sizes[-1] <= high
    assert sum(sizes) >= 8_000_000


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize(
    "content",
    [
        b'{"text": "a"}\n{"text": "b"}\n',
        b'{"text": "a"}\n{"text": "b"}',
        b'{"text": "a"}\r\n{"text": "b"}\r\n',
        b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}\n',
        b'\xef\xbb\xbf{"text": "a"}\r\n {"text": "b", "score": NaN} ',
        b'{"text": "a", "title": "\\ud800"}\n{"n": 123456789012345678901234567890, "text": "b"}\n',
    ],
)
def test_line_ends_byte_order_marks_and_pythons_json_extensions_are_accepted(
    tmp_path: Path, suffix: str, content: bytes
) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix](content))
    for block_bytes in BLOCK_BYTES:
        assert read(path, block_bytes) == (["a", "b"], [])


BAD = {
    b"": "is blank: repair or remove the line",
    b" \t\r": "is blank",
    b"{": "is not JSON",
    b'"text"': "holds a JSON str, not an object with the key 'text'",
    b"[1]": "holds a JSON list",
    b"5": "holds a JSON int",
    b'{"body": "a"}': "has no key 'text', only body: set data.source.key",
    b"{}": "has no key 'text', only nothing",
    b"{%s}" % b",".join(b'"%d": 1' % key for key in range(10, 32)): (
        f"has no key 'text', only {', '.join(map(str, range(10, 30)))} and 2 more: set data.source"
    ),
    b'{"text": null}': "has a NoneType under 'text' instead of a string",
    b'{"text": NaN}': "is not JSON",
    b'{"text": ["a"]}': "has a list under 'text'",
    b'{"text": "\\ud800"}': "is not JSON",
    b'{"text": "\xff"}': "is not JSON",
    b'{"text": "a\x00"}': "is not JSON",
    b'\xef\xbb\xbf{"text": "a"}': "is not JSON",
    b"[" * 3000: "is not JSON",
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_bad_line_is_reported_and_the_others_are_read(
    tmp_path: Path, bad: bytes, suffix: str
) -> None:
    content = lines(["a", "b"]) + bad + b"\n" + lines(["c"]) + bad + b"\n" + lines(["d"])
    path = tmp_path / f"x{suffix}"
    path.write_bytes(
        {".jsonl": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[path.suffix](content)
    )
    for block_bytes in BLOCK_BYTES:
        texts, problems = read(path, block_bytes)
        assert texts == ["a", "b", "c", "d"]
        assert [(problem.path, problem.line) for problem in problems] == [
            (str(path), 3),
            (str(path), 5),
        ]
        assert problems[0].reason.startswith(f"{path}:3 {BAD[bad]}")
    assert [problem.position for problem in read(path, 1 << 20)[1]] == [2, 3]


def test_line_numbers_of_a_later_segment_count_from_the_start_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": "b"}\n{\n{"text": "c"}')
    blocks = list(read_blocks([Segment(str(path), "text", start=15)], 16))
    # The line numbers do not depend on the order in which the blocks are parsed.
    for block in [*blocks, *reversed(blocks)]:
        assert [bad.line for bad in block.texts()[1]] == ([4] if block is blocks[0] else [])
    (block,) = read_blocks([Segment(str(path), "text", start=14, stop=15)], 100)
    assert [bad.line for bad in block.texts()[1]] == [2]


def test_null_and_non_utf8_rows_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    broken = pa.StringArray.from_buffers(
        5,
        pa.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0,
                            2, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])),
        pa.py_buffer(b"a\xffc"),
        pa.py_buffer(bytes([0b10111])),
    )  # fmt: skip
    pq.write_table(pa.table({"text": broken}), path, row_group_size=2)
    for block_bytes in (1, 1 << 20):
        texts, bad = read(path, block_bytes)
        assert texts == ["a", "", "c"]
        assert [problem.reason for problem in bad] == [
            (
                f"{path} row 3 is not UTF-8 under 'text' (invalid start byte): repair or remove "
                "the row"
            ),
            f"{path} row 4 is null under 'text': repair or remove the row",
        ]


def test_string_columns_of_parquet_are_read_and_others_refused(tmp_path: Path) -> None:
    for number, kind in enumerate(
        (pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()))
    ):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"text": pa.array(["a", "b", "a"]).cast(kind)}), path)
        assert read(path) == (["a", "b", "a"], [])
    pq.write_table(pa.table({"text": pa.array([b"a"]), "body": [1]}), tmp_path / "b.parquet")
    for key, message in {
        "text": r"b\.parquet has binary in column 'text' instead of text",
        "body": "has int64 in column 'body'",
        "content": "has no column 'content', only text, body: set data.source.key",
    }.items():
        with pytest.raises(DataFormatError, match=message):
            read(tmp_path / "b.parquet", key=key)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_concatenated_compressed_frames_are_read(tmp_path: Path, suffix: str) -> None:
    compress = {".jsonl.gz": gzip.compress, ".jsonl.zst": zstandard.compress}[suffix]
    content = lines(TEXTS)
    path = tmp_path / f"a{suffix}"
    path.write_bytes(
        b"".join(compress(content[start : start + 5]) for start in range(0, len(content), 5))
    )
    assert read(path) == (TEXTS, [])


def test_padding_and_skippable_frames_are_skipped(tmp_path: Path) -> None:
    content = lines(TEXTS)
    (tmp_path / "a.gz").write_bytes(
        gzip.compress(content) + bytes(100_000) + gzip.compress(content) + bytes(10)
    )
    assert read(tmp_path / "a.gz") == (2 * TEXTS, [])
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"size"
    (tmp_path / "a.zst").write_bytes(skippable + zstandard.compress(content) + skippable)
    assert read(tmp_path / "a.zst") == (TEXTS, [])


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_truncated_and_damaged_files_are_refused_with_their_name(
    tmp_path: Path, suffix: str
) -> None:
    path = write_form(
        tmp_path / f"a{suffix}", [f"text {number * 7919 % 1000}" for number in range(5000)]
    )
    content = path.read_bytes()
    for size in (0, 1, 5, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(
            DataFormatError, match=rf"a{suffix} (ends in the middle|is a damaged|does not begin)"
        ):
            read(path)
    for place in range(40, len(content) - 100, len(content) // 7):
        path.write_bytes(content[:place] + bytes(90) + content[place + 90 :])
        try:
            texts, bad = read(path)
        except DataFormatError as error:
            assert str(path) in str(error)  # noqa: PT017 (not every damage is detectable)
        else:
            assert suffix == ".parquet" or len(texts) + len(bad) == 5000


def test_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    for suffix, compress in {
        ".gz": gzip.compress,
        ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    }.items():
        data = bytearray(compress(lines(TEXTS)))
        data[-1 if suffix == ".zst" else -8] ^= 1
        (tmp_path / f"a{suffix}").write_bytes(data)
        with pytest.raises(DataFormatError, match=rf"a{suffix} holds damaged \w+ data"):
            read(tmp_path / f"a{suffix}")


def test_the_format_is_detected_from_the_content(tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        path = write_form(tmp_path / f"a{suffix}", TEXTS)
        renamed = path.rename(tmp_path / f"part{len(suffix)}")
        assert read(renamed) == (TEXTS, [])
    write_form(tmp_path / "a.jsonl", TEXTS).rename(tmp_path / "b.gz")
    with pytest.raises(DataFormatError, match=r"b\.gz does not begin as a gzip file does"):
        read(tmp_path / "b.gz")
    (tmp_path / "a.jsonl.xz").write_bytes(b"\xfd7zXZ\x00")
    with pytest.raises(
        DataFormatError, match=r"compressed in a way that is not read: repack it as \.gz or \.zst"
    ):
        read(tmp_path / "a.jsonl.xz")


def test_a_file_that_shrinks_during_reading_is_refused(tmp_path: Path) -> None:
    path = write_form(tmp_path / "a.jsonl", ["x" * 100_000] * 10)
    blocks = read_blocks(jsonl_segments([path], "text"), 200_000)
    next(blocks)
    path.write_bytes(path.read_bytes()[:300_000])
    with pytest.raises(DataFormatError, match="became shorter while it was read"):
        list(blocks)


def test_missing_files_and_directories_are_refused(tmp_path: Path) -> None:
    for path, message in {
        tmp_path / "none": "cannot be read: No such file",
        tmp_path: "cannot be read: Is a dir",
    }.items():
        with pytest.raises(DataFormatError, match=message):
            list(read_blocks([Segment(str(path), "text")], 100))


def test_block_size_is_bounded_for_highly_compressed_files(tmp_path: Path) -> None:
    line = lines(["z" * 1000])
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(line * 100_000))
    assert path.stat().st_size < 20_000
    sizes = [block.size for block in read_blocks(jsonl_segments([path], "text"), 1 << 20)]
    assert sum(sizes) == 100_000 * len(line)
    assert max(sizes) < 3 << 20


def test_threads_parse_blocks_with_correct_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b"".join(
            lines([str(number)]) + (b"\n" if number % 3 == 0 else b"") for number in range(999)
        )
    )
    blocks = list(read_blocks(jsonl_segments([path], "text"), 100))
    reports_by_line: dict[int, int] = {}

    def work(part: list) -> None:
        for block in part:
            for bad in block.texts()[1]:
                reports_by_line[bad.line] = reports_by_line.get(bad.line, 0) + 1

    threads = [threading.Thread(target=work, args=(blocks[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reports_by_line == {4 * number + 2: 1 for number in range(333)}


def test_iterate_texts_stops_at_a_bad_line_or_skips_it(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path) as writer:
        for text in TEXTS:
            writer.add(text, "here")
    assert list(iterate_texts(tmp_path)) == TEXTS
    with open(tmp_path / "corpus.jsonl", "ab") as file:
        file.write(b"\n" + lines(["more"]))
    texts = []
    with pytest.raises(DataFormatError, match=r"corpus\.jsonl:7 is blank"):
        texts.extend(iterate_texts(tmp_path))
    assert list(iterate_texts(tmp_path, on_bad_line="skip")) == [*TEXTS, "more"]


def test_bad_lines_in_random_block_order_do_not_rescan_the_file_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\nbad\n' * 2000)
    counted: list[int] = []

    def count(path: str | Path, start: int, stop: int) -> int:
        counted.append(stop - start)
        return count_newlines(path, start, stop)

    monkeypatch.setattr(blocks, "count_newlines", count)
    parsed = list(read_blocks([Segment(str(path), "text")], 1000))
    shuffled = list(enumerate(parsed))
    random.Random(1).shuffle(shuffled)
    bad_lines = {number: [line.line for line in block.texts()[1]] for number, block in shuffled}
    assert [line for number in range(len(parsed)) for line in bad_lines[number]] == list(
        range(2, 4001, 2)
    )
    assert sum(counted) < 10 * path.stat().st_size


LIMIT = 1 << 21


def padded(directory: Path, suffix: str, size: int) -> Path:
    """Return a file whose second document's line, or text in parquet, has `size` bytes."""
    overhead = 0 if suffix == ".parquet" else len('{"text": ""}')
    return write_form(directory / f"big{suffix}", ["one", "x" * (size - overhead), "last"])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_document_over_the_limit_is_refused_with_its_place_and_size(
    tmp_path: Path, suffix: str
) -> None:
    path = padded(tmp_path, suffix, LIMIT + 1)
    place = "big.parquet row 2" if suffix == ".parquet" else f"big{suffix}:2"
    expected = rf"{place} .* {LIMIT + 1:,} bytes, over the limit of {LIMIT:,}: .*max_document_mb"
    for block_bytes in (64, 4 * LIMIT):
        with pytest.raises(DataFormatError, match=expected):
            list(read_blocks(jsonl_segments([path], "text"), block_bytes, LIMIT))
    if suffix != ".parquet":
        with pytest.raises(DataFormatError, match=expected):
            count_documents(path, "text", LIMIT)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_document_of_the_limit_is_read(tmp_path: Path, suffix: str) -> None:
    path = padded(tmp_path, suffix, LIMIT)
    assert count_documents(path, "text", LIMIT) == 3
    for block_bytes in (64, 4 * LIMIT):
        parts = read_blocks(jsonl_segments([path], "text"), block_bytes, LIMIT)
        assert sum(len(block.texts()[0]) for block in parts) == 3


def test_endless_line_is_refused_without_reading_it_completely(tmp_path: Path) -> None:
    path = tmp_path / "zeros.jsonl"
    path.write_bytes(b'{"text":"one"}\n')
    os.truncate(path, 1 << 40)
    tracemalloc.start()
    try:
        with pytest.raises(DataFormatError, match=r"zeros.jsonl:2 is a document of more than 9,"):
            count_documents(path, "text", LIMIT)
        with pytest.raises(DataFormatError, match=r"zeros.jsonl:2 is a document of more than 9,"):
            list(read_blocks(jsonl_segments([path], "text"), 64, LIMIT))
        assert tracemalloc.get_traced_memory()[1] < 4 * LIMIT
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_archive_that_unpacks_to_far_more_than_text_is_refused(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "_UNPACKED_BYTES", 1 << 20)
    data = b'{"text":"one"}\n' * (1 << 18)
    path = tmp_path / f"bomb.jsonl{suffix}"
    path.write_bytes(gzip.compress(data) if suffix == ".gz" else zstandard.compress(data))
    expected = r"bomb\.jsonl\.\w+ unpacks to over 1 MiB and over 200 times .*unpack it yourself"
    with pytest.raises(DataFormatError, match=expected):
        count_documents(path, "text")
    with pytest.raises(DataFormatError, match=expected):
        list(read_blocks(jsonl_segments([path], "text"), 64))


def test_pipe_and_device_are_refused_without_opening_them(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, name in ((tmp_path / "pipe", "a named pipe"), (Path("/dev/zero"), "a device")):
        with pytest.raises(DataFormatError, match=rf"{path} cannot be read: it is {name}, not a"):
            formats.open_file(path)


def test_a_disk_that_fails_at_the_head_of_a_file_is_reported_with_its_name() -> None:
    unreadable = "/proc/self/mem"  # opens, and fails at its first byte
    with pytest.raises(TransientFileError, match=f"{unreadable} .Input/output error"):
        formats.file_format_of(unreadable)
