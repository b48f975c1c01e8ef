"""The form of a checkpoint on disk, which one can be believed, and who may read or delete it.

Nothing here imports torch.

Below `checkpoints/`:

* `latest_checkpointed_iteration.txt`: the newest iteration, as Megatron-LM writes it; a hint, never
  trusted alone.
* `iter_0000400/__0_0.distcp` …: tensor slices of each rank (torch.distributed.checkpoint), in
  several files where they are many, which are hashed at the same time.
* `iter_0000400/.metadata`: where the slices of each global name lie.
* `iter_0000400/state.json`: state that is no tensor.
* `iter_0000400/complete.json`: written last, size and sha256 of every other file.

Who reads a checkpoint holds a shared lock on its marker; who deletes it needs the lock alone. The
kernel drops the locks of a process that dies. A file system without locks is named in a warning:
there a checkpoint that is read may be deleted, and the reader is told so.
"""

import contextlib
import errno
import fcntl
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megacore.artifact.files import read_json, write_json
from megacore.artifact.manifest import file_digest
from megacore.errors import CheckpointError

FORMAT_VERSION = 1
MARKER_NAME = "complete.json"
STATE_NAME = "state.json"
METADATA_NAME = ".metadata"
TRACKER_NAME = "latest_checkpointed_iteration.txt"
STALE_SUFFIX = ".tmp-"

_WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
_DIRECTORY = re.compile(r"iter_(\d{7,})")
_THREADS = 4
"""That hash files at most; a disk is not faster with more."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint as it was written."""

    size: int
    """Bytes."""
    sha256: str
    """Hex digest of the content."""

    @classmethod
    def of(cls, path: Path) -> "FileRecord":
        """Measure a file."""
        return cls(path.stat().st_size, file_digest(path))


@dataclass(frozen=True)
class Marker:
    """`complete.json`: where it is, the checkpoint is whole; its content is how to prove it."""

    iteration: int
    """Optimizer steps done."""
    validation_loss: float | None
    """Mean loss over the validation samples; None when it was not measured or is not finite."""
    files: dict[str, FileRecord]
    """Every other file, by its path below the checkpoint's directory."""
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
        """Read a checkpoint's marker. Raises CheckpointError when it is missing or damaged."""
        path = directory / MARKER_NAME
        try:
            values = read_json(path)
            files = {
                _name_within(name): FileRecord(**record)
                for name, record in values.pop("files").items()
            }
            marker = cls(files=files, **values)
        except FileNotFoundError as error:
            raise CheckpointError(_incomplete(directory)) from error
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}): use another checkpoint") from error
        if marker.format_version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path} has format_version {marker.format_version}, this version reads "
                f"{FORMAT_VERSION}: install the version of megacore that wrote it"
            )
        return marker

    def problem(self, directory: Path, mode: Literal["quick", "full"]) -> str | None:
        """Return what is wrong with the files, in one clause that names the file, or None.

        quick compares sizes, and hashes of files that were touched after the marker; full compares
        every sha256.
        """
        problem, touched = self.quick_problem(directory)
        if problem is not None:
            return problem
        differing = self.differing(directory, self.files if mode == "full" else touched)
        return next(iter(differing.values()), None)

    def quick_problem(self, directory: Path) -> tuple[str | None, list[str]]:
        """Return what is wrong with the sizes, and the names of files touched after the marker."""
        touched = []
        try:
            marked = (directory / MARKER_NAME).stat().st_mtime_ns
        except OSError as error:
            return f"{directory / MARKER_NAME} cannot be read: {error.strerror}", []
        for name, record in self.files.items():
            path = directory / name
            try:
                status = path.stat()
            except FileNotFoundError:
                return f"{path} is missing", []
            except OSError as error:
                return f"{path} cannot be read: {error.strerror}", []
            if status.st_size != record.size:
                return f"{path} has {status.st_size} bytes instead of {record.size}", []
            if status.st_mtime_ns > marked:
                touched.append(name)
        return None, touched

    def differing(
        self, directory: Path, names: Collection[str], *, threads: int | None = None
    ) -> dict[str, str]:
        """Return what is wrong with the content of the named files, by name, in the marker's order.

        Several are read at once.

        `threads` hash at the same time; None means one per core, at most a few.
        """

        def check(name: str) -> str | None:
            path = directory / name
            try:
                same = file_digest(path) == self.files[name].sha256
                return None if same else f"{path} has another content than when it was written"
            except FileNotFoundError:
                return f"{path} is missing"
            except OSError as error:
                return f"{path} cannot be read: {error.strerror}"

        ordered = [name for name in self.files if name in names]
        workers = min(threads or min(_THREADS, os.cpu_count() or 1), len(ordered))
        if workers <= 1:
            found = [check(name) for name in ordered]
        else:
            with ThreadPoolExecutor(workers) as pool:
                found = list(pool.map(check, ordered))
        return {
            name: problem
            for name, problem in zip(ordered, found, strict=True)
            if problem is not None
        }


def _name_within(name: str) -> str:
    """Return `name` if it is of a file below the checkpoint's directory. Raises ValueError."""
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
    """Return every `iter_*` directory below `root`, complete or not, oldest iteration first.

    Stale temporaries are left out.
    """
    if not root.is_dir():
        return []
    found = [
        (iteration, path)
        for path in root.iterdir()
        if (iteration := iteration_of(path)) is not None
    ]
    return [path for _, path in sorted(found)]


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Keep a complete checkpoint from being deleted while it is read; wait while it is deleted.

    Raises CheckpointError when it is not complete, or was deleted or replaced, before or meanwhile.
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
            raise CheckpointError(f"{marker} cannot be read: {error.strerror}") from error
        _check_same(descriptor, marker)
        yield
        _check_same(descriptor, marker)


@contextlib.contextmanager
def exclusive_lock(file: Path) -> Iterator[bool]:
    """Yield whether nobody reads what `file` belongs to; while it is held, nobody begins to.

    Does not wait: False where a reader holds it, or where it is gone already.
    """
    try:
        # Over NFS only a file that is open for writing can be locked for oneself.
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
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
        if error.errno not in _WITHOUT_LOCKS:
            raise
        _logger.warning(
            "%s is on a file system without locks: it may be deleted while it is read", file
        )
    return True


def _check_same(descriptor: int, file: Path) -> None:
    """Raise CheckpointError unless the path still leads to the open file."""
    try:
        there = os.path.samestat(os.fstat(descriptor), os.stat(file))
    except OSError:  # over NFS the descriptor of a file that another machine deleted is stale
        there = False
    if not there:
        raise CheckpointError(
            f"checkpoint {file.parent} was deleted or replaced while it was opened or "
            "read: use another checkpoint, or keep more (checkpoint.keep_last)"
        )


def verify(directory: Path, mode: Literal["quick", "full"] = "full") -> Marker:
    """Return the marker of a checkpoint whose files are as they were written.

    Raises CheckpointError naming the file that is missing or damaged.
    """
    with reading(directory):
        marker = Marker.read(directory)
        refuse(directory, misplaced(directory, marker) or marker.problem(directory, mode))
        return marker


def misplaced(directory: Path, marker: Marker) -> str | None:
    """Return what is wrong with a marker in this directory, or None."""
    if iteration_of(directory) not in {None, marker.iteration}:
        return f"its marker is of iteration {marker.iteration}"
    return None


def refuse(directory: Path, problem: str | None) -> None:
    """Raise CheckpointError if there is a problem."""
    if problem is not None:
        raise CheckpointError(
            f"checkpoint {directory} is damaged: {problem}: use another checkpoint"
        )


def _incomplete(directory: Path) -> str:
    return f"{directory} has no {MARKER_NAME}: it is not a complete checkpoint"


def complete_checkpoints(
    root: Path, mode: Literal["quick", "full"] = "quick"
) -> dict[Path, Marker]:
    """Return every complete checkpoint below `root` with its marker, oldest iteration first."""
    complete = {}
    for directory in checkpoint_directories(root):
        try:
            complete[directory] = verify(directory, mode)
        except CheckpointError:
            continue
    return complete


def latest_complete(root: Path, *, log: Callable[[str], None] = _logger.warning) -> Path | None:
    """Return the newest checkpoint below `root` whose every file is as recorded, or None.

    Each incomplete or damaged one on the way is passed over, after `log` got a warning that names
    the file. The tracker file is not believed: only a disagreement with what was found is logged.
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
    """Return the warning about a checkpoint that cannot be believed."""
    return f"{error}; passing it over for the one before"


def check_tracker(root: Path, chosen: Path | None, log: Callable[[str], None]) -> None:
    """Warn when the tracker file names a checkpoint that is not there."""
    tracked = read_tracker(root)
    if tracked is not None and not (root / directory_name(tracked)).is_dir():
        log(
            f"{root / TRACKER_NAME} names iteration {tracked}, which is not there; using "
            f"{chosen or 'none'}"
        )


def read_tracker(root: Path) -> int | None:
    """Return the iteration in the tracker file, or None when there is none or it is no number."""
    try:
        return int((root / TRACKER_NAME).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def write_tracker(root: Path, iteration: int) -> None:
    """Replace the tracker file atomically. Raises WorkspaceError."""
    write_json(root / TRACKER_NAME, iteration)  # a number in JSON is what Megatron-LM writes


def read_state(directory: Path, name: str = STATE_NAME) -> dict[str, Any]:
    """Read the state that is no tensor, or another file with an object. Raises CheckpointError."""
    path = directory / name
    try:
        state = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): use another checkpoint") from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} holds {type(state).__name__}, not an object: use another checkpoint"
        )
    return state
