"""Manifest of an artifact, and the comparison of all digests when a training first reads it.

`manifest.json` has the stage, the inputs and the digests of the files. It is written last, so its
presence means that the artifact is complete.

A quick check does not notice a byte that changed on the disk while the file's size and time stayed.
So the digests are compared once, while the training starts. The record `.KEY.verified.json` next to
the artifact KEY keeps identity, size and times of the files: a file that was replaced or written
since is compared again. In a folder that cannot be written there is no record, and each start
compares.
"""

import hashlib
import logging
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from megacore.artifact.files import (
    TEMPORARY,
    access_errors,
    canonical_json,
    read_json,
    reason_of,
    regular,
    unreadable,
    write_json,
)
from megacore.errors import ArtifactError, FileAccessError, MegacoreError
from megacore.paths import glob, is_file
from megacore.redact import redact_values

MANIFEST_NAME = "manifest.json"
_CHUNK = 1 << 22
Verification = Literal["quick", "once", "full"]
"""Check of artifacts in a configuration; `once` is `quick` with the comparison of all digests when
a training first reads an artifact (`FirstRead`)."""


def depth_of(verification: Verification) -> Literal["quick", "full"]:
    """Return how an artifact is checked before a stage uses it."""
    return "full" if verification == "full" else "quick"


@dataclass(frozen=True)
class FileEntry:
    """One file of an artifact."""

    size: int
    """Size in bytes."""
    sha256: str
    """Hex digest of the content."""
    mtime_ns: int
    """Modification time when the digest was computed; a quick check hashes files changed since."""

    def problem(
        self,
        directory: Path,
        name: str,
        mode: Literal["quick", "full"],
        on_read: Callable[[int], None] | None = None,
    ) -> str | None:
        """Compare the file `directory/name` and return the problem as a clause, or None.

        See `Manifest.problem` for the mode and `file_digest` for `on_read`. Raises FileAccessError
        if the file cannot be read now, for this is no reason to delete it.
        """
        path = directory / name
        try:
            status = path.stat()
            if status.st_size != self.size:
                return f"{name} has {status.st_size} bytes instead of {self.size}"
            if mode == "quick" and status.st_mtime_ns == self.mtime_ns:
                return None
            digest = file_digest(path, on_read)
        except (FileNotFoundError, NotADirectoryError):
            return f"{name} is missing"
        except OSError as error:
            if (fault := unreadable(error, path)) is not None:
                raise fault from error
            return f"{name} cannot be read: {error.strerror}"
        if digest == self.sha256:
            return None
        return (
            f"{name} has other content than when it was written (its sha256 is {digest} instead of "
            f"{self.sha256})"
        )


@dataclass(frozen=True)
class Manifest:
    """Description of an artifact: its stage, key, inputs, files and counts."""

    stage: str
    version: int
    key: str
    parameters: dict[str, Any]
    inputs: dict[str, str]
    """Digest of each input's manifest, by role."""
    files: dict[str, FileEntry]
    """Files by path relative to the artifact's directory."""
    counts: dict[str, Any]
    """Numbers of documents, tokens, samples and so on."""
    duration: float
    """Duration of the build in seconds."""

    @property
    def digest(self) -> str:
        """Hash that identifies the content.

        It stays the same if an artifact is deleted and rebuilt with the same content.
        """
        files = {name: [entry.size, entry.sha256] for name, entry in self.files.items()}
        content = [self.stage, self.version, self.key, self.inputs, files]
        return hashlib.sha256(canonical_json(content)).hexdigest()

    def write(self, directory: Path) -> None:
        """Write `manifest.json` into `directory` atomically, without credentials in parameters."""
        write_json(
            directory / MANIFEST_NAME,
            {**asdict(self), "parameters": redact_values(self.parameters)},
        )

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read a directory's manifest.

        Raises ArtifactError if it is missing or damaged, FileAccessError if it cannot be read now.
        """
        path = directory / MANIFEST_NAME
        try:
            values = read_json(path)
            values["files"] = {name: FileEntry(**entry) for name, entry in values["files"].items()}
            return cls(**values)
        except FileNotFoundError as error:
            raise ArtifactError(
                f"{directory} has no {MANIFEST_NAME}: it is not a complete artifact"
            ) from error
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, OSError) and (fault := unreadable(error, path)) is not None:
                raise fault from error
            raise ArtifactError(
                f"{path} is damaged ({reason_of(error)}): delete {directory} to build it again"
            ) from error

    def problem(self, directory: Path, mode: Literal["quick", "full"]) -> str | None:
        """Check the files and return the first problem as a clause, or None.

        Mode "quick" compares sizes, and digests only where the modification time changed. Mode
        "full" compares every digest. Raises FileAccessError if a file cannot be read now.
        """
        problems = (entry.problem(directory, name, mode) for name, entry in self.files.items())
        return next(filter(None, problems), None)


def file_digest(path: Path, on_read: Callable[[int], None] | None = None) -> str:
    """Return the hex SHA-256 digest of a file's content.

    `on_read` receives the number of bytes of each block; an error that it raises ends the reading.

    Raises FileAccessError, or OSError for a file that is missing or may not be read.
    """
    digest = hashlib.sha256()
    with access_errors(path), open(regular(path), "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            if on_read is not None:
                on_read(len(chunk))
    return digest.hexdigest()


def list_files(directory: Path, pattern: str = "**/*") -> dict[str, FileEntry]:
    """Return the files below `directory` that match the glob `pattern`, without the manifest.

    Those in temporary directories are left out: a failed deletion may have left one behind.
    """
    entries: dict[str, FileEntry] = {}
    for path in sorted(glob(directory, pattern)):
        name = path.relative_to(directory)
        if path == directory / MANIFEST_NAME or not is_file(path):
            continue
        if any(TEMPORARY in part for part in name.parts[:-1]):
            continue
        status = path.stat()
        entries[name.as_posix()] = FileEntry(status.st_size, file_digest(path), status.st_mtime_ns)
    return entries


def verified_record(directory: Path) -> Path:
    """Return the path of the record that all digests of the artifact in `directory` were right.

    It is next to the directory, because other programs read and copy what is inside.
    """
    return directory.with_name(f".{directory.name}.verified.json")


_NICENESS = 10
"""Priority of the threads below that of the ranks' processes."""
_THREADS = 4
"""Maximum number of files read at a time; a disk is not faster with more."""
_logger = logging.getLogger("megacore.artifact")


class _AbandonedError(Exception):
    """Raised to stop a comparison after `FirstRead` is left."""


class FirstRead:
    """Context in which the digests of artifacts are compared in the background.

    Leaving it abandons a comparison that is not finished.
    """

    def __init__(
        self, directories: Iterable[Path], log: Callable[..., None] = _logger.info
    ) -> None:
        """Choose what is compared.

        Args:
            directories: what a training reads; what is no artifact, or was compared before and has
                not changed, is left out.
            log: callback for a message with its arguments, as of a logger.
        """
        self._directories = [
            path for path in dict.fromkeys(directories) if is_file(path / MANIFEST_NAME)
        ]
        self._log = log
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megacore-verify", daemon=True)
        self.error: MegacoreError | None = None
        """Error of the first artifact that is damaged or cannot be read now, once it was found."""
        self.damaged: Path | None = None
        """Directory of the damaged artifact."""

    def __enter__(self) -> Self:
        if self._directories:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._abandoned.set()
        if self._thread.ident is not None:
            self._thread.join()

    def check(self) -> None:
        """Raise the error of a file that is damaged or cannot be read, if one was found so far."""
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        """Wait until everything was compared. Raises ArtifactError or FileAccessError."""
        if self._thread.ident is not None:
            self._thread.join()
        self.check()

    def _run(self) -> None:
        try:
            for directory in self._directories:
                self._compare(directory)
        except _AbandonedError:
            pass
        except MegacoreError as error:
            self.error = error
        except Exception as error:
            self.error = ArtifactError(
                f"the digests of {', '.join(map(str, self._directories))} were not compared "
                f"({type(error).__name__}: {error}): start again, or set verify to quick"
            )

    def _compare(self, directory: Path) -> None:
        try:
            self._verify(directory)
        except ArtifactError:
            self.damaged = directory
            raise

    def _verify(self, directory: Path) -> None:
        """Compare the artifact in `directory` unless its record is right.

        Raises ArtifactError for a damaged file, FileAccessError for one that cannot be read now.
        """
        manifest = Manifest.read(directory)
        before = _state(directory, manifest)
        if before is not None and _recorded(directory) == before:
            return
        started = time.monotonic()
        with ThreadPoolExecutor(
            max(1, min(_THREADS, (os.cpu_count() or 1) // 2)), "megacore-verify", _give_way
        ) as pool:
            problems = pool.map(
                lambda item: item[1].problem(directory, item[0], "full", self._go_on),
                manifest.files.items(),
            )
            try:
                problem = next(filter(None, problems), None)
            except FileAccessError:
                self._abandoned.set()
                raise
            if problem is not None:  # the other files need not be read to their ends
                self._abandoned.set()
        if problem is not None:
            raise ArtifactError(f"{directory}: {problem}: {advice(directory, manifest.stage)}")
        self._log(
            "%s: all digests of %d files, %.1f MB, are right after %.1f s",
            directory,
            len(manifest.files),
            sum(entry.size for entry in manifest.files.values()) / 1e6,
            time.monotonic() - started,
        )
        if before is not None and _state(directory, manifest) == before:
            with suppress(OSError, MegacoreError):  # a read-only share
                write_json(verified_record(directory), before)

    def _go_on(self, count: int) -> None:
        if self._abandoned.is_set():
            raise _AbandonedError


def advice(directory: Path, stage: str) -> str:
    """Return what to do about the damaged artifact in `directory`."""
    return (
        f"delete {shlex.quote(str(directory))}, and the same command runs stage {stage} again and "
        "continues; if it happens again, the disk or the memory of this host is at fault"
    )


def _give_way() -> None:
    """Lower the priority of this thread where the system has priorities of threads."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def _state(directory: Path, manifest: Manifest) -> dict[str, Any] | None:
    """Return what identifies the files' present content on the disk; None if one is missing."""
    try:
        states = {name: (directory / name).stat() for name in manifest.files}
    except OSError:
        return None
    return {
        "digest": manifest.digest,
        "files": {
            name: [state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]
            for name, state in states.items()
        },
    }


def _recorded(directory: Path) -> Any:
    try:
        return read_json(verified_record(directory))
    except (OSError, ValueError):
        return None
