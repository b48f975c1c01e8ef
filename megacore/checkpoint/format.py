"""Format of a checkpoint on disk, with verification and locks.

Nothing here imports torch. The files in `checkpoints/` are:

* `latest_checkpointed_iteration.txt`: the newest iteration, as written by Megatron-LM; only a hint.
* `iter_0000400/__0_0.distcp` …: tensor slices of each rank (torch.distributed.checkpoint). Many
  slices are spread over several files, so that these can be hashed in parallel.
* `iter_0000400/.metadata`: file and position of the slices of each global name.
* `iter_0000400/state.json`: state that is not a tensor.
* `iter_0000400/complete.json`: the marker, written last: size and sha256 of every other file.

A reader holds a shared lock on a checkpoint's marker; deletion requires an exclusive lock. The
kernel drops the locks of a process that dies. On a file system without locks a warning is logged:
there a checkpoint may be deleted while it is read, and the reader gets an error.
"""

import contextlib
import errno
import fcntl
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megacore.artifact.build import WITHOUT_LOCKS
from megacore.artifact.files import TEMPORARY, read_json, reason_of, regular, unreadable, write_json
from megacore.artifact.manifest import file_digest
from megacore.errors import CheckpointError
from megacore.paths import is_dir

FORMAT_VERSION = 1
MARKER_NAME = "complete.json"
STATE_NAME = "state.json"
METADATA_NAME = ".metadata"
TRACKER_NAME = "latest_checkpointed_iteration.txt"
STALE_SUFFIX = TEMPORARY
HASHING_THREADS = 4
"""Maximum number of hashing threads of a process; a disk is not faster with more."""

_DIRECTORY = re.compile(r"iter_(\d{7,})")
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileRecord:
    """Size and hash of one checkpoint file at the time of writing."""

    size: int
    """Size in bytes."""
    sha256: str
    """Hex digest of the content."""

    @classmethod
    def of(cls, path: Path) -> "FileRecord":
        """Return the record of a file."""
        return cls(path.stat().st_size, file_digest(path))


@dataclass(frozen=True)
class Marker:
    """Content of `complete.json`, which marks a checkpoint as complete and lists its files."""

    iteration: int
    """Number of completed optimizer steps."""
    validation_loss: float | None
    """Mean loss over the validation samples; None if not measured or not finite."""
    files: dict[str, FileRecord]
    """Record of every other file, by its path relative to the checkpoint's directory."""
    format_version: int = FORMAT_VERSION

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())

    def write(self, directory: Path) -> None:
        """Write the marker into `directory`, atomically."""
        write_json(directory / MARKER_NAME, asdict(self))

    @classmethod
    def read(cls, directory: Path) -> "Marker":
        """Read a checkpoint's marker.

        Raises CheckpointError if it is missing or damaged, FileAccessError if it cannot be read
        now.
        """
        path = directory / MARKER_NAME
        try:
            values = read_json(path)
            files = {
                _name_within(name): FileRecord(**record)
                for name, record in values.pop("files").items()
            }
            marker = cls(files=files, **values)
            marker._check_types()
        except FileNotFoundError as error:
            raise CheckpointError(_incomplete(directory)) from error
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, OSError):
                _raise_unreadable(error, path)
            raise CheckpointError(
                f"{path} is damaged ({reason_of(error)}): use another checkpoint"
            ) from error
        if marker.format_version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format_version {marker.format_version}, this version reads "
                f"{FORMAT_VERSION}: install the version of megacore that wrote it"
            )
        return marker

    def _check_types(self) -> None:
        """Raise ValueError if the iteration, the loss or a file's record is of another type."""
        loss = self.validation_loss
        if type(self.iteration) is not int:
            raise ValueError(f"iteration is {self.iteration!r}, not a number of steps")
        if loss is not None and (type(loss) not in (int, float) or not math.isfinite(loss)):
            raise ValueError(f"validation_loss is {loss!r}, not a finite number")
        for name, record in self.files.items():
            if type(record.size) is not int or type(record.sha256) is not str:
                raise ValueError(f"the size or sha256 of {name} is of another type")

    def problem(
        self,
        directory: Path,
        mode: Literal["quick", "full"],
        progress: Callable[[], None] | None = None,
    ) -> str | None:
        """Return the first problem with the files, in one clause that names the file, or None.

        quick compares sizes, and the hashes of files modified after the marker; full compares every
        sha256. Sound files that are newer, such as those of a copy, get a marker of their time, so
        that they are hashed once. Raises FileAccessError if a file cannot be read now: the
        checkpoint may be sound.
        """
        problem, touched = self.quick_problem(directory)
        if problem is not None:
            return problem
        times = [_modified(directory / name) for name in touched]  # before they are read
        names = self.files if mode == "full" else touched
        differing = self.differing(directory, names, progress=progress)
        if times and not differing:
            with contextlib.suppress(OSError):
                os.utime(directory / MARKER_NAME, ns=(max(times), max(times)))
        return next(iter(differing.values()), None)

    def quick_problem(self, directory: Path) -> tuple[str | None, list[str]]:
        """Return a problem with the sizes or None, and the names of files newer than the marker."""
        touched = []
        try:
            marked = (directory / MARKER_NAME).stat().st_mtime_ns
        except OSError as error:
            _raise_unreadable(error, directory / MARKER_NAME)
            return f"{directory / MARKER_NAME} cannot be read: {error.strerror}", []
        for name, record in self.files.items():
            path = directory / name
            try:
                status = path.stat()
            except FileNotFoundError:
                return f"{path} is missing", []
            except OSError as error:
                _raise_unreadable(error, path)
                return f"{path} cannot be read: {error.strerror}", []
            if status.st_size != record.size:
                return f"{path} has {status.st_size} bytes instead of {record.size}", []
            if status.st_mtime_ns > marked:
                touched.append(name)
        return None, touched

    def differing(
        self,
        directory: Path,
        names: Collection[str],
        *,
        threads: int | None = None,
        progress: Callable[[], None] | None = None,
    ) -> dict[str, str]:
        """Return the problems with the content of the named files, by name, in the marker's order.

        `threads` files are hashed in parallel; None means one per core, up to a small limit.
        `progress` is called after each block that was read, by one thread at a time.
        """
        lock = threading.Lock()

        def on_read(count: int) -> None:
            if progress is not None:
                with lock:
                    progress()

        def check(name: str) -> str | None:
            path = directory / name
            try:
                same = file_digest(path, on_read) == self.files[name].sha256
                return None if same else f"{path} has other content than when it was written"
            except FileNotFoundError:
                return f"{path} is missing"
            except OSError as error:
                _raise_unreadable(error, path)
                return f"{path} cannot be read: {error.strerror}"

        ordered = [name for name in self.files if name in names]
        workers = min(threads or min(HASHING_THREADS, os.cpu_count() or 1), len(ordered))
        if workers <= 1:
            problems = [check(name) for name in ordered]
        else:
            with ThreadPoolExecutor(workers) as pool:
                problems = list(pool.map(check, ordered))
        return {
            name: problem
            for name, problem in zip(ordered, problems, strict=True)
            if problem is not None
        }


def _raise_unreadable(error: OSError, path: Path) -> None:
    """Raise FileAccessError if `error` says nothing about the file's content."""
    if (fault := unreadable(error, path)) is not None:
        raise fault from error


def _modified(path: Path) -> int:
    """Return the modification time in nanoseconds; 0 for a file that is gone meanwhile."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _name_within(name: str) -> str:
    """Return `name` if it is inside the checkpoint's directory. Raises ValueError otherwise."""
    if "\0" in name or any(part in {"", ".", ".."} for part in name.split("/")):
        raise ValueError(f"file name {name!r} leaves the checkpoint's directory")
    return name


def finite_or_none(value: float | None) -> float | None:
    """Return a loss that can be compared and written as JSON, else None."""
    return value if value is not None and math.isfinite(value) else None


def directory_name(iteration: int) -> str:
    """Return `iter_0000400` for iteration 400."""
    return f"iter_{iteration:07d}"


def iteration_of(directory: Path) -> int | None:
    """Return the iteration in a checkpoint directory's name, or None for any other directory."""
    match = _DIRECTORY.fullmatch(directory.name)
    return int(match[1]) if match else None


def checkpoint_directories(root: Path) -> list[Path]:
    """Return every `iter_*` directory in `root`, complete or not, oldest iteration first.

    Stale temporary directories are left out.
    """
    if not is_dir(root):
        return []
    checkpoints = [
        (iteration, path)
        for path in root.iterdir()
        if (iteration := iteration_of(path)) is not None
    ]
    return [path for _, path in sorted(checkpoints)]


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Protect a complete checkpoint from deletion during the block; wait for a running deletion.

    Raises CheckpointError if the checkpoint is not complete, or if it was deleted or replaced
    before the end of the block. Raises FileAccessError if the marker cannot be read now.
    """
    with protected(directory) as check:
        yield
        check()


@contextlib.contextmanager
def protected(directory: Path) -> Iterator[Callable[[], None]]:
    """Protect a complete checkpoint like `reading`, without a check at the end.

    Yields the check, which raises CheckpointError if the checkpoint was deleted or replaced.
    """
    marker = directory / MARKER_NAME
    with contextlib.ExitStack() as stack:
        try:
            descriptor = os.open(marker, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            _lock(descriptor, fcntl.LOCK_SH, marker)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(_incomplete(directory)) from error
        except OSError as error:
            _raise_unreadable(error, marker)
            raise CheckpointError(f"{marker} cannot be read: {error.strerror}") from error
        _check_same(descriptor, marker)
        yield lambda: _check_same(descriptor, marker)


@contextlib.contextmanager
def exclusive_lock(file: Path) -> Iterator[bool]:
    """Yield True if `file` has no readers; during the block, no new reader can start.

    Does not wait: yields False if a reader holds the lock, or the file is gone or write-protected.
    """
    try:
        # NFS allows an exclusive lock only on a file that is open for writing.
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    except PermissionError:
        _logger.warning("%s may not be written, so its checkpoint is kept", file)
        yield False
        return
    try:
        yield _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, file)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, operation: int, file: Path) -> bool:
    try:
        fcntl.flock(descriptor, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        _logger.warning(
            "%s is on a file system without locks: it may be deleted while it is read", file
        )
    return True


def _check_same(descriptor: int, file: Path) -> None:
    """Raise CheckpointError unless the path still refers to the open file."""
    try:
        same = os.path.samestat(os.fstat(descriptor), os.stat(file))
    except OSError as error:
        # Over NFS the descriptor of a file that another host deleted is stale.
        if error.errno != errno.ESTALE:
            _raise_unreadable(error, file)
        same = False
    if not same:
        raise CheckpointError(
            f"checkpoint {file.parent} was deleted or replaced while it was opened or "
            "read: use another checkpoint, or keep more (checkpoint.keep_last)"
        )


def verify(
    directory: Path,
    mode: Literal["quick", "full"] = "full",
    progress: Callable[[], None] | None = None,
) -> Marker:
    """Verify a checkpoint's files and return its marker.

    `progress` is called after each block of a file that was read. Raises CheckpointError that names
    the missing or damaged file, or FileAccessError for one that cannot be read now.
    """
    with reading(directory):
        marker = Marker.read(directory)
        problem = marker_problem(directory, marker) or marker.problem(directory, mode, progress)
        refuse(directory, problem)
        return marker


def marker_problem(directory: Path, marker: Marker) -> str | None:
    """Return the problem if the marker does not belong to this directory, else None."""
    if iteration_of(directory) not in {None, marker.iteration}:
        return f"its marker is of iteration {marker.iteration}"
    return None


def refuse(directory: Path, problem: str | None) -> None:
    """Raise CheckpointError if `problem` is not None."""
    if problem is not None:
        raise CheckpointError(
            f"checkpoint {directory} is damaged: {problem}: use another checkpoint"
        )


def _incomplete(directory: Path) -> str:
    return f"{directory} has no {MARKER_NAME}, so it is not complete: use another checkpoint"


def complete_checkpoints(
    root: Path,
    mode: Literal["quick", "full"] = "quick",
    progress: Callable[[], None] | None = None,
) -> dict[Path, Marker]:
    """Return every complete checkpoint in `root` with its marker, oldest iteration first.

    `progress` is called after each block of a file that was read. Raises FileAccessError if a file
    cannot be read now.
    """
    complete = {}
    for directory in checkpoint_directories(root):
        try:
            complete[directory] = verify(directory, mode, progress)
        except CheckpointError:
            continue
    return complete


def latest_complete(root: Path, *, log: Callable[[str], None] = _logger.warning) -> Path | None:
    """Return the newest checkpoint in `root` whose files all match its marker, or None.

    For each newer checkpoint that is incomplete or damaged, `log` receives a warning that names the
    file. The tracker file is not trusted: a disagreement with it is only logged. Raises
    FileAccessError if a file cannot be read now: skipping a sound checkpoint would lose work.
    """
    chosen = None
    for directory in reversed(checkpoint_directories(root)):
        try:
            verify(directory, "full")
        except CheckpointError as error:
            log(passed_over(error))
            continue
        chosen = directory
        break
    check_tracker(root, chosen, log)
    return chosen


def passed_over(error: CheckpointError) -> str:
    """Return the warning about a damaged checkpoint."""
    return f"{error}; using the one before it"


def check_tracker(root: Path, chosen: Path | None, log: Callable[[str], None]) -> None:
    """Warn if the tracker file names a checkpoint that does not exist."""
    tracked = read_tracker(root)
    if tracked is not None and not is_dir(root / directory_name(tracked)):
        log(
            f"{root / TRACKER_NAME} names iteration {tracked}, which is not there; using "
            f"{chosen or 'none'}"
        )


def read_tracker(root: Path) -> int | None:
    """Return the iteration in the tracker file; None if the file is missing or has no number."""
    try:
        return int(regular(root / TRACKER_NAME).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def write_tracker(root: Path, iteration: int) -> None:
    """Replace the tracker file atomically. Raises WorkspaceError."""
    write_json(root / TRACKER_NAME, iteration)  # a number in JSON has Megatron-LM's format


def read_state(directory: Path, name: str = STATE_NAME) -> dict[str, Any]:
    """Read the state that is not a tensor, or another JSON object. Raises CheckpointError."""
    path = directory / name
    try:
        state = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({reason_of(error)}): use another checkpoint"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} holds {type(state).__name__}, not an object: use another checkpoint"
        )
    return state
