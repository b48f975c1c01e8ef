"""Keys of artifacts and their atomic build under a lock."""

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from megacore.artifact.files import (
    canonical_json,
    delete_tree,
    sync_directory,
    sync_tree,
    temporary_of,
    workspace_errors,
)
from megacore.artifact.manifest import Manifest, list_files, verified_record
from megacore.errors import ArtifactError, MemoryExhaustedError, WorkspaceError
from megacore.paths import exists, glob

WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of a file system that has no locks."""
KEY_LENGTH = 16
"""Hex digits of a key: 64 bits."""
_HOLDER_BYTES = 1 << 16
"""Most bytes of a lock file that are read."""
_logger = logging.getLogger(__name__)


class Artifact(BaseModel):
    """A complete stage output on disk, small enough to be the return value of a task."""

    model_config = ConfigDict(frozen=True)

    stage: str
    key: str
    path: str
    digest: str
    """Hash that identifies the content: `Manifest.digest`."""
    counts: dict[str, Any]

    @property
    def directory(self) -> Path:
        """Directory with the artifact's files."""
        return Path(self.path)

    @property
    def name(self) -> str:
        """Name of the directory: the key, but for a training the key of its run."""
        return self.directory.name


@dataclass(frozen=True)
class StageKey:
    """The four values that determine a stage's output; the artifact's key is their hash."""

    stage: str
    version: int
    """Version of the stage's code; increase it when the stage produces a different output."""
    parameters: dict[str, Any]
    inputs: dict[str, str]
    """Digest of each input artifact, by role."""

    @classmethod
    def of(
        cls, stage: str, version: int, parameters: dict[str, Any], **inputs: Artifact
    ) -> "StageKey":
        """Return the key of a stage that reads the given input artifacts."""
        return cls(
            stage, version, parameters, {role: artifact.digest for role, artifact in inputs.items()}
        )

    @property
    def key(self) -> str:
        """Hex digits that name the artifact's directory."""
        content = [self.stage, self.version, self.parameters, self.inputs]
        return hashlib.sha256(canonical_json(content)).hexdigest()[:KEY_LENGTH]


def open_artifact(directory: Path, mode: Literal["quick", "full"] = "quick") -> Artifact:
    """Check the files of the artifact in `directory` and return it.

    Raises ArtifactError if it is damaged, FileAccessError if a file cannot be read now.
    """
    manifest = Manifest.read(directory)
    problem = manifest.problem(directory, mode)
    if problem:
        raise ArtifactError(f"{directory}: {problem}")
    return Artifact(
        stage=manifest.stage,
        key=manifest.key,
        path=str(directory),
        digest=manifest.digest,
        counts=manifest.counts,
    )


def build_artifact(
    folder: Path,
    key: StageKey,
    build: Callable[[Path], Mapping[str, Any]],
    *,
    verify: Literal["quick", "full"] = "quick",
    holder: str = "",
    on_wait: Callable[[str], None] = _logger.warning,
) -> tuple[Artifact, bool]:
    """Return the artifact `folder/<key>`, and True if `build` ran to create it.

    `build` fills an empty directory and returns counts. It runs in `<key>.tmp-<pid>`, which is then
    synced, given a manifest and renamed. A crash at any point leaves either the complete artifact
    or none. If two processes ask for the same key, one builds and the other waits, with the
    arguments of `lock`. A damaged artifact is built again.

    Raises:
        WorkspaceError: the artifact cannot be written.
        FileAccessError: a file of the existing artifact cannot be read now; nothing is deleted.
        MemoryExhaustedError: the memory does not suffice for `build`.
    """
    target = folder / key.key
    with workspace_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with lock(target, holder=holder, on_wait=on_wait):
            if exists(target):
                try:
                    artifact = open_artifact(target, verify)
                    mark_used(target)
                    return artifact, False
                except ArtifactError as error:
                    _logger.warning("stage %s runs again: %s", key.stage, error)
                    remove_tree(target)
            for stale in glob(folder, f"{key.key}.tmp-*"):
                delete_tree(stale)
            temporary = temporary_of(target)
            temporary.mkdir()
            try:
                started = time.monotonic()
                counts = dict(build(temporary))
                seal(temporary, key, counts, time.monotonic() - started)
                os.rename(temporary, target)
            except BaseException as error:
                shutil.rmtree(temporary, ignore_errors=True)
                if isinstance(error, MemoryError):
                    raise MemoryExhaustedError(
                        f"this machine's free memory does not suffice for the stage {key.stage} "
                        f"({error or 'MemoryError'}): end other programs, raise the limit "
                        "(`ulimit -v`, the container's), or use a machine with more"
                    ) from error
                raise
            sync_directory(folder)
    return open_artifact(target), True


def seal(
    directory: Path,
    key: StageKey,
    counts: dict[str, Any],
    duration: float,
    pattern: str = "**/*",
) -> Manifest:
    """Sync every file of `directory`, then mark it as complete by writing its manifest.

    The manifest lists the files that match `pattern`.
    """
    sync_tree(directory)
    files = list_files(directory, pattern)
    manifest = Manifest(
        key.stage,
        key.version,
        key.key,
        key.parameters,
        key.inputs,
        files,
        counts,
        round(duration, 3),
    )
    manifest.write(directory)
    return manifest


def mark_used(directory: Path) -> None:
    """Record that a run uses an artifact now, for `megacore clean --older-than`.

    The record is the directory's modification time; one that cannot be changed stays as it is.
    """
    with suppress(OSError):
        os.utime(directory)


def remove_tree(directory: Path) -> None:
    """Rename a directory, then delete it, so that no reader sees it half deleted."""
    delete_tree(rename_doomed(directory))


def rename_doomed(directory: Path) -> Path:
    """Rename a directory that is about to be deleted to a temporary's name, and return that."""
    verified_record(directory).unlink(missing_ok=True)
    doomed = Path(f"{temporary_of(directory)}-deleted")
    os.rename(directory, doomed)
    return doomed


@contextmanager
def lock(
    target: Path,
    *,
    shared: bool = False,
    holder: str = "",
    on_wait: Callable[[str], None] = _logger.warning,
) -> Iterator[int]:
    """Hold the lock of `target` for the duration of the block and yield its descriptor.

    The lock is the file `.<name>.lock` next to `target`, with the name of its holder. The kernel,
    and on NFS the client, releases it when the holder and all processes that inherited the
    descriptor have closed it. A training's guard inherits it and waits for the ranks
    (`megacore.launch.guard`).

    Args:
        target: file or directory to lock.
        shared: True to read files that must not change, which any number of processes may do.
        holder: name of this holder, which waiting processes show.
        on_wait: function that shows one sentence if another process holds the lock.

    Raises:
        WorkspaceError: the lock file cannot be made, or its file system has no locks.
        FileAccessError: the disk fails, the mount is lost, or too many files are open.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    descriptor = _open_lock(target)
    try:
        if not _flock(descriptor, kind, target):
            on_wait(f"waits for {target}, which {_holder_of(descriptor)} uses")
            fcntl.flock(descriptor, kind)
        if shared:
            _replace_text(descriptor, "")  # of a holder that was killed
            yield descriptor
            return
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        _replace_text(descriptor, json.dumps([os.getpid(), socket.gethostname(), holder, since]))
        try:
            yield descriptor
        finally:
            _replace_text(descriptor, "")
    finally:
        os.close(descriptor)


@contextmanager
def try_lock(target: Path, *, shared: bool = False) -> Iterator[bool]:
    """Yield True if the lock of `target` is free, and then hold it; yield False if it is not.

    Args:
        target: file or directory to lock, as for `lock`.
        shared: True to read files that must not change.

    Raises WorkspaceError and FileAccessError, like `lock`.
    """
    descriptor = _open_lock(target)
    try:
        free = _flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, target)
        if free:
            with suppress(OSError):
                os.ftruncate(descriptor, 0)  # the name of a holder that was killed
        yield free
    finally:
        os.close(descriptor)


def is_locked(target: Path) -> bool:
    """Return True if a process holds the lock of `target`, unless all holders share it."""
    try:
        descriptor = os.open(lock_file(target), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _flock(descriptor, fcntl.LOCK_SH, target)
    finally:
        os.close(descriptor)


def lock_file(target: Path) -> Path:
    """Return the path of the file that is locked for `target`."""
    return target.with_name(f".{target.name}.lock")


def _open_lock(target: Path) -> int:
    """Open the lock file of `target`, which is made if it is missing."""
    path = lock_file(target)
    with workspace_errors(path):
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)


def _flock(descriptor: int, kind: int, target: Path) -> bool:
    """Take a lock and return True, or return False if another process holds it.

    Raises WorkspaceError if the file system of `target` has no locks.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        raise WorkspaceError(
            f"cannot lock {target} ({error.strerror}): mount its file system with locks (flock on "
            "Lustre, lockd for NFS), or set MEGACORE_WORKSPACE to another disk"
        ) from error
    return True


def _holder_of(descriptor: int) -> str:
    """Return the name of the process that holds a lock file, as far as the file names it."""
    try:
        pid, host, holder, since = json.loads(os.pread(descriptor, _HOLDER_BYTES, 0))
    except (OSError, ValueError, TypeError):
        return "another process"
    place = f"process {pid} on {host}, since {since}"
    name = f"{holder} ({place})" if holder else place
    if host == socket.gethostname() and not exists(Path("/proc", str(pid))):
        return f"a process that {name} started before it was killed"
    return name


def _replace_text(descriptor: int, text: str) -> None:
    """Replace the content of an open file; a full disk costs only the holder's name."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
