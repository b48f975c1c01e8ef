"""Tests of the format of checkpoints and the choice of the latest complete one."""

import errno
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.artifact.manifest import file_digest
from megacore.checkpoint import format
from megacore.checkpoint.format import (
    MARKER_NAME,
    TRACKER_NAME,
    Marker,
    checkpoint_directories,
    complete_checkpoints,
    iteration_of,
    latest_complete,
    read_tracker,
    verify,
    write_tracker,
)
from megacore.checkpoint.save import save_checkpoint
from megacore.errors import CheckpointError, FileAccessError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for iteration in (100, 200):
        save_checkpoint(
            tmp_path, iteration, {"model.w": torch.full((8,), float(iteration))}, {"i": iteration}
        )
    return tmp_path


def choose(root: Path) -> tuple[int | None, list[str]]:
    """Return the iteration of the latest complete checkpoint and the warnings."""
    warnings: list[str] = []
    path = latest_complete(root, log=warnings.append)
    return None if path is None else iteration_of(path), warnings


def test_the_newest_complete_checkpoint_is_chosen_without_warning(root: Path) -> None:
    assert choose(root) == (200, [])


def test_an_empty_or_missing_root_has_no_checkpoint(tmp_path: Path) -> None:
    assert choose(tmp_path) == (None, [])
    assert choose(tmp_path / "absent") == (None, [])


@pytest.mark.parametrize("seconds", [-1, 1])
def test_quick_checks_the_hash_of_a_file_that_is_newer_than_the_marker(
    root: Path, seconds: int
) -> None:
    directory = root / "iter_0000200"
    file, marked = directory / "state.json", (directory / MARKER_NAME).stat().st_mtime
    file.write_bytes(file.read_bytes()[::-1])
    os.utime(file, (marked + seconds, marked + seconds))
    newest = directory if seconds < 0 else root / "iter_0000100"
    assert list(complete_checkpoints(root, "quick"))[-1] == newest
    assert list(complete_checkpoints(root, "full")) == [root / "iter_0000100"]


def test_a_copy_is_hashed_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []

    def digest(path: Path, on_read: Callable[[int], None] | None = None) -> str:
        hashed.append(path.name)
        return file_digest(path, on_read)

    directory = root / "iter_0000200"
    before = Marker.read(directory)
    later = (directory / MARKER_NAME).stat().st_mtime + 5
    for name in ("state.json", "__0_0.distcp"):
        os.utime(directory / name, (later, later))
    monkeypatch.setattr("megacore.checkpoint.format.file_digest", digest)
    calls: list[int] = []
    assert directory in complete_checkpoints(root, progress=lambda: calls.append(1))
    assert sorted(hashed) == ["__0_0.distcp", "state.json"]
    assert len(calls) >= 2
    assert directory in complete_checkpoints(root)
    assert len(hashed) == 2
    assert Marker.read(directory) == before


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "append", "delete", "empty"])
def test_a_checkpoint_with_a_damaged_file_is_skipped_with_the_files_name(
    root: Path, name: str, damage: str
) -> None:
    file = root / "iter_0000200" / name
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "truncate":
        file.write_bytes(content[:-1])
    elif damage == "append":
        file.write_bytes(content + b"\0")
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
    iteration, warnings = choose(root)
    assert iteration == 100
    (warning,) = warnings
    assert str(file) in warning
    with pytest.raises(CheckpointError, match="use another checkpoint"):
        verify(root / "iter_0000200")


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", '{"iteration": 200, "files": 3}'])
def test_a_checkpoint_with_a_missing_or_damaged_marker_is_skipped(
    root: Path, content: str | None
) -> None:
    marker = root / "iter_0000200" / MARKER_NAME
    marker.unlink()
    if content is not None:
        marker.write_text(content)
    iteration, warnings = choose(root)
    assert iteration == 100
    assert MARKER_NAME in warnings[0]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("iteration",), [200]),
        (("iteration",), "200"),
        (("validation_loss",), []),
        (("validation_loss",), "1.5"),
        (("validation_loss",), float("nan")),
        (("files", "state.json", "size"), None),
        (("files", "state.json", "sha256"), []),
    ],
)
def test_a_marker_with_a_value_of_another_type_is_skipped(
    root: Path, place: tuple[str, ...], value: Any
) -> None:
    path = root / "iter_0000200" / MARKER_NAME
    content = json.loads(path.read_text())
    functools.reduce(dict.__getitem__, place[:-1], content)[place[-1]] = value
    path.write_text(json.dumps(content))
    iteration, (warning,) = choose(root)
    assert iteration == 100
    assert f"{MARKER_NAME} is damaged ({place[0] if len(place) == 1 else 'the size'}" in warning
    assert list(complete_checkpoints(root)) == [root / "iter_0000100"]


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "read", "stat of the marker", "stat", "hash"])
def test_a_checkpoint_that_cannot_be_read_now_is_not_skipped(
    root: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    newest = root / "iter_0000200"

    def failing(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def fail(path: Any, *arguments: Any, **options: Any) -> Any:
            if path == newest / name:
                raise OSError(code, os.strerror(code), str(path))
            return function(path, *arguments, **options)

        return fail

    if call == "open":
        monkeypatch.setattr(os, "open", failing(os.open, MARKER_NAME))
    elif call == "read":
        monkeypatch.setattr(format, "read_json", failing(format.read_json, MARKER_NAME))
    elif call == "stat of the marker":
        marker = Marker.read(newest)
        monkeypatch.setattr(Path, "stat", failing(Path.stat, MARKER_NAME))
        with pytest.raises(FileAccessError, match=rf"iter_0000200/.*\({os.strerror(code)}\)"):
            marker.quick_problem(newest)
    elif call == "stat":
        monkeypatch.setattr(Path, "stat", failing(Path.stat, "state.json"))
    else:
        monkeypatch.setattr(format, "file_digest", failing(format.file_digest, "state.json"))
    with pytest.raises(FileAccessError, match=rf"iter_0000200/.*\({os.strerror(code)}\)"):
        choose(root)


def test_a_checkpoint_with_a_marker_of_another_iteration_is_skipped(root: Path) -> None:
    (root / "iter_0000200").rename(root / "iter_0000300")
    assert choose(root)[0] == 100


def test_a_marker_of_another_format_version_is_refused(root: Path) -> None:
    path = root / "iter_0000100" / MARKER_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 99}))
    with pytest.raises(CheckpointError, match="format_version 99, this version reads 1"):
        verify(root / "iter_0000100")


def test_no_checkpoint_is_chosen_if_all_are_damaged(root: Path) -> None:
    for directory in checkpoint_directories(root):
        (directory / "state.json").unlink()
    iteration, warnings = choose(root)
    assert iteration is None
    assert len(warnings) == 2


@pytest.mark.parametrize("content", ["100\n", "no number", ""])
def test_a_wrong_tracker_does_not_change_the_choice(root: Path, content: str) -> None:
    (root / TRACKER_NAME).write_text(content)
    assert choose(root) == (200, [])


def test_a_tracker_that_names_a_missing_checkpoint_is_logged(root: Path) -> None:
    write_tracker(root, 300)
    assert read_tracker(root) == 300
    iteration, warnings = choose(root)
    assert iteration == 200
    assert "names iteration 300, which is not there" in warnings[0]


def test_temporaries_and_other_directories_are_not_listed(root: Path) -> None:
    for name in ("iter_0000300.tmp-12", "iter_12", "iter_0000400.tmp-12-deleted", "notes"):
        (root / name).mkdir()
    assert [iteration_of(path) for path in checkpoint_directories(root)] == [100, 200]
    assert [marker.iteration for marker in complete_checkpoints(root).values()] == [100, 200]


def test_format_and_retention_import_no_torch() -> None:
    script = (
        "import sys, megacore.checkpoint.format, megacore.checkpoint.retain; assert 'torch' not in "
        "sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])
