import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megacore.checkpoint.format import (
    MARKER_NAME,
    FileRecord,
    Marker,
    checkpoint_directories,
    directory_name,
    exclusive_lock,
    iteration_of,
    reading,
)
from megacore.checkpoint.retain import apply_retention, remove_stale, rename_away
from megacore.errors import CheckpointError


def make(root: Path, losses: dict[int, float | None]) -> None:
    for iteration, loss in losses.items():
        directory = root / directory_name(iteration)
        directory.mkdir(parents=True)
        (directory / "state.json").write_text("{}")
        Marker(iteration, loss, {"state.json": FileRecord.of(directory / "state.json")}).write(
            directory
        )


def left(root: Path) -> list[int | None]:
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
            {"keep_last": 1, "keep_best": False, "in_use": Path("elsewhere/iter_0000100")},
            [100, 600],
        ),
    ],
)
def test_rules(tmp_path: Path, rules: dict[str, object], expected: list[int]) -> None:
    make(tmp_path, LOSSES)
    deleted = apply_retention(tmp_path, **rules)  # type: ignore[arg-type]
    assert left(tmp_path) == expected
    assert [iteration_of(path) for path in deleted] == [i for i in LOSSES if i not in expected]
    assert not list(tmp_path.glob("*.tmp-*"))


def test_the_only_complete_one_stays_though_newer_ones_are_damaged(tmp_path: Path) -> None:
    make(tmp_path, {100: None, 200: None, 300: None})
    for iteration in (200, 300):
        (tmp_path / directory_name(iteration) / "state.json").write_text("damaged")
    assert apply_retention(tmp_path, keep_last=1, keep_best=False) == []
    assert 100 in left(tmp_path)


def test_nothing_to_keep_is_no_error(tmp_path: Path) -> None:
    assert apply_retention(tmp_path / "absent", keep_last=1) == []


def test_what_another_process_reads_stays_until_it_has_read(tmp_path: Path) -> None:
    make(tmp_path, {100: None, 200: None, 300: None})
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
        assert left(tmp_path) == [100, 300]
        reader.communicate("\n", timeout=30)
        assert reader.returncode == 0
    assert [path.name for path in apply_retention(tmp_path, keep_last=1)] == [directory_name(100)]
    assert left(tmp_path) == [300]


def test_what_this_process_reads_stays_too(tmp_path: Path) -> None:
    make(tmp_path, {100: None, 200: None})
    with reading(tmp_path / directory_name(100)):
        assert apply_retention(tmp_path, keep_last=1) == []
        with reading(tmp_path / directory_name(100)):  # readers do not keep each other out
            pass
    assert left(tmp_path) == [100, 200]
    assert len(apply_retention(tmp_path, keep_last=1)) == 1


def test_a_reader_is_told_that_its_checkpoint_vanished(tmp_path: Path) -> None:
    make(tmp_path, {100: None, 200: None})
    directory = tmp_path / directory_name(100)

    def replace() -> None:
        with reading(directory):
            rename_away(directory)
            make(tmp_path, {100: 1.0})

    with pytest.raises(
        CheckpointError, match="iter_0000100 was deleted or replaced while it was opened or read"
    ):
        replace()
    rename_away(directory)
    with (
        pytest.raises(CheckpointError, match=r"iter_0000100 has no complete\.json"),
        reading(directory),
    ):
        pass


def test_a_reader_that_waited_for_the_deletion_is_told(tmp_path: Path) -> None:
    """It has opened the marker, and the lock comes free when the checkpoint is gone."""
    make(tmp_path, {100: None})
    directory = tmp_path / directory_name(100)
    met: list[str] = []

    def read() -> None:
        try:
            with reading(directory):
                met.append("nothing")
        except CheckpointError as error:
            met.append(str(error))

    with exclusive_lock(directory / MARKER_NAME) as unread:
        assert unread
        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(0.2)
        assert met == []
        rename_away(directory)
    reader.join(10)
    assert len(met) == 1
    assert "was deleted or replaced" in met[0]


def test_a_marker_that_went_stale_under_its_reader_counts_as_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NFS that is what an open file is whose checkpoint another machine deleted."""
    make(tmp_path, {100: None})

    def stale(descriptor: int) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", stale)
        with (
            pytest.raises(CheckpointError, match="deleted or replaced"),
            reading(tmp_path / directory_name(100)),
        ):
            pass


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, {100: None, 200: None})

    def flock(*args: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    assert len(apply_retention(tmp_path, keep_last=1)) == 1
    assert "file system without locks: it may be deleted while it is read" in caplog.text


def test_deletion_that_is_interrupted_leaves_nothing_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, {100: None, 200: None})

    def killed(path: Path) -> None:
        os.unlink(Path(path) / "state.json")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            shutil.rmtree(rename_away(tmp_path / directory_name(100)))
    assert left(tmp_path) == [200]
    (removed,) = remove_stale(tmp_path)
    assert removed.name.startswith("iter_0000100.tmp-")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000200"]
