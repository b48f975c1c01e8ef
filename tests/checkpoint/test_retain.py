"""Tests of deleting old checkpoints and of locks against deleting one that is read."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megacore.checkpoint import retain
from megacore.checkpoint.format import (
    MARKER_NAME,
    FileRecord,
    Marker,
    checkpoint_directories,
    directory_name,
    exclusive_lock,
    iteration_of,
    reading,
    verify,
)
from megacore.checkpoint.retain import (
    apply_retention,
    delete_stale,
    publish,
    remove_stale,
    rename_to_stale,
)
from megacore.errors import CheckpointError, WorkspaceError
from tests._limits import HANG


def write_checkpoints(root: Path, losses: dict[int, float | None]) -> None:
    """Write a complete checkpoint for each iteration with its validation loss."""
    for iteration, loss in losses.items():
        directory = root / directory_name(iteration)
        directory.mkdir(parents=True)
        (directory / "state.json").write_text("{}")
        Marker(iteration, loss, {"state.json": FileRecord.of(directory / "state.json")}).write(
            directory
        )


def iterations(root: Path) -> list[int | None]:
    return [iteration_of(path) for path in checkpoint_directories(root)]


LOSSES = {100: 3.0, 200: 2.0, 300: 2.5, 400: 2.0, 500: None, 600: 4.0}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"keep_last": 2, "keep_best": False}, [500, 600]),
        ({"keep_last": 1, "keep_best": True}, [200, 600]),  # the older of two equal losses
        ({"keep_last": 1, "keep_best": False, "keep_every": 300}, [300, 600]),
        ({"keep_last": 1, "keep_best": True, "keep_every": 200}, [200, 400, 600]),
        ({"keep_last": 9, "keep_best": False}, [100, 200, 300, 400, 500, 600]),
        (
            {"keep_last": 1, "keep_best": False, "in_use": Path("elsewhere/iter_0000600")},
            [600],
        ),
        # measured after the save; the loss in a marker stays
        ({"keep_last": 1, "keep_best": True, "losses": {500: 1.9, 600: 1.0}}, [500, 600]),
        # the best and the newest are damaged
        (
            {"keep_last": 2, "keep_best": True, "damaged": {Path("200"), Path("600")}},
            [400, 500],
        ),
        # the later ones are damaged: they are neither counted nor deleted
        ({"keep_last": 2, "keep_best": True, "in_use": Path("iter_0000300")}, list(LOSSES)[1:]),
    ],
)
def test_rules_select_the_checkpoints_to_keep(
    tmp_path: Path, rules: dict[str, object], expected: list[int]
) -> None:
    write_checkpoints(tmp_path, LOSSES)
    if "damaged" in rules:
        numbers = [int(path.name) for path in rules["damaged"]]  # type: ignore[attr-defined]
        rules = rules | {"damaged": {tmp_path / directory_name(number) for number in numbers}}
    deleted = apply_retention(tmp_path, **rules)  # type: ignore[arg-type]
    assert iterations(tmp_path) == expected
    assert [iteration_of(path) for path in deleted] == [i for i in LOSSES if i not in expected]
    assert not list(tmp_path.glob("*.tmp-*"))


def test_the_only_complete_checkpoint_is_kept_if_newer_ones_are_damaged(tmp_path: Path) -> None:
    write_checkpoints(tmp_path, {100: None, 200: None, 300: None})
    for iteration in (200, 300):
        (tmp_path / directory_name(iteration) / "state.json").write_text("damaged")
    assert apply_retention(tmp_path, keep_last=1, keep_best=False) == []
    assert 100 in iterations(tmp_path)


def test_a_checkpoint_behind_a_link_loses_only_the_link(tmp_path: Path) -> None:
    root, other = tmp_path / "run", tmp_path / "other"
    write_checkpoints(other, {100: None})
    write_checkpoints(root, {200: None})
    (root / directory_name(100)).symlink_to(other / directory_name(100))
    assert len(apply_retention(root, keep_last=1)) == 1
    assert [path.name for path in root.iterdir()] == [directory_name(200)]
    verify(other / directory_name(100))


def test_a_write_protected_checkpoint_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoints(tmp_path, {100: None, 200: None, 300: None})
    protected, real = tmp_path / directory_name(100) / MARKER_NAME, os.open

    def open_file(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if path == protected and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", open_file)
    assert [path.name for path in apply_retention(tmp_path, keep_last=1)] == [directory_name(200)]
    assert iterations(tmp_path) == [100, 300]
    assert f"{protected} may not be written, so its checkpoint is kept" in caplog.text


def test_a_missing_root_has_nothing_to_delete(tmp_path: Path) -> None:
    assert apply_retention(tmp_path / "absent", keep_last=1) == []


def test_a_checkpoint_read_by_another_process_is_deleted_after_the_read(tmp_path: Path) -> None:
    write_checkpoints(tmp_path, {100: None, 200: None, 300: None})
    script = """
import sys
from pathlib import Path
from megacore.checkpoint.format import reading
with reading(Path(sys.argv[1])):
    print("reads", flush=True)
    sys.stdin.readline()
"""
    command = [sys.executable, "-c", script, str(tmp_path / directory_name(100))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reads\n"
        assert [path.name for path in apply_retention(tmp_path, keep_last=1)] == [
            directory_name(200)
        ]
        assert iterations(tmp_path) == [100, 300]
        reader.communicate("\n", timeout=HANG)
        assert reader.returncode == 0
    assert [path.name for path in apply_retention(tmp_path, keep_last=1)] == [directory_name(100)]
    assert iterations(tmp_path) == [300]


def test_a_checkpoint_read_by_this_process_is_deleted_after_the_read(tmp_path: Path) -> None:
    write_checkpoints(tmp_path, {100: None, 200: None})
    with reading(tmp_path / directory_name(100)):
        assert apply_retention(tmp_path, keep_last=1) == []
        with reading(tmp_path / directory_name(100)):  # several readers are allowed
            pass
    assert iterations(tmp_path) == [100, 200]
    assert len(apply_retention(tmp_path, keep_last=1)) == 1


def test_a_reader_of_a_deleted_or_replaced_checkpoint_gets_an_error(tmp_path: Path) -> None:
    write_checkpoints(tmp_path, {100: None, 200: None})
    directory = tmp_path / directory_name(100)

    def replace() -> None:
        with reading(directory):
            rename_to_stale(directory)
            write_checkpoints(tmp_path, {100: 1.0})

    with pytest.raises(
        CheckpointError, match="iter_0000100 was deleted or replaced while it was opened or read"
    ):
        replace()
    rename_to_stale(directory)
    with (
        pytest.raises(CheckpointError, match=r"iter_0000100 has no complete\.json"),
        reading(directory),
    ):
        pass


def descriptors(path: Path) -> list[str]:
    """Return the descriptors of this process that are open for a file."""
    links = {name: Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")}
    return [name for name, link in links.items() if link.exists() and link.samefile(path)]


def test_a_reader_that_waits_during_the_deletion_gets_an_error(tmp_path: Path) -> None:
    # The reader has opened the marker and gets the lock after the checkpoint is deleted.
    write_checkpoints(tmp_path, {100: None})
    directory = tmp_path / directory_name(100)
    results: list[str] = []

    def read() -> None:
        try:
            with reading(directory):
                results.append("nothing")
        except CheckpointError as error:
            results.append(str(error))

    with exclusive_lock(directory / MARKER_NAME) as unread:
        assert unread
        reader = threading.Thread(target=read)
        reader.start()
        while len(descriptors(directory / MARKER_NAME)) < 2:
            time.sleep(0.01)
        assert results == []
        rename_to_stale(directory)
    reader.join(HANG)
    assert len(results) == 1
    assert "was deleted or replaced" in results[0]


def test_a_stale_marker_counts_as_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # NFS reports an open file as stale after another host has deleted it.
    write_checkpoints(tmp_path, {100: None})

    def stale(descriptor: int) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", stale)
        with (
            pytest.raises(CheckpointError, match="deleted or replaced"),
            reading(tmp_path / directory_name(100)),
        ):
            pass


def test_a_file_system_without_locks_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoints(tmp_path, {100: None, 200: None})

    def flock(*args: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    assert len(apply_retention(tmp_path, keep_last=1)) == 1
    assert "file system without locks: it may be deleted while it is read" in caplog.text


def test_an_interrupted_deletion_leaves_no_visible_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoints(tmp_path, {100: None, 200: None})

    def killed(path: Path) -> None:
        os.unlink(Path(path) / "state.json")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            shutil.rmtree(rename_to_stale(tmp_path / directory_name(100)))
    assert iterations(tmp_path) == [200]
    (removed,) = remove_stale(tmp_path)
    assert removed.name.startswith("iter_0000100.tmp-")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000200"]


@pytest.fixture
def busy_files(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let no directory be deleted, as on NFS while a process has a file in it open."""

    def not_empty(path: Path, *args: object, **options: object) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    monkeypatch.setattr(os, "rmdir", not_empty)
    return monkeypatch


def test_a_failed_deletion_is_a_warning_and_is_tried_again(
    tmp_path: Path, busy_files: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoints(tmp_path, {100: None, 200: None})
    assert [path.name for path in apply_retention(tmp_path, keep_last=1)] == [directory_name(100)]
    assert iterations(tmp_path) == [200]
    assert "Directory not empty" in caplog.text
    assert "the next save or resume tries again" in caplog.text
    assert remove_stale(tmp_path) == []
    busy_files.undo()
    (removed,) = remove_stale(tmp_path)
    assert removed.name.startswith("iter_0000100.tmp-")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000200"]


def test_one_failed_deletion_does_not_keep_the_other_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoints(tmp_path, {100: None, 200: None})
    first, second = (rename_to_stale(tmp_path / directory_name(number)) for number in (100, 200))
    tracker = tmp_path / "latest_checkpointed_iteration.txt.tmp-1"
    tracker.touch()
    original = shutil.rmtree

    def rmtree(path: Path) -> None:
        if path == first:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        original(path)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert remove_stale(tmp_path) == [second, tracker]
    assert list(tmp_path.iterdir()) == [first]


def test_a_checkpoint_that_cannot_be_renamed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoints(tmp_path, {100: None, 200: None})

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(source))

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(WorkspaceError, match="iter_0000100: Permission denied"):
        apply_retention(tmp_path, keep_last=1)
    assert iterations(tmp_path) == [100, 200]


def test_what_is_gone_already_counts_as_deleted(tmp_path: Path) -> None:
    assert delete_stale(tmp_path / "iter_0000100.tmp-1-deleted")


@pytest.mark.parametrize(
    ("remains", "loss"),
    [
        ({"0000000f-replaced": 1.0, "0000001f": 2.0}, 2.0),  # killed between the two renames
        ({"0000000f-replaced": 1.0, "0000001f": None}, 1.0),  # the new save is damaged
        ({"0000001f": 2.0}, 2.0),  # killed before the only rename
        ({"0000000f-deleted": 1.0}, None),  # retention has chosen it
        ({"copy-0000000f": 1.0}, None),
    ],
)
def test_a_complete_save_that_a_crash_left_without_its_name_gets_it(
    tmp_path: Path, remains: dict[str, float | None], loss: float | None
) -> None:
    path = tmp_path / directory_name(100)
    for end, each in remains.items():
        write_checkpoints(tmp_path, {100: each})
        if each is None:
            (path / "state.json").unlink()
        path.rename(f"{path}.tmp-{end}")
    named = min(remains, key=lambda end: remains[end] != loss)
    gone = {f"{path}.tmp-{end}" for end in remains if loss is None or end != named}
    assert set(map(str, remove_stale(tmp_path))) == gone
    assert list(tmp_path.iterdir()) == ([] if loss is None else [path])
    assert loss is None or verify(path).validation_loss == loss


def test_a_failed_sync_of_a_replacement_leaves_a_checkpoint_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoints(tmp_path, {100: 2.0})
    path = tmp_path / directory_name(100)
    staging = path.rename(f"{path}.tmp-0000001f")
    write_checkpoints(tmp_path, {100: 1.0})

    def fail(directory: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(directory))

    monkeypatch.setattr(retain, "sync_directory", fail)
    with pytest.raises(OSError, match="Input/output error"):
        publish(staging, path)
    assert verify(path).validation_loss == 2.0


def test_a_save_whose_name_is_taken_is_deleted(tmp_path: Path) -> None:
    write_checkpoints(tmp_path, {100: 1.0})
    path = tmp_path / directory_name(100)
    stale = path.rename(f"{path}.tmp-0000000f-replaced")
    write_checkpoints(tmp_path, {100: 2.0})
    assert remove_stale(tmp_path) == [stale]
    assert Marker.read(path).validation_loss == 2.0
