"""Writing that survives a crash: sync, then rename."""

import errno
import glob
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megacore.errors import WorkspaceError


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Flush every file and directory below `path` to the disk."""
    for folder, _, names in os.walk(path):
        for name in names:
            with open(Path(folder, name), "rb") as file:
                os.fsync(file.fileno())
        sync_directory(Path(folder))


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON, atomically: a reader sees the old content or the new."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with workspace_errors(path):
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(value, file, indent=2, sort_keys=True)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)
    remove_dead_temporaries(path)


def remove_dead_temporaries(target: Path) -> None:
    """Remove files and directories `<target>.tmp-<pid>` of processes that were killed."""
    for path in target.absolute().parent.glob(f"{glob.escape(target.name)}.tmp-*"):
        pid = path.name.rpartition("-")[2]
        if pid.isdecimal() and Path("/proc").exists() and not Path("/proc", pid).exists():
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def canonical_json(value: Any) -> bytes:
    """The one byte string of a JSON value: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


@contextmanager
def workspace_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals to write into WorkspaceError."""
    try:
        yield
    except OSError as error:
        elsewhere = "write elsewhere (MEGACORE_WORKSPACE names another workspace)"
        advice = {
            "ENOSPC": "free some space (`megacore clean` removes a workspace's stale temporaries) or write elsewhere",
            "EFBIG": "raise the limit on file sizes (`ulimit -f`)",
            "EDQUOT": "raise the quota or write elsewhere",
            "EACCES": f"make it writable or {elsewhere}",
            "EPERM": f"make it writable or {elsewhere}",
            "EROFS": elsewhere,
            "ENOTDIR": f"move the file that is in the way or {elsewhere}",
            "EISDIR": f"move the directory that is in the way or {elsewhere}",
            "ENAMETOOLONG": "give it a shorter name",
        }
        code = errno.errorcode.get(error.errno or 0, "")
        if code not in advice:
            raise
        raise WorkspaceError(f"cannot write {error.filename or path}: {error.strerror}: {advice[code]}") from error
