import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megacore.checkpoint.format import (
    MARKER_NAME,
    TRACKER_NAME,
    checkpoint_directories,
    complete_checkpoints,
    iteration_of,
    latest_complete,
    read_tracker,
    verify,
    write_tracker,
)
from megacore.checkpoint.save import save_checkpoint
from megacore.errors import CheckpointError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for iteration in (100, 200):
        save_checkpoint(
            tmp_path, iteration, {"model.w": torch.full((8,), float(iteration))}, {"i": iteration}
        )
    return tmp_path


def chosen(root: Path) -> tuple[int | None, list[str]]:
    warnings: list[str] = []
    path = latest_complete(root, log=warnings.append)
    return None if path is None else iteration_of(path), warnings


def test_newest_complete_one_is_chosen_silently(root: Path) -> None:
    assert chosen(root) == (200, [])


def test_nothing_there(tmp_path: Path) -> None:
    assert chosen(tmp_path) == (None, [])
    assert chosen(tmp_path / "absent") == (None, [])


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "append", "delete", "empty"])
def test_any_damage_to_any_file_passes_it_over_with_the_files_name(
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
    iteration, warnings = chosen(root)
    assert iteration == 100
    (warning,) = warnings
    assert str(file) in warning
    with pytest.raises(CheckpointError, match="use another checkpoint"):
        verify(root / "iter_0000200")


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", '{"iteration": 200, "files": 3}'])
def test_missing_or_damaged_marker_passes_it_over(root: Path, content: str | None) -> None:
    marker = root / "iter_0000200" / MARKER_NAME
    marker.unlink()
    if content is not None:
        marker.write_text(content)
    iteration, warnings = chosen(root)
    assert iteration == 100
    assert MARKER_NAME in warnings[0]


def test_marker_of_another_iteration_or_version_is_refused(root: Path) -> None:
    (root / "iter_0000200").rename(root / "iter_0000300")
    assert chosen(root)[0] == 100
    path = root / "iter_0000100" / MARKER_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 99}))
    with pytest.raises(CheckpointError, match="format_version 99, this version reads 1"):
        verify(root / "iter_0000100")


def test_all_damaged_is_none(root: Path) -> None:
    for directory in checkpoint_directories(root):
        (directory / "state.json").unlink()
    iteration, warnings = chosen(root)
    assert iteration is None
    assert len(warnings) == 2


@pytest.mark.parametrize("content", ["100\n", "no number", ""])
def test_tracker_is_not_trusted(root: Path, content: str) -> None:
    (root / TRACKER_NAME).write_text(content)
    assert chosen(root) == (200, [])


def test_tracker_that_names_what_is_gone_is_mentioned(root: Path) -> None:
    write_tracker(root, 300)
    assert read_tracker(root) == 300
    iteration, warnings = chosen(root)
    assert iteration == 200
    assert "names iteration 300, which is not there" in warnings[0]


def test_temporaries_and_strangers_are_no_checkpoints(root: Path) -> None:
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
