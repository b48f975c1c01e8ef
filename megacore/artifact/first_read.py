"""Check of all digests of the artifacts that a training reads for the first time.

A quick check does not notice a byte that changed on the disk while the file's size and time stayed.
So the digests are compared once, while the training starts. The record `.KEY.verified.json` next to
the artifact KEY keeps identity, size and times of the files: a file that was replaced or written
since is compared again. In a folder that cannot be written there is no record, and each start
compares.
"""

import logging
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megacore.artifact.files import read_json, write_json
from megacore.artifact.manifest import MANIFEST_NAME, Manifest, verified_record
from megacore.errors import ArtifactError, FileAccessError, MegacoreError

_NICENESS = 10
"""Priority of the threads below that of the ranks' processes."""
_THREADS = 4
"""Maximum number of files read at a time; a disk is not faster with more."""
_logger = logging.getLogger("megacore.artifact")


class _AbandonedError(Exception):
    """End of a comparison whose result nobody needs any more."""


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
            path for path in dict.fromkeys(directories) if (path / MANIFEST_NAME).is_file()
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
