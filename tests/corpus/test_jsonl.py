"""Tests of local JSON Lines sources."""

import errno
import gzip
import os
from pathlib import Path

import pytest
import zstandard

from megacore.config.data import JsonlSource
from megacore.corpus.blocks import iterate_texts, read_blocks
from megacore.corpus.collect import collect, fingerprint
from megacore.corpus.documents import read_sources
from megacore.corpus.local_files import count_documents, list_files
from megacore.corpus.segments import jsonl_segments, segments
from megacore.errors import DataFormatError, FileAccessError
from tests._listing import refuse_listing
from tests.corpus._files import write_form


def source(*files: Path | str, key: str = "text") -> JsonlSource:
    return JsonlSource(kind="jsonl", files=tuple(map(str, files)), key=key)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "b.jsonl").write_text('{"text": "one"}\n{"text": "two\\n"}\r\n')
    (folder / "a.jsonl").write_text('{"text": "three", "x": 1}')
    (folder / "c.jsonl").write_text("")
    (tmp_path / "out").mkdir()
    return folder


def test_files_are_referenced_in_the_configured_order(files: Path, tmp_path: Path) -> None:
    jsonl_source = source(files / "b.jsonl", files / "[ac].jsonl")
    assert collect(jsonl_source, tmp_path / "out") == {
        "documents": 3,
        "files": 3,
        "skipped_files": 0,
        "bytes": 60,
    }
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["sources.json"]
    assert list(iterate_texts(tmp_path / "out")) == ["one", "two\n", "three"]


def test_a_glob_reads_what_lies_below_linked_directories_once(tmp_path: Path) -> None:
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024/a.jsonl").write_text('{"text": "one"}\n')
    os.symlink("a.jsonl", tmp_path / "2024/b.jsonl")
    os.symlink("2024", tmp_path / "latest")
    os.symlink(".", tmp_path / "loop")
    source = JsonlSource(kind="jsonl", files=(f"{tmp_path}/**/*.jsonl",))
    paths = [Path(file.path).relative_to(tmp_path) for file in list_files(source)]
    assert [str(path) for path in paths] == ["2024/a.jsonl", "2024/b.jsonl"]


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EACCES, DataFormatError), (errno.EIO, FileAccessError)]
)
def test_a_folder_that_cannot_be_listed_is_refused_and_not_left_out_of_a_glob(
    number: int, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("2023", "2024"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text('{"text": "one"}\n')
    refuse_listing(monkeypatch, "2024", number)
    for pattern in ("*/*.jsonl", "**/*.jsonl"):
        with pytest.raises(kind, match=r"/2024 .*(Permission denied|Input/output error)"):
            list_files(source(tmp_path / pattern))


def test_a_file_that_several_patterns_match_is_read_as_often_and_named(
    files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counts = collect(source(files / "a.jsonl", files / "b.jsonl"), tmp_path / "out")
    assert (counts["documents"], caplog.messages) == (3, [])
    os.symlink("in", tmp_path / "link")
    repeated = source(files / "*.jsonl", tmp_path / "link/a.jsonl")
    assert collect(repeated, tmp_path / "out")["documents"] == 4
    (message,) = caplog.messages
    assert f"1 file more than once, the first being {files / 'a.jsonl'} 2 times" in message


def test_a_changed_file_is_refused_and_has_another_fingerprint(files: Path, tmp_path: Path) -> None:
    jsonl_source = source(files / "a.jsonl")
    before = fingerprint(jsonl_source)
    collect(jsonl_source, tmp_path / "out")
    assert read_sources(tmp_path / "out") is not None
    with open(files / "a.jsonl", "a") as file:
        file.write("\n")
    assert fingerprint(jsonl_source) != before
    with pytest.raises(DataFormatError, match=r"a\.jsonl has changed since it was collected"):
        segments(tmp_path / "out")


def test_missing_file_empty_glob_and_empty_corpus_are_refused(files: Path, tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match=r"none\.jsonl cannot be read: No such file"):
        fingerprint(source(files / "none.jsonl"))
    with pytest.raises(DataFormatError, match="no file matches"):
        fingerprint(source(files / "*.gz"))
    with pytest.raises(DataFormatError, match="is not a file"):
        fingerprint(source(files))
    with pytest.raises(DataFormatError, match="the corpus is empty"):
        collect(source(files / "c.jsonl"), tmp_path / "out")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"x\.jsonl:2 is not JSON"),
        ("", r"x\.jsonl:2 is blank"),
        ('"text"', r"x\.jsonl:2 holds a JSON str"),
        ('{"body": "a"}', r"x\.jsonl:2 has no key 'text', only body"),
        ('{"text": null}', r"x\.jsonl:2 has a NoneType under 'text'"),
        ('{"text": "\\ud800"}', r"x\.jsonl:2 is not JSON"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(
    files: Path, tmp_path: Path, line: str, message: str
) -> None:
    (files / "x.jsonl").write_text(f'{{"text": "fine"}}\n{line}\n{{"text": "fine"}}\n')
    assert collect(source(files / "b.jsonl", files / "x.jsonl"), tmp_path / "out")["documents"] == 5
    with pytest.raises(DataFormatError, match=message):
        list(iterate_texts(tmp_path / "out"))


def test_more_files_than_descriptors_can_be_read(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number:03}.jsonl").write_text(f'{{"text": "{number}"}}\n')
    (tmp_path / "out").mkdir()
    collect(source(tmp_path / "*.jsonl"), tmp_path / "out")
    assert list(iterate_texts(tmp_path / "out")) == [str(number) for number in range(300)]


def test_a_damaged_sources_json_is_refused(files: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "sources.json").write_text('{"kind": "jsonl", "files": [{}]}')
    with pytest.raises(DataFormatError, match=r"sources\.json is damaged"):
        segments(tmp_path / "out")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_are_counted_and_referenced(tmp_path: Path, suffix: str) -> None:
    texts = [f"text {number}" * 100 for number in range(3000)]
    path = write_form(tmp_path / f"a.jsonl{suffix}", texts)
    (tmp_path / "out").mkdir()
    size = path.stat().st_size
    assert collect(source(path), tmp_path / "out") == {
        "documents": 3000, "files": 1, "skipped_files": 0, "bytes": size,
    }  # fmt: skip
    assert list(iterate_texts(tmp_path / "out")) == texts
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(
        DataFormatError, match=rf"a\.jsonl{suffix} ends in the middle of its \w+ data"
    ):
        collect(source(path), tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "documents"),
    [
        (b"\n", 1),
        (b"a", 1),
        (b"a\n", 1),
        (b"a\n\n", 2),
        (b"a\nb", 2),
        (b"\xef\xbb\xbf", 0),
        (b"\xef\xbb\xbfa\r\n", 1),
    ],
)
def test_every_line_is_counted_as_a_document(
    tmp_path: Path, content: bytes, documents: int
) -> None:
    for suffix, compress in {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}.items():
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(compress(content))
        assert count_documents(path, "text") == documents
        blocks = list(read_blocks(jsonl_segments([path], "text"), 1))
        assert sum(len(part) for block in blocks for part in block.texts()) == documents


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable to root")
def test_an_unreadable_file_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "a.jsonl").chmod(0)
    with pytest.raises(DataFormatError, match=r"a\.jsonl cannot be read: Permission denied"):
        collect(source(tmp_path / "a.jsonl"), tmp_path)
