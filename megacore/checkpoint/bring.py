"""Transfer of files written on other hosts to the first rank, over the process group."""

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.artifact.files import workspace_errors
from megacore.checkpoint.collective import RankGroup
from megacore.checkpoint.format import STALE_SUFFIX, FileRecord
from megacore.errors import CheckpointError

CHUNK = 64 << 20
"""Bytes sent at a time; sender and receiver each hold this much in memory."""


def writable_directory(first: Path, ranks: RankGroup) -> Path:
    """Return the directory that this rank writes to.

    This is the first rank's directory, or a directory next to it if that is not visible. `first`
    must have a new name, so that a network file system has not cached it as missing. Raises
    WorkspaceError.
    """
    if ranks.rank == 0 or first.is_dir():
        return first
    local_directory = first.with_name(f"{first.name}-rank{ranks.rank}")
    with workspace_errors(local_directory):
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
    visible = ranks.everywhere(written.exists)[ranks.rank]
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
