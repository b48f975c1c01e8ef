"""Atomic writes of files, JSON and directories, which leave no partial output after a crash.

Data is written under a temporary name, synced, and renamed.
"""

import errno
import glob
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from megacore.errors import ConfigError, WorkspaceError

Record = TypeVar("Record")


def replace_file(path: Path, data: bytes, *, durable: bool = True, mode: int = 0o666) -> None:
    """Replace the content of `path` atomically: a reader sees the old content or the new.

    Args:
        path: file to write; it need not exist.
        data: new content.
        durable: sync, so that the new content survives a crash of the host.
        mode: permissions of the new file, before the umask.

    Raises:
        OSError: the file cannot be written; the old content is untouched.
    """
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(os.open(temporary, flags, mode), "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` with `value` as JSON, atomically and durably. Raises WorkspaceError."""
    with workspace_errors(path):
        text = json.dumps(value, indent=2, sort_keys=True) + "\n"
        replace_file(path, text.encode("utf-8"))
    remove_dead_temporaries(path)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises OSError or ValueError."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_record(path: Path, kind: type[Record]) -> Record | None:
    """Return a JSON file as the dataclass `kind`, or None if it is missing or damaged."""
    try:
        return kind(**read_json(path))
    except (OSError, ValueError, TypeError):
        return None


def canonical_json(value: Any) -> bytes:
    """Return the canonical bytes of a JSON value: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode(
        "ascii"
    )


@contextmanager
def workspace_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's write errors into WorkspaceError."""
    try:
        yield
    except OSError as error:
        elsewhere = "write elsewhere (MEGACORE_WORKSPACE names another workspace)"
        advice = {
            "ENOSPC": (
                "free some space (`megacore clean` removes a workspace's stale temporaries) or "
                "write elsewhere"
            ),
            "EFBIG": "raise the limit on file sizes (`ulimit -f`)",
            "EIO": f"check the disk and the kernel's log (`dmesg`), or {elsewhere}",
            "EDQUOT": "raise the quota or write elsewhere",
            "EACCES": f"make it writable or {elsewhere}",
            "EPERM": f"make it writable or {elsewhere}",
            "EROFS": elsewhere,
            "EEXIST": f"move what is in the way or {elsewhere}",
            "ENOTDIR": f"move the file that is in the way or {elsewhere}",
            "EISDIR": f"move the directory that is in the way or {elsewhere}",
            "ENAMETOOLONG": "give it a shorter name",
        }
        code = errno.errorcode.get(error.errno or 0, "")
        if code not in advice:
            raise
        # A bare name is relative to a directory that `shutil.rmtree` has open.
        bare = os.sep not in str(error.filename or "")
        raise WorkspaceError(
            f"cannot write {path if bare else error.filename}: {error.strerror}: {advice[code]}"
        ) from error


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `output` when the block succeeds.

    If the block fails, the directory is removed.

    Raises:
        ConfigError: `output` is a file, or a directory that is not empty.
        WorkspaceError: `output` cannot be written.
    """
    check_output(output)
    target = output.absolute()
    staging = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    missing_parents = [path for path in target.parents if not path.exists()]
    with workspace_errors(target):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_dead_temporaries(target)
            staging.mkdir()
        except OSError as error:
            _remove_empty(missing_parents)
            raise WorkspaceError(
                f"--output {output} cannot be made ({error.strerror}): write elsewhere"
            ) from error
        try:
            yield staging
            sync_tree(staging)
            os.rename(staging, target)
            staging = target
            sync_directory(target.parent)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            _remove_empty(missing_parents)
            raise


def check_output(output: Path) -> None:
    """Refuse an output that is a file or a non-empty directory. Raises ConfigError."""
    for place in (output.absolute(), *output.absolute().parents):
        if place.exists() and not place.is_dir():
            raise ConfigError(f"{place} is a file: give another --output")
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty: give another --output, or remove it")


def _remove_empty(directories: Sequence[Path]) -> None:
    """Remove the empty directories among `directories`, given innermost first."""
    for path in directories:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def remove_dead_temporaries(target: Path) -> None:
    """Remove `<target>.tmp-<pid>` files and directories of processes that have ended."""
    for path in target.absolute().parent.glob(f"{glob.escape(target.name)}.tmp-*"):
        pid = path.name.rpartition("-")[2]
        if pid.isdecimal() and Path("/proc").exists() and not Path("/proc", pid).exists():
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def sync_tree(path: Path) -> None:
    """Flush every file and directory below `path` to disk."""
    for folder, _, names in os.walk(path):
        for name in names:
            with open(Path(folder, name), "rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(folder))


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
