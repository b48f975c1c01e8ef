"""Tests of atomic file replacement and of reading JSON files."""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from megacore.artifact.files import read_json, read_record, replace_file, staged, write_json
from megacore.errors import WorkspaceError


@dataclass(frozen=True)
class Size:
    name: str
    count: int


@pytest.mark.parametrize("durable", [True, False])
def test_replacing_a_file_leaves_no_temporary(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a longer text")
    replace_file(path, b"short", durable=durable, mode=0o600)
    assert path.read_bytes() == b"short"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [*tmp_path.iterdir()] == [path]


def test_a_failed_replacement_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


def test_a_failed_sync_leaves_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command would refuse an output that is there."""

    def fail(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("megacore.artifact.files.sync_directory", fail)
    with (
        pytest.raises(WorkspaceError, match="out: Input/output error: check the disk"),
        staged(tmp_path / "out") as staging,
    ):
        (staging / "file").touch()
    assert list(tmp_path.iterdir()) == []


def test_written_json_is_read_back_equal(tmp_path: Path) -> None:
    value = {"b": [1, 2.5, None], "a": "ü"}
    write_json(tmp_path / "value.json", value)
    assert read_json(tmp_path / "value.json") == value
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "other.json")


@pytest.mark.parametrize(
    "text", ['{"name": "a"', '{"name": "a"}', '{"name": "a", "count": 1, "more": 2}', "[1]", "\xff"]
)
def test_a_damaged_record_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "size.json"
    assert read_record(path, Size) is None
    path.write_text('{"name": "a", "count": 1}')
    assert read_record(path, Size) == Size("a", 1)
    path.write_bytes(text.encode("latin-1"))
    assert read_record(path, Size) is None
