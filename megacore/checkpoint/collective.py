"""Collective actions on checkpoints: an error on one rank is raised on all.

They choose a checkpoint, verify its files together, and move files that other hosts wrote to the
first rank. Single processes and tools without ranks use `format` directly.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.artifact.files import access_error, unreadable, workspace_errors
from megacore.checkpoint.format import (
    HASHING_THREADS,
    MARKER_NAME,
    STALE_SUFFIX,
    FileRecord,
    Marker,
    check_tracker,
    checkpoint_directories,
    marker_problem,
    passed_over,
    reading,
    refuse,
    verify,
)
from megacore.checkpoint.retain import stale_directories
from megacore.errors import (
    ERROR_TYPES,
    CheckpointError,
    FileAccessError,
    LaunchError,
    MegacoreError,
)
from megacore.paths import exists, is_dir, is_file

T = TypeVar("T")
_WAITING_INTERVAL = 5.0
"""Seconds between two calls by a rank that waits for the others."""
_logger = logging.getLogger(__name__)


class RankGroup:
    """Ranks that save together; a single rank if torch.distributed is not initialized.

    Objects are exchanged through `group` (None: the default group). A group with only the NCCL back
    end moves them through the current CUDA device, which each rank must have set; a gloo group
    needs none.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.distributed = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank(group) if self.distributed else 0
        self.size: int = dist.get_world_size(group) if self.distributed else 1

    def everywhere(
        self, action: Callable[[], T], waiting: Callable[[], None] | None = None
    ) -> list[T]:
        """Run `action` on every rank and return the results in rank order, on every rank.

        A rank whose action fails raises the original error. The others raise the first failing
        rank's error, as the same MegacoreError or as CheckpointError. Results must be picklable.

        A thread calls `waiting` every few seconds while this rank has finished and waits for the
        others: it does not stall, and a rank that does has no such thread.
        """
        value: T | None = None
        failure: Exception | None = None
        try:
            value = action()
        except Exception as error:
            failure = error
        outcome = (value, _describe(failure))
        outcomes: list[Any] = [outcome]
        if self.distributed:
            outcomes = [None] * self.size
            with repeated(waiting):
                dist.all_gather_object(outcomes, outcome, group=self.group)
        if failure is not None:
            raise failure
        for rank, (_, description) in enumerate(outcomes):
            if description is not None:
                raise _restored(rank, *description)
        return [result for result, _ in outcomes]

    def on_first(self, action: Callable[[], T], waiting: Callable[[], None] | None = None) -> T:
        """Run `action` on the first rank; every rank returns its result or raises its error.

        `waiting` is called as by `everywhere`.
        """
        results: list[Any] = self.everywhere(action if self.rank == 0 else _nothing, waiting)
        return results[0]  # type: ignore[no-any-return]


@contextlib.contextmanager
def repeated(action: Callable[[], None] | None) -> Iterator[None]:
    """Let a thread call `action` every few seconds during the body; None calls nothing."""
    if action is None:
        yield
        return
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(_WAITING_INTERVAL):
            action()

    thread = threading.Thread(target=repeat, name="megacore-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _nothing() -> Any:
    return None


def _describe(error: Exception | None) -> tuple[str, str] | None:
    """Return the class name (of the nearest MegacoreError, if it is one) and the message."""
    if error is None:
        return None
    if isinstance(error, OSError):
        error = access_error(error) or error  # a retry depends on it
    names = [base.__name__ for base in type(error).__mro__]
    return next((name for name in names if name in ERROR_TYPES), names[0]), str(error)


def _restored(rank: int, name: str, message: str) -> MegacoreError:
    """Build another rank's error from its class name and message."""
    if name in ERROR_TYPES:
        return ERROR_TYPES[name](message)
    return CheckpointError(f"rank {rank} failed: {name}: {message}")


def latest_complete_together(
    root: Path,
    ranks: RankGroup,
    *,
    log: Callable[[str], None] = _logger.warning,
    progress: Callable[[], None] | None = None,
    damaged: set[Path] | None = None,
) -> Path | None:
    """Choose a checkpoint like `format.latest_complete`; only the first rank logs. Collective.

    `progress` is called as in `verify_together`. The checkpoints that are passed over are added to
    `damaged`.
    """
    chosen = None
    for directory in reversed(ranks.on_first(lambda: checkpoint_directories(root))):
        try:
            verify_together(directory, ranks, progress=progress)
        except CheckpointError as error:
            if ranks.rank == 0:
                log(passed_over(error))
            if damaged is not None:
                damaged.add(directory)
            continue
        chosen = directory
        break
    if ranks.rank == 0:
        check_tracker(root, chosen, log)
    return chosen


def refuse_only_damaged(root: Path, ranks: RankGroup) -> None:
    """Refuse to start again in `root` if it has complete checkpoints, all damaged. Collective.

    For a run for which `latest_complete_together` returned None: a start at iteration 0 would lose
    its work. Raises CheckpointError.
    """

    def check() -> None:
        damaged = [path for path in checkpoint_directories(root) if is_file(path / MARKER_NAME)]
        if damaged:
            raise CheckpointError(
                f"all complete checkpoints in {root} are damaged, as the warnings before this "
                f"say ({', '.join(path.name for path in damaged)}): restore one from a copy, or "
                "move them away to start from the beginning"
            )

    ranks.on_first(check)


def verify_together(
    directory: Path, ranks: RankGroup, *, progress: Callable[[], None] | None = None
) -> Marker:
    """Compare every hash like `format.verify`; return the marker on every rank. Collective.

    `progress` is called on each rank after each block that it read, and then every few seconds
    while it waits for the others, by one thread at a time.

    Raises CheckpointError that names the missing or damaged file. Raises LaunchError if the
    complete checkpoint is missing on another host than the first rank's: skipping it would lose
    work. Raises FileAccessError on every rank if one rank cannot read a file now.
    """

    def look() -> tuple[Marker, str | None]:
        with reading(directory):
            marker = Marker.read(directory)
            return marker, marker_problem(directory, marker) or marker.quick_problem(directory)[0]

    marker, problem = ranks.on_first(look)
    refuse(directory, problem)
    absent = [host for host in ranks.everywhere(lambda: _without(directory)) if host is not None]
    if absent:  # damaged files are on no other host if each has a separate workspace
        ranks.on_first(lambda: verify(directory))
        raise LaunchError(
            f"{directory} is not on host {absent[0]}, though the first rank's host has it: "
            "mount the same file system on every host, or set launch.data_placement to node_local"
        )
    assigned = shares(marker, ranks.size)[ranks.rank]
    threads = max(1, min(HASHING_THREADS, (os.cpu_count() or 1) // ranks.size))

    def compare() -> tuple[dict[str, str], tuple[str, str] | None]:
        try:
            with reading(directory):
                differing = marker.differing(
                    directory, assigned, threads=threads, progress=progress
                )
                return differing, None
        except FileAccessError as error:  # raised below, on all ranks alike
            return {}, _describe(error)

    outcomes = ranks.everywhere(compare, progress)
    for rank, (_, fault) in enumerate(outcomes):
        if fault is not None:
            raise _restored(rank, *fault)
    problems = {name: problem for each, _ in outcomes for name, problem in each.items()}
    refuse(directory, next((problems[name] for name in marker.files if name in problems), None))
    return marker


def _without(directory: Path) -> str | None:
    """Return this rank's host name if the host does not have the checkpoint."""
    marker = directory / MARKER_NAME
    try:
        marker.stat()
    except OSError as error:
        if (fault := unreadable(error, marker)) is not None:
            raise fault from error
        return socket.gethostname()
    return None


def shares(marker: Marker, size: int) -> list[list[str]]:
    """Divide the files among `size` ranks for hashing, by about equal bytes; return the names."""
    load = [0] * size
    names: list[list[str]] = [[] for _ in range(size)]
    for name, record in sorted(marker.files.items(), key=lambda item: (-item[1].size, item[0])):
        least = load.index(min(load))
        load[least] += record.size
        names[least].append(name)
    return names


CHUNK = 64 << 20
"""Bytes sent at a time; sender and receiver each hold this much in memory."""


def writable_directory(first: Path, ranks: RankGroup) -> Path:
    """Return the directory that this rank writes to.

    This is the first rank's directory, or a directory next to it if that is not visible. `first`
    must have a new name, so that a network file system has not cached it as missing. Raises
    WorkspaceError.

    The first rank cannot see the remains of a crash next to such a directory, so they are removed
    here; the directories of other ranks of this host begin with the name of `first`.
    """
    if ranks.rank == 0 or is_dir(first):
        return first
    local_directory = first.with_name(f"{first.name}-rank{ranks.rank}")
    with workspace_errors(local_directory):
        for stale in stale_directories(first.parent):
            if not stale.name.startswith(first.name):
                shutil.rmtree(stale, ignore_errors=True)  # another rank may be deleting it, too
        local_directory.mkdir(parents=True)
    return local_directory


def sees_first_directory(directory: Path, ranks: RankGroup) -> bool:
    """Create the first rank's `directory` and return True if this rank sees it. Collective.

    Raises WorkspaceError.
    """
    token = directory / f".seen{STALE_SUFFIX}{secrets.token_hex(4)}"

    def write() -> Path:
        with workspace_errors(token):
            directory.mkdir(parents=True, exist_ok=True)
            token.touch()
        return token

    written = ranks.on_first(write)
    visible = ranks.everywhere(lambda: exists(written))[ranks.rank]
    ranks.on_first(lambda: written.unlink(missing_ok=True))
    return visible


def transfer_files(
    directory: Path,
    local_directory: Path | None,
    records: Mapping[str, FileRecord],
    ranks: RankGroup,
    *,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Move the files of ranks that write elsewhere into the first rank's directory. Collective.

    The files are synced and their hashes compared. One rank after the other sends; a file is
    deleted at the sender after it has arrived. The group needs gloo.

    Args:
        directory: target directory on the first rank; each file gets its name there once it is
            complete.
        local_directory: this rank's directory; None if this rank sees the first rank's directory.
        records: this rank's files.
        ranks: the ranks that take part.
        progress: callback on every rank after each chunk.

    Raises:
        WorkspaceError: a file cannot be read or written; raised on every rank.
        CheckpointError: a file arrived with different content; raised on every rank.
    """
    elsewhere = ranks.everywhere(lambda: {} if local_directory is None else dict(records))
    for sender, files in enumerate(elsewhere):
        for name, record in files.items():
            move = _Move(record, sender, ranks, progress)
            if ranks.rank == sender and local_directory is not None:
                ranks.everywhere(move.runner(move.send, local_directory / name))
            else:
                ranks.everywhere(
                    move.runner(move.receive if ranks.rank == 0 else move.wait, directory / name)
                )


class _Move:
    """Transfer of one file.

    A rank that fails still takes part in the current chunk; then all ranks stop.
    """

    def __init__(
        self, record: FileRecord, sender: int, ranks: RankGroup, progress: Callable[[], None]
    ) -> None:
        self._record, self._sender, self._ranks, self._progress = record, sender, ranks, progress
        self._failure: Exception | None = None
        self._broken_off = False
        """True if a rank failed before the last chunk."""

    def runner(self, part: Callable[[Path], None], path: Path) -> Callable[[], None]:
        """Return an action that runs this rank's part and raises its error at the end."""

        def run() -> None:
            part(path)
            if self._failure is not None:
                raise self._failure

        return run

    def send(self, path: Path) -> None:
        """Read and send the file, and delete it after its arrival."""
        with contextlib.ExitStack() as stack:
            file = None
            with self._noted(path):
                file = stack.enter_context(open(path, "rb", buffering=0))
            for chunk in self._chunks():
                with self._noted(path):
                    if file is not None:
                        _read_all(file.fileno(), _bytes(chunk), path)
                dist.send(chunk, group=self._ranks.group, group_dst=0)
        if self._failure is None and not self._broken_off:
            with self._noted(path):
                path.unlink()

    def receive(self, path: Path) -> None:
        """Write the file under a temporary name, compare its hash, and rename it."""
        digest = hashlib.sha256()
        temporary = path.with_name(f"{path.name}{STALE_SUFFIX}{os.getpid()}")
        with contextlib.ExitStack() as stack:
            file = None
            with self._noted(temporary):
                file = stack.enter_context(open(temporary, "wb", buffering=0))
            for chunk in self._chunks():
                dist.recv(chunk, group=self._ranks.group, group_src=self._sender)
                with self._noted(temporary):
                    if file is not None and self._failure is None:
                        _write_all(file.fileno(), _bytes(chunk))
                        digest.update(_bytes(chunk))
            with self._noted(temporary):
                if file is not None:
                    os.fsync(file.fileno())
        if self._failure is not None or self._broken_off:
            return
        with self._noted(path):
            if digest.hexdigest() != self._record.sha256:
                raise CheckpointError(
                    f"{path} came from rank {self._sender} with other content than it was written "
                    "with: look at the memory, disk and network of that machine"
                )
            os.replace(temporary, path)

    def wait(self, path: Path) -> None:
        """Take part in the collectives until the file has arrived or a rank has failed."""
        for _ in self._chunks():
            pass

    def _chunks(self) -> Iterator[Tensor]:
        """Yield a buffer for each chunk; after each chunk, all ranks learn whether one failed."""
        memory = torch.empty(min(CHUNK, self._record.size), dtype=torch.uint8)
        for first in range(0, self._record.size, CHUNK):
            yield memory[: min(CHUNK, self._record.size - first)]
            failed = torch.tensor(self._failure is not None, dtype=torch.int64)
            dist.all_reduce(failed, dist.ReduceOp.MAX, group=self._ranks.group)
            self._progress()
            if failed:
                self._broken_off = True
                return

    @contextlib.contextmanager
    def _noted(self, path: Path) -> Iterator[None]:
        """Store an error until the end, since the other ranks are in the middle of a collective."""
        try:
            with workspace_errors(path):
                yield
        except Exception as error:
            self._failure = self._failure or error


def _bytes(chunk: Tensor) -> memoryview:
    """Return the memory of a chunk."""
    array: Any = chunk.numpy()
    return memoryview(array)


def _read_all(descriptor: int, data: memoryview, path: Path) -> None:
    while data:
        count = os.readv(descriptor, [data])
        if count == 0:
            raise CheckpointError(
                f"{path} became shorter while it was sent: look at that machine's disk"
            )
        data = data[count:]


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
