"""Tests of text files as sources."""

import json
import os
from pathlib import Path

import pytest

from megacore.config.data import TextSource
from megacore.corpus.collect import collect, fingerprint
from megacore.corpus.text_files import documents
from megacore.errors import DataFormatError


def source_of(*files: Path, characters: int | None = None) -> TextSource:
    return TextSource(kind="text", files=tuple(map(str, files)), document_characters=characters)


def collected(source: TextSource, directory: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    directory.mkdir()
    counts = collect(source, directory)
    lines = (directory / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    return counts, [(entry["source"], entry["text"]) for entry in map(json.loads, lines)]


def test_a_file_is_cut_at_paragraphs_and_keeps_its_lines(tmp_path: Path) -> None:
    text = "".join(f"Paragraph {number},\nsecond line.\n\n" for number in range(40))
    (tmp_path / "a.txt").write_text(text)
    counts, entries = collected(source_of(tmp_path / "a.txt", characters=100), tmp_path / "out")
    assert counts["documents"] == len(entries) > 10
    assert "".join(part for _, part in entries) == text
    assert all(len(part) <= 100 and part.endswith("line.\n\n") for _, part in entries)
    lines = text.splitlines()
    for place, part in entries:
        name, line = place.rsplit(":", 1)
        assert name == "a.txt"
        assert lines[int(line) - 1] == part.splitlines()[0]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_blank_line_is_found_with_either_line_end(tmp_path: Path, newline: str) -> None:
    path, text = tmp_path / "a.txt", "one\ntwo three four\n\nfive six\nseven eight nine ten"
    path.write_bytes(text.replace("\n", newline).encode())
    assert [part.split()[0] for part in documents(path, 36)] == ["one", "five"]


def test_a_line_end_of_two_characters_is_not_divided(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * 15 + b"\r\n" + b"b" * 5)
    assert list(documents(path, 16)) == ["a" * 15, "\r\nbbbbb"]


@pytest.mark.parametrize("text", ["x" * 1001, "word " * 300, "line\n" * 200, "ü" * 99 + "\n\n" * 9])
@pytest.mark.parametrize("characters", [16, 100, 5000])
def test_parts_are_the_whole_text(tmp_path: Path, text: str, characters: int) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode())
    parts = list(documents(tmp_path / "a.txt", characters))
    assert "".join(parts) == text
    assert all(0 < len(part) <= characters for part in parts)
    assert all(len(part) > characters // 2 - 1 for part in parts[:-1])


def test_a_file_whose_name_is_not_utf8_is_refused_with_its_remedy(tmp_path: Path) -> None:
    file = tmp_path / os.fsdecode(b"\xfc.txt")
    file.write_text("text")
    with pytest.raises(DataFormatError, match=r"\\udcfc\.txt has a name that is not UTF-8: rename"):
        collected(source_of(file), tmp_path / "out")


def test_parts_do_not_depend_on_how_much_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(
        f"{'ä' * (number % 50)}\n{'' if number % 7 else chr(10)}" for number in range(400)
    )
    (tmp_path / "a.txt").write_bytes(text.encode())
    expected = list(documents(tmp_path / "a.txt", 120))
    monkeypatch.setattr("megacore.corpus.text_files._READ_BYTES", 7)
    assert list(documents(tmp_path / "a.txt", 120)) == expected


@pytest.mark.parametrize("pattern", ["**", "**/*", "*"])
def test_a_glob_that_matches_a_directory_and_its_files_reads_them_once(
    tmp_path: Path, pattern: str
) -> None:
    (tmp_path / "in/sub").mkdir(parents=True)
    (tmp_path / "in/a.txt").write_text("a")
    (tmp_path / "in/sub/b.txt").write_text("b")
    os.symlink("sub", tmp_path / "in/latest")
    counts, _ = collected(source_of(tmp_path / "in" / pattern), tmp_path / "out")
    assert counts["documents"] == 2


def test_a_file_that_is_named_with_its_directory_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("a")
    counts, _ = collected(source_of(tmp_path / "in", tmp_path / "in/a.txt"), tmp_path / "out")
    assert counts["documents"] == 2
    assert [f"{tmp_path / 'in/a.txt'} 2 times" in each for each in caplog.messages] == [True]


def test_a_directory_gives_its_text_and_counts_the_rest(tmp_path: Path) -> None:
    root = tmp_path / "notes"
    (root / ".git").mkdir(parents=True)
    (root / ".git" / "config").write_text("no")
    (root / "b.md").write_bytes(b"\xef\xbb\xbfB")
    (root / "a.txt").write_text("A")
    (root / "empty.md").write_text(" \n")
    (root / "image.png").write_bytes(b"\x89PNG\0\xff")
    os.mkfifo(root / "pipe")
    counts, entries = collected(source_of(root), tmp_path / "out")
    assert counts == {"documents": 2, "files": 4, "skipped_files": 2, "bytes": 5}
    assert entries == [("a.txt", "A"), ("b.md", "B")]


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"", "is empty"), (b"a\0b", "is binary"), ("ü".encode("latin-1"), "is not UTF-8")],
)
def test_a_named_file_that_is_no_text_is_refused(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataFormatError, match=rf"a\.txt {problem}.*name files of UTF-8 text"):
        collected(source_of(tmp_path / "a.txt"), tmp_path / "out")


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match="cannot be read: No such file"):
        fingerprint(source_of(tmp_path / "none.txt"))
    with pytest.raises(DataFormatError, match="no file matches"):
        fingerprint(source_of(tmp_path / "*.txt"))


def test_fingerprint_depends_on_names_content_and_cut(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A")
    before = fingerprint(source_of(tmp_path / "a.txt"))
    os.utime(tmp_path / "a.txt", (1, 1))
    assert fingerprint(source_of(tmp_path / "*.txt")) == before
    assert fingerprint(source_of(tmp_path / "a.txt", characters=16)) != before
    (tmp_path / "a.txt").write_text("B")
    assert fingerprint(source_of(tmp_path / "a.txt")) != before
