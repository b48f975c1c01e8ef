"""Tests of source trees as sources."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from megacore.config.data import SourceTreeSource
from megacore.corpus.collect import collect, fingerprint
from megacore.corpus.source_tree import list_files, pattern_of, root_of
from megacore.errors import DataFormatError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name, content in {
        "b.py": b"b = 1\n",
        "a/c.py": "ü\r\n".encode(),
        "a/latin.py": "ü".encode("latin-1"),
        "a/empty.py": b"",
        "a/notes.txt": b"no",
        "site-packages/x.py": b"no",
        "a/dist-packages/x.py": b"no",
        "a/__pycache__/x.py": b"no",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    os.mkfifo(root / "pipe.py")
    (root / "dangling.py").symlink_to("nowhere")
    return root


def test_files_become_documents_in_path_order(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    source = SourceTreeSource(kind="source_tree", path=str(tree), pattern="*.py")
    counts = collect(source, tmp_path / "out")
    assert counts == {"documents": 3, "files": 4, "skipped_files": 1, "bytes": 10}
    lines = (tmp_path / "out" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"text": "ü\r\n", "source": "a/c.py"},
        {"text": "", "source": "a/empty.py"},
        {"text": "b = 1\n", "source": "b.py"},
    ]


def test_fingerprint_depends_only_on_paths_and_content(tree: Path) -> None:
    source = SourceTreeSource(kind="source_tree", path=str(tree), pattern="*.py")
    before = fingerprint(source)
    assert before["files"] == 4
    os.utime(tree / "b.py", (1, 1))
    moved = tree.rename(tree.with_name("moved"))
    source = source.model_copy(update={"path": str(moved)})
    assert fingerprint(source) == before
    (moved / "b.py").write_bytes(b"b = 2\n")
    assert fingerprint(source) != before


def test_fingerprint_depends_on_whether_a_pattern_is_set(tmp_path: Path) -> None:
    (tmp_path / "full.txt").write_text("text")
    (tmp_path / "empty.txt").write_text("")
    source = SourceTreeSource(kind="source_tree", path=str(tmp_path))
    some, every = (source.model_copy(update={"pattern": pattern}) for pattern in ("*.txt", "*"))
    # Both patterns select the same files; without one, the empty file is skipped.
    assert set(fingerprint(some)) == {"kind", "files", "sha256"}
    assert fingerprint(some) == fingerprint(every) != fingerprint(source)


def test_a_directory_without_a_pattern_gives_all_its_text(tree: Path, tmp_path: Path) -> None:
    (tree / ".hidden").write_text("no")
    (tree / ".git").mkdir()
    (tree / ".git" / "config").write_text("no")
    (tree / "nul.bin").write_bytes(b"a\0b")
    (tmp_path / "out").mkdir()
    counts = collect(SourceTreeSource(kind="source_tree", path=str(tree)), tmp_path / "out")
    assert counts == {"documents": 3, "files": 6, "skipped_files": 3, "bytes": 12}
    lines = (tmp_path / "out" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["source"] for line in lines] == ["a/c.py", "a/notes.txt", "b.py"]


def test_files_in_a_folder_whose_name_is_not_utf8_are_left_out(tree: Path, tmp_path: Path) -> None:
    folder = tree / os.fsdecode(b"\xfc")
    folder.mkdir()
    (folder / "d.py").write_text("no")
    (tmp_path / "out").mkdir()
    for pattern in ("*.py", None):
        source = SourceTreeSource(kind="source_tree", path=str(tree), pattern=pattern)
        assert collect(source, tmp_path / "out")["documents"] == 3


def test_a_file_in_a_folder_that_may_not_be_entered_is_refused(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{tree}/a/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(DataFormatError, match=r"/a/\S+ cannot be read: Permission denied"):
        list_files(tree, "*.py")


def test_the_default_tree_is_the_standard_library() -> None:
    source = SourceTreeSource(kind="source_tree")
    files = list_files(root_of(source), pattern_of(source))
    assert "json/decoder.py" in files
    assert not [name for name in files if "site-packages" in name]


def test_missing_and_empty_trees_are_refused(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match="which is not a directory"):
        fingerprint(SourceTreeSource(kind="source_tree", path=str(tmp_path / "none")))
    (tmp_path / "out").mkdir()
    with pytest.raises(
        DataFormatError, match=r"the corpus is empty: .* with pattern \*\.rs has no document"
    ):
        collect(
            SourceTreeSource(kind="source_tree", path=str(tree), pattern="*.rs"), tmp_path / "out"
        )


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.py", ["a/c.py", "a/empty.py", "a/latin.py", "b.py"]),
        ("*", ["a/c.py", "a/empty.py", "a/latin.py", "a/notes.txt", "b.py"]),
        ("./*.py", []),
        ("a/*.py", ["a/c.py", "a/empty.py", "a/latin.py"]),
        ("a/*", ["a/c.py", "a/empty.py", "a/latin.py", "a/notes.txt"]),
        ("*/c.py", ["a/c.py"]),
        ("[!b]/?.py", ["a/c.py"]),
        ("**/*.py", ["a/c.py", "a/empty.py", "a/latin.py", "b.py"]),
        ("a/**", ["a/c.py", "a/empty.py", "a/latin.py", "a/notes.txt"]),
        ("**/a/**/c.*", ["a/c.py"]),
        ("a/**/b/*.py", []),
        ("**/site-packages/*.py", []),
    ],
)
def test_pattern_selects_files(tree: Path, pattern: str, names: list[str]) -> None:
    assert list_files(tree, pattern) == names


def test_double_star_matches_folders_at_any_depth(tmp_path: Path) -> None:
    for name in ("a/b/c/d.md", "a/d.md", "b/c/d.md", "d.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert list_files(tmp_path, "a/**/*.md") == ["a/b/c/d.md", "a/d.md"]
    assert list_files(tmp_path, "**/c/*.md") == ["a/b/c/d.md", "b/c/d.md"]
    assert list_files(tmp_path, "*/*.md") == ["a/d.md"]
