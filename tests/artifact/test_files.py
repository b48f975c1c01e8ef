"""Tests of atomic file replacement and of reading JSON files within limits."""

import contextlib
import errno
import os
import shutil
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from megacore.artifact.files import (
    access_error,
    access_errors,
    check_output,
    copy_tree,
    link_or_copy,
    naming,
    parse_json,
    read_bytes,
    read_json,
    read_object,
    read_record,
    reason_of,
    regular,
    replace_file,
    require_space,
    save_array,
    staged,
    sync_tree,
    workspace_errors,
    write_json,
)
from megacore.artifact.manifest import Manifest
from megacore.errors import (
    ArtifactError,
    ConfigError,
    FileAccessError,
    TransientFileError,
    WorkspaceError,
)
from megacore.paths import exists


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


@pytest.mark.skipif(not exists("/dev/full"), reason="the system has no full device")
@pytest.mark.parametrize("size", [1, 100_000])
def test_an_array_on_a_full_disk_raises_a_workspace_error(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.npy"
    path.symlink_to("/dev/full")
    with pytest.raises(
        WorkspaceError, match=r"cannot write .*a.npy: No space left on device: free some space"
    ):
        save_array(path, np.zeros(size, np.int32))


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
        pytest.raises(FileAccessError, match=r"out \(Input/output error\): the disk"),
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


def test_missing_space_is_refused_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil._ntuple_diskusage(9 << 30, 0, 5 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    require_space(tmp_path / "a" / "b", 5 << 20, "it writes")
    message = f"it writes 3.0 GiB, and 5.0 MiB are free in {tmp_path}: free some space"
    with pytest.raises(WorkspaceError, match=message):
        require_space(tmp_path / "a" / "b", 3 << 30, "it writes")
    with (
        pytest.raises(WorkspaceError, match=f"No space .*; 5.0 MiB are free in {tmp_path}"),
        workspace_errors(tmp_path / "x"),
    ):
        raise OSError(28, "No space left on device")


def test_another_workspace_is_advised_only_for_files_of_the_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path / "workspace"))
    for path, advice in (
        (tmp_path / "workspace" / "runs", r"write elsewhere \(MEGACORE_WORKSPACE names another"),
        (tmp_path / "tokens.bin", "write elsewhere$"),
    ):
        with pytest.raises(WorkspaceError, match=advice), workspace_errors(path):
            raise OSError(errno.EROFS, "Read-only file system", str(path))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key c is given twice"),
        (b"[" * 65 + b"]" * 65, "it nests more than 64 levels deep"),
        (b'{"a":' * 100_000, "it nests more than 64 levels deep"),
        (b'{"n_embd": ' + b"9" * 6000 + b"}", r"the number 9{20}… has 6000 digits, more than 100"),
        (b"{", "line 1 column 2"),
        (b"\xff", "can't decode byte 0xff in position 0"),
    ],
)
def test_hostile_json_is_refused_in_a_clause(text: bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_json(text)


def test_json_within_the_limits_is_read() -> None:
    assert parse_json(b"[" * 64 + b"]" * 64)
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]
    assert parse_json(b'{"state": ' + b"9" * 100 + b"}") == {"state": 10**100 - 1}


def test_large_files_and_directories_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    path.write_text("[1, 2]")
    assert read_json(path, limit=6) == [1, 2]
    with pytest.raises(ValueError, match="it has 6 bytes, more than the 5 that such a file may"):
        read_json(path, limit=5)
    with pytest.raises(IsADirectoryError):
        read_json(tmp_path)


def test_a_small_file_needs_little_memory(tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text("[1]")
    tracemalloc.start()
    try:
        assert read_json(tmp_path / "small.json") == [1]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_longer_than_the_system_says_is_read_in_whole() -> None:
    assert Path("/proc/self/status").stat().st_size == 0
    assert read_bytes(Path("/proc/self/status"), 1 << 20).startswith(b"Name:")
    with pytest.raises(ValueError, match="more than the 10 that"):
        read_bytes(Path("/proc/self/status"), 10)


@pytest.mark.parametrize("text", ["[1]", "[" * 100, '{"a": 1, "a": 1}', None])
def test_a_damaged_report_of_a_stage_is_an_artifact_error(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "report.json"
    path.write_text('{"loss": 1.5}')
    assert read_object(path) == {"loss": 1.5}
    path.write_text(text) if text else path.unlink()
    with pytest.raises(
        ArtifactError, match=r"report.json cannot be read \(.+\): run the same command again, which"
    ):
        read_object(path)
    with pytest.raises(ArtifactError, match=r"cannot be read \(.+\): delete it$"):
        read_object(path, "delete it")


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (errno.EIO, r"\(Input/output error\): the disk or its connection fails"),
        (errno.ESTALE, r"\(Stale file handle\): the file server has lost the file"),
        (errno.EMFILE, r"\(Too many open files\): .*raise the limit \(`ulimit -n`\)"),
    ],
)
def test_failing_disks_and_limits_do_not_count_as_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, sentence: str
) -> None:
    def fail(path: str, flags: int, *_: object) -> int:
        raise OSError(code, os.strerror(code), path)

    (tmp_path / "manifest.json").write_text("{}")
    monkeypatch.setattr(os, "open", fail)
    for read in (read_json, read_object, lambda path: read_record(path, Size)):
        with pytest.raises(FileAccessError, match=rf"{tmp_path}/manifest.json {sentence}"):
            read(tmp_path / "manifest.json")
    with pytest.raises(FileAccessError, match=sentence):  # not "damaged: delete it"
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("code", "kind", "sentence"),
    [
        (errno.EIO, FileAccessError, "the disk or its connection fails"),
        (errno.ENOSPC, WorkspaceError, r"free some space \(in a workspace.* give another --output"),
        (errno.EACCES, WorkspaceError, "make it writable or give another --output"),
        (errno.ENOENT, WorkspaceError, r"--output .*out cannot be made \(No such file"),
    ],
)
def test_an_output_that_cannot_be_made_is_refused_with_the_cause(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    kind: type[Exception],
    sentence: str,
) -> None:
    making = Path.mkdir

    def refuse(path: Path, **options: bool) -> None:
        if ".tmp-" in path.name:
            raise OSError(code, os.strerror(code), str(path))
        making(path, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(kind, match=sentence), staged(tmp_path / "new" / "out"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("exists", [True, False])
def test_an_output_is_made_where_a_link_points(tmp_path: Path, exists: bool) -> None:
    if exists:
        (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with staged(tmp_path / "link") as staging:
        (staging / "file").touch()
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["file"]


def test_outputs_that_a_rename_cannot_replace_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"is the working directory, .* give a new directory in"):
        check_output(Path())
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "volume")
    (tmp_path / "volume").mkdir()
    with pytest.raises(ConfigError, match=r"volume is a mount point, which .* cannot replace"):
        check_output(Path("volume"))


def test_an_output_that_turns_out_to_be_busy_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bind mount within one file system is no mount point to Python."""

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(source), None, str(target))

    monkeypatch.setattr(os, "rename", refuse)
    with (
        pytest.raises(WorkspaceError, match=r"busy: it is a mount point or in use: give another"),
        staged(tmp_path / "out"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_another_process_finished_first_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("")
    with (
        pytest.raises(WorkspaceError, match=r"not empty: move what is in the way or give another"),
        staged(tmp_path / "out"),
    ):
        shutil.copytree(tmp_path / "other", tmp_path / "out")


def test_files_that_vanish_need_no_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text("")
    real = os.fsync

    def sync(descriptor: int) -> None:
        for folder in ("a", "b"):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    (tmp_path / "first").write_text("")
    sync_tree(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_what_a_process_with_the_same_number_left_is_named(tmp_path: Path) -> None:
    left = tmp_path / f"out.tmp-{os.getpid()}"
    left.mkdir()
    with (
        pytest.raises(WorkspaceError, match=rf"{left} is there, .*: remove it if"),
        staged(tmp_path / "out"),
    ):
        pass
    assert left.is_dir()


def test_a_missing_directory_of_an_output_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match=r"a\.json.*No such file .*: make its directory"):
        write_json(tmp_path / "no" / "a.json", {})
    with pytest.raises(FileNotFoundError), workspace_errors(tmp_path):
        (tmp_path / "no" / "input.json").read_bytes()  # a file that is read and not written


def test_a_stale_handle_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "value.json"
    path.write_text("[1]")
    opening, failures = os.open, [errno.ESTALE, errno.ESTALE]

    def fail_twice(name: str, flags: int) -> int:
        if failures:
            raise OSError(failures.pop(), "Stale file handle", name)
        return opening(name, flags)

    monkeypatch.setattr(os, "open", fail_twice)
    assert read_json(path) == [1]


def test_the_reason_of_an_error_has_no_number_and_no_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        (tmp_path / "nowhere").read_bytes()
    assert reason_of(caught.value) == "No such file or directory"
    assert reason_of(OSError("damaged page")) == "damaged page"
    assert reason_of(ValueError("no JSON")) == "no JSON"


def test_other_errors_keep_their_type(tmp_path: Path) -> None:
    assert access_error(FileNotFoundError(errno.ENOENT, "No such file")) is None
    assert access_error(OSError(errno.ENOTCONN, "socket")) is None
    with (
        pytest.raises(FileAccessError, match="raise the limit"),
        workspace_errors(tmp_path),
    ):
        raise OSError(errno.EMFILE, "Too many open files")
    long = tmp_path / ("a" * 300)
    message = r"aaa.* \(File name too long\): .* a shorter one"
    with pytest.raises(FileAccessError, match=message), access_errors(long):
        exists(long)


@pytest.mark.parametrize(
    "code",
    [
        errno.EIO,
        errno.EREMOTEIO,
        errno.ESTALE,
        errno.ENOTCONN,
        errno.ETIMEDOUT,
        errno.EHOSTDOWN,
        errno.EAGAIN,
        errno.EINTR,
    ],
    ids=errno.errorcode.get,
)
def test_errors_that_may_pass_are_retryable(tmp_path: Path, code: int) -> None:
    with (
        pytest.raises(
            TransientFileError, match=rf"{tmp_path}/a \({os.strerror(code)}\): "
        ) as caught,
        workspace_errors(tmp_path / "a"),
        naming(tmp_path / "a"),  # calls on an open file name none
    ):
        raise OSError(code, os.strerror(code))
    assert caught.value.retryable


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EACCES, WorkspaceError),
        (errno.EPERM, WorkspaceError),
        (errno.EROFS, WorkspaceError),
        (errno.ENOSPC, WorkspaceError),
        (errno.EDQUOT, WorkspaceError),
        (errno.EMFILE, FileAccessError),
        (errno.ENOENT, OSError),
        (errno.EINVAL, OSError),
    ],
    ids=lambda value: errno.errorcode.get(value, "") if isinstance(value, int) else value.__name__,
)
def test_lasting_errors_are_final(tmp_path: Path, code: int, kind: type[Exception]) -> None:
    with (
        pytest.raises(kind, match=os.strerror(code)) as caught,
        workspace_errors(tmp_path),
        naming(tmp_path),
    ):
        raise OSError(code, os.strerror(code))
    assert not getattr(caught.value, "retryable", False)


@pytest.mark.parametrize("code", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EAGAIN])
def test_errors_of_sockets_and_processes_are_not_those_of_a_file(tmp_path: Path, code: int) -> None:
    with pytest.raises(OSError, match=os.strerror(code)), workspace_errors(tmp_path):
        raise OSError(code, os.strerror(code))


def test_regular_names_a_failing_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(FileAccessError, match="mount the directory again"):
        regular(tmp_path / "file")


def test_pipe_device_and_large_file_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "pipe.json"
    os.mkfifo(path)
    with pytest.raises(OSError, match=r"it is a named pipe, not a file: .*pipe\.json"):
        read_json(path)
    with pytest.raises(OSError, match="it is a device, not a file"):
        regular(Path("/dev/zero"))
    write_json(tmp_path / "large", [0] * 9)
    assert regular(tmp_path / "large", (tmp_path / "large").stat().st_size)
    with pytest.raises(OSError, match="bytes, over the limit of 9"):
        regular(tmp_path / "large", 9)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_tree_that_cannot_be_copied_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    source, target = tmp_path / "model", tmp_path / "copy"
    (source / "part").mkdir(parents=True)
    (source / "part" / "weights").write_bytes(b"weights")
    copy_tree(source, tmp_path / "whole")
    assert (tmp_path / "whole" / "part" / "weights").read_bytes() == b"weights"

    def refuse(_: str, copied: str) -> None:
        raise OSError(code, os.strerror(code), copied)

    monkeypatch.setattr("shutil.copy2", refuse)
    message = rf"cannot (read or )?write \S*part/weights.*{os.strerror(code)}.*: "
    with pytest.raises((WorkspaceError, TransientFileError), match=message):
        copy_tree(source, target)


@pytest.mark.parametrize(("code", "copied"), [(errno.EXDEV, True), (errno.EACCES, False)])
def test_a_file_is_copied_only_where_it_cannot_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, copied: bool
) -> None:
    def refuse(*paths: Path) -> None:
        raise OSError(code, os.strerror(code))

    file, target = tmp_path / "a", tmp_path / "b"
    file.write_bytes(b"text")
    link_or_copy(file, target)
    assert file.samefile(target)
    target.unlink()
    monkeypatch.setattr(os, "link", refuse)
    with contextlib.nullcontext() if copied else pytest.raises(PermissionError):
        link_or_copy(file, target)
    assert target.exists() == copied
    if copied:
        assert target.read_bytes() == b"text"
        assert not file.samefile(target)
