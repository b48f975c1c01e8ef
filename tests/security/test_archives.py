"""Entries of a malicious archive stay in the directory where nltk unpacks Punkt's archive.

It is the only archive that megacore downloads.
"""

import stat
import zipfile
from pathlib import Path

import pytest

from tests.architecture._source import python_files, tree

nltk_downloader = pytest.importorskip("nltk.downloader")


def archive(path: Path, entries: dict[str, str], link: str | None = None) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, content in entries.items():
            file.writestr(zipfile.ZipInfo(name), content)
        if link:
            entry = zipfile.ZipInfo(link)
            entry.create_system = 3
            entry.external_attr = (stat.S_IFLNK | 0o777) << 16
            file.writestr(entry, "../../outside")
    return path


def unpack(path: Path, root: Path) -> list[str]:
    """Unpack an archive with nltk's downloader and return its errors."""
    from nltk import data

    with pytest.MonkeyPatch.context() as patch:
        # nltk refuses an archive that is not in its data path.
        patch.setattr(data, "path", [str(root.parent)])
        messages = list(nltk_downloader._unzip_iter(str(path), str(root), verbose=False))
    return [
        str(message.message)
        for message in messages
        if isinstance(message, nltk_downloader.ErrorMessage)
    ]


@pytest.mark.parametrize(
    "name",
    ["../escaped", "punkt_tab/../../escaped", "/usr/../{outside}/escaped", "{outside}/escaped"],
)
def test_entries_outside_the_directory_are_refused(name: str, tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "data" / "tokenizers"
    outside.mkdir()
    inside.mkdir(parents=True)
    path = archive(inside / "punkt_tab.zip", {name.format(outside=outside): "planted"})
    assert any("blocked" in problem for problem in unpack(path, inside))
    assert [path for path in tmp_path.rglob("*") if path.name == "escaped"] == []


def test_valid_archive_is_unpacked(tmp_path: Path) -> None:
    inside = tmp_path / "data" / "tokenizers"
    inside.mkdir(parents=True)
    assert (
        unpack(archive(inside / "punkt_tab.zip", {"punkt_tab/english/a.tab": "content"}), inside)
        == []
    )
    assert (inside / "punkt_tab" / "english" / "a.tab").read_text() == "content"


def test_link_in_an_archive_is_not_followed(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "data" / "tokenizers"
    outside.mkdir()
    inside.mkdir(parents=True)
    path = archive(inside / "punkt_tab.zip", {}, link="punkt_tab/link")
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("punkt_tab/link/escaped", "planted")
    assert unpack(path, inside) != []
    assert list(outside.iterdir()) == []
    assert not any(path.is_symlink() for path in inside.rglob("*"))


def test_no_code_unpacks_archives() -> None:
    import ast

    functions = {"extractall", "extract", "unpack_archive"}
    for path in python_files("megacore", "tasks", "flows", "scripts", "benchmarks"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr not in functions, f"{path}:{node.lineno}"
