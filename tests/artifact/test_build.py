"""Tests of artifacts: complete or absent, built once, checked before use."""

import errno
import multiprocessing
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megacore.artifact import (
    Artifact,
    Manifest,
    StageKey,
    Workspace,
    build_artifact,
    lock,
    open_artifact,
)
from megacore.artifact.build import is_locked, try_lock
from megacore.artifact.files import write_json
from megacore.errors import ArtifactError, FileAccessError, MemoryExhaustedError, WorkspaceError
from tests._limits import HANG

KEY = StageKey.of("collect", 1, {"source": "here"})


def fill(directory: Path) -> dict[str, int]:
    (directory / "sub").mkdir()
    (directory / "a.txt").write_text("alpha")
    (directory / "sub" / "b.txt").write_text("beta")
    return {"documents": 2}


def test_the_second_build_returns_the_existing_artifact(tmp_path: Path) -> None:
    first, ran = build_artifact(tmp_path, KEY, fill)
    assert ran
    assert first.counts == {"documents": 2}
    assert first.directory == tmp_path / KEY.key
    manifest = Manifest.read(first.directory)
    assert set(manifest.files) == {"a.txt", "sub/b.txt"}
    second, ran = build_artifact(tmp_path, KEY, lambda directory: pytest.fail("built again"))
    assert not ran
    assert second == first


def test_key_depends_on_stage_version_fields_and_inputs(tmp_path: Path) -> None:
    artifact, _ = build_artifact(tmp_path, KEY, fill)
    keys = {
        KEY.key,
        StageKey.of("tokenize", 1, {"source": "here"}).key,
        StageKey.of("collect", 2, {"source": "here"}).key,
        StageKey.of("collect", 1, {"source": "there"}).key,
        StageKey.of("collect", 1, {"source": "here"}, corpus=artifact).key,
        StageKey.of("collect", 1, {"source": "here"}, tokens=artifact).key,
    }
    assert len(keys) == 6


def test_equal_content_has_the_same_digest(tmp_path: Path) -> None:
    first, _ = build_artifact(tmp_path / "one", KEY, fill)
    second, _ = build_artifact(tmp_path / "two", KEY, fill)
    assert first.digest == second.digest
    assert Manifest.read(first.directory).duration >= 0


def test_a_failed_build_leaves_only_its_lock(tmp_path: Path) -> None:
    def broken(directory: Path) -> dict[str, int]:
        fill(directory)
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        build_artifact(tmp_path, KEY, broken)
    assert [path.name for path in tmp_path.iterdir()] == [f".{KEY.key}.lock"]


def test_a_lack_of_memory_names_the_stage(tmp_path: Path) -> None:
    def greedy(directory: Path) -> dict[str, int]:
        raise MemoryError("Unable to allocate 8.00 TiB")

    with pytest.raises(MemoryExhaustedError, match=f"the stage {KEY.stage} .Unable to allocate 8"):
        build_artifact(tmp_path, KEY, greedy)
    assert [path.name for path in tmp_path.iterdir()] == [f".{KEY.key}.lock"]


@pytest.mark.parametrize("damage", ["delete", "truncate", "flip", "manifest", "no manifest"])
def test_a_damaged_artifact_is_refused_and_rebuilt(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    artifact, _ = build_artifact(tmp_path, KEY, fill)
    damaged_file = artifact.directory / "sub" / "b.txt"
    if damage == "delete":
        damaged_file.unlink()
    elif damage == "truncate":
        damaged_file.write_text("be")
    elif damage == "flip":
        damaged_file.write_text("bela")
    elif damage == "manifest":
        (artifact.directory / "manifest.json").write_text('{"stage": 3}')
    else:
        (artifact.directory / "manifest.json").unlink()
    with pytest.raises(ArtifactError):
        open_artifact(artifact.directory)
    rebuilt, ran = build_artifact(tmp_path, KEY, fill)
    assert ran
    assert rebuilt == artifact
    assert damaged_file.read_text() == "beta"
    assert f"stage collect runs again: {artifact.directory}" in caplog.text


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("name", ["a.txt", "manifest.json"])
def test_an_artifact_that_cannot_be_read_now_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    artifact, _ = build_artifact(tmp_path, KEY, fill)
    opening = open

    def fail(path: Path, *arguments: Any, **options: Any) -> Any:
        if str(path).endswith(f"{KEY.key}/{name}"):
            raise OSError(code, os.strerror(code), str(path))
        return opening(path, *arguments, **options)

    monkeypatch.setattr("builtins.open", fail)
    with pytest.raises(FileAccessError, match=rf"{name} \({os.strerror(code)}\): "):
        build_artifact(tmp_path, KEY, lambda _: pytest.fail("built again"), verify="full")
    monkeypatch.undo()
    assert build_artifact(tmp_path, KEY, fill, verify="full") == (artifact, False)


def test_only_the_full_check_detects_a_change_with_the_old_time(tmp_path: Path) -> None:
    artifact, _ = build_artifact(tmp_path, KEY, fill)
    damaged_file = artifact.directory / "a.txt"
    times = damaged_file.stat()
    damaged_file.write_text("alphb")
    os.utime(damaged_file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert open_artifact(artifact.directory, "quick") == artifact
    with pytest.raises(ArtifactError, match=r"a\.txt has other content"):
        open_artifact(artifact.directory, "full")


def slow_build(folder: Path, results: "multiprocessing.Queue[bool]") -> None:
    def fill_slowly(directory: Path) -> dict[str, int]:
        time.sleep(0.5)
        return fill(directory)

    results.put(build_artifact(folder, KEY, fill_slowly)[1])


def test_only_one_of_two_processes_builds(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[bool] = context.Queue()
    processes = [context.Process(target=slow_build, args=(tmp_path, results)) for _ in range(2)]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=HANG) for _ in processes) == [False, True]
    for process in processes:
        process.join(timeout=HANG)


def hang_in_build(folder: Path, started: str) -> None:
    def fill_and_hang(directory: Path) -> dict[str, int]:
        (directory / "half").write_text("x")
        Path(started).touch()
        time.sleep(2 * HANG)
        return {}

    build_artifact(folder, KEY, fill_and_hang)


def test_a_killed_build_releases_its_lock_and_its_temporary_is_removed(tmp_path: Path) -> None:
    folder, started = tmp_path / "artifacts", tmp_path / "started"
    process = multiprocessing.get_context("spawn").Process(
        target=hang_in_build, args=(folder, str(started))
    )
    process.start()
    deadline = time.monotonic() + HANG
    while not started.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.join(timeout=HANG)
    assert not (folder / KEY.key).exists()
    _, ran = build_artifact(folder, KEY, fill)
    assert ran
    assert not list(folder.glob("*.tmp-*"))


def test_a_failed_json_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert list(tmp_path.iterdir()) == [path], "half of a new value is left"


def test_threads_can_check_a_workspace_at_the_same_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        for workspace in pool.map(lambda _: Workspace.of(tmp_path), range(200)):
            assert workspace.root == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_workspace_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkspaceError, match="MEGACORE_WORKSPACE"):
        Workspace.of(tmp_path / "file")
    with pytest.raises(WorkspaceError, match="MEGACORE_WORKSPACE"):
        Workspace.of("/proc/megacore")


def test_a_full_workspace_is_refused_without_leaving_a_file(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(WorkspaceError, match="File too large"):
            Workspace.of(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_workspace_is_taken_from_the_environment_or_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path / "there"))
    assert Workspace.of().root == tmp_path / "there"
    monkeypatch.delenv("MEGACORE_WORKSPACE")
    monkeypatch.chdir(tmp_path)
    assert Workspace.of().root == tmp_path / "workspace"


def test_artifact_is_unchanged_by_a_json_round_trip() -> None:
    artifact = Artifact(stage="index", key="k", path="/p", digest="d", counts={"samples": 3})
    assert Artifact.model_validate_json(artifact.model_dump_json()) == artifact


def hold(target: Path, started: "multiprocessing.Queue[bool]", *, shared: bool = False) -> None:
    with lock(target, shared=shared, holder="flow run 'first'"):
        started.put(True)
        time.sleep(2 * HANG)


Holder = Callable[..., multiprocessing.Process]


@pytest.fixture
def start_holder(tmp_path: Path) -> Iterator[Holder]:
    """Return a function that locks `tmp_path / "run"` in another process."""
    context = multiprocessing.get_context("fork")
    processes: list[Any] = []

    def start(*, shared: bool = False) -> Any:
        started = context.Queue()
        process = context.Process(
            target=hold, args=(tmp_path / "run", started), kwargs={"shared": shared}
        )
        process.start()
        processes.append(process)
        assert started.get(timeout=HANG)
        return process

    yield start
    for process in processes:
        kill(process)


def kill(process: Any) -> None:
    process.kill()
    process.join(timeout=HANG)


@pytest.mark.parametrize("shared", [False, True])
def test_waiting_process_names_the_holder(
    tmp_path: Path, start_holder: Holder, shared: bool
) -> None:
    holder, shown = start_holder(), []

    def end_holder(text: str) -> None:
        shown.append(text)
        kill(holder)

    with lock(tmp_path / "run", shared=shared, on_wait=end_holder):
        pass
    assert len(shown) == 1
    assert f"{tmp_path / 'run'}, which flow run 'first' (process {holder.pid} on " in shown[0]


def test_lock_is_held_until_an_heir_of_its_descriptor_has_ended(tmp_path: Path) -> None:
    with lock(tmp_path / "run") as held:
        heir = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[held])
    assert is_locked(tmp_path / "run")
    with try_lock(tmp_path / "run") as free:
        assert not free
    heir.communicate(timeout=HANG)
    assert not is_locked(tmp_path / "run")


@pytest.mark.parametrize("shared", [False, True])
def test_the_name_of_a_killed_holder_is_removed_by_the_next_one(
    tmp_path: Path, start_holder: Holder, shared: bool
) -> None:
    kill(start_holder())
    assert "first" in (tmp_path / ".run.lock").read_text()
    with try_lock(tmp_path / "run", shared=shared) as free:
        assert free
    assert (tmp_path / ".run.lock").read_text() == ""


def test_waiting_process_does_not_name_a_dead_holder(tmp_path: Path, start_holder: Holder) -> None:
    kill(start_holder())
    assert "first" in (tmp_path / ".run.lock").read_text()
    reader, shown = start_holder(shared=True), []

    def end_reader(text: str) -> None:
        shown.append(text)
        kill(reader)

    with lock(tmp_path / "run", on_wait=end_reader):
        pass
    assert shown == [f"waits for {tmp_path / 'run'}, which another process uses"]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", refuse)
    message = f"cannot lock {tmp_path}/.*: mount its file system with locks .* MEGACORE_WORKSPACE"
    with pytest.raises(WorkspaceError, match=message):
        build_artifact(tmp_path, KEY, fill)
    (tmp_path / ".run.lock").touch()
    with pytest.raises(WorkspaceError, match=message):
        is_locked(tmp_path / "run")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_lock_file_that_cannot_be_made_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(path: Path, *arguments: object) -> int:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr("os.open", refuse)
    message = rf"cannot (read or )?write {tmp_path}/\.run\.lock.*{os.strerror(code)}"
    for held in (lock, try_lock):
        with (
            pytest.raises((WorkspaceError, FileAccessError), match=message),
            held(tmp_path / "run"),
        ):
            pass


def test_a_full_disk_costs_only_the_holders_name(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with lock(tmp_path / "a"):
            pass
        with pytest.raises(ValueError, match="of the body"), lock(tmp_path / "a"):
            raise ValueError("of the body")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_damaged_artifact_behind_a_link_is_built_again_here(tmp_path: Path) -> None:
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    build_artifact(elsewhere, KEY, fill)
    (elsewhere / KEY.key / "a.txt").write_text("damaged")
    here.mkdir()
    (here / KEY.key).symlink_to(elsewhere / KEY.key)
    for built in (True, False):
        _, ran = build_artifact(here, KEY, fill)
        assert ran is built
    assert not (here / KEY.key).is_symlink()
    assert (elsewhere / KEY.key / "a.txt").read_text() == "damaged"


def test_lock_file_is_empty_after_use(tmp_path: Path) -> None:
    with lock(tmp_path / "run"):
        assert str(os.getpid()) in (tmp_path / ".run.lock").read_text()
    assert (tmp_path / ".run.lock").read_text() == ""


@pytest.mark.parametrize("name", ["corpora", "runs", "exports", "scores", "mlartifacts", "prefect"])
def test_a_folder_that_can_never_be_made_is_refused_at_the_start(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("in the way")
    with pytest.raises(WorkspaceError, match=rf"{name} is a file, .*: move it away"):
        Workspace.of(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(tmp_path / "missing")
    with pytest.raises(WorkspaceError, match=rf"{name} is a link to a missing directory"):
        Workspace.of(tmp_path)
    (tmp_path / "missing").mkdir()
    assert Workspace.of(tmp_path).root == tmp_path


def test_a_folder_replaced_by_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "corpora").write_text("in the way")
    with pytest.raises(WorkspaceError, match="move what is in the way"):
        build_artifact(tmp_path / "corpora", KEY, fill)
