"""Writing one rank's slices: while a file is written, those before it are hashed and synced."""

import math
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter, _write_files_from_queue
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from megacore.checkpoint.format import FileRecord

LEAST_FILE_BYTES = 64 << 20
"""A rank's slices go into one file up to this size."""
MOST_FILES = 16
"""Per rank, about: as many as keep the hashing of the last one short beside the whole."""


class CheckpointWriter(FileSystemWriter):
    """Writes a rank's slices into files of similar size, and knows their sizes and hashes when it is done.

    Hashing and syncing have a thread each, so that a save takes as long as the slowest of writing, hashing and the
    disk. Names no absolute path in the metadata, and reports a full disk as what it is.
    """

    def __init__(self, directory: Path, *, progress: Callable[[], None]) -> None:
        """Write into `directory`; `progress` is called after each file, from the thread that writes."""
        super().__init__(directory, sync_files=True)
        self.records: dict[str, FileRecord] = {}
        self._directory = directory
        self._progress = progress

    def storage_meta(self) -> StorageMeta | None:
        """Nothing: a checkpoint may be moved."""
        return None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write, hash and sync this rank's slices. Raises the OSError that torch's zip writer hides."""
        prefix = plan.storage_data.prefix
        files: queue.Queue[Any] = queue.Queue()
        for number, items in enumerate(divided(plan.items)):
            name = f"{prefix}{number}.distcp"
            files.put((self._directory / name, name, items))
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result(self._written(files, planner))
        return done

    def _written(self, files: "queue.Queue[Any]", planner: SavePlanner) -> list[WriteResult]:
        results: queue.Queue[list[WriteResult]] = queue.Queue()
        with _Finisher() as finisher:

            @contextmanager
            def create_stream(path: Path, mode: str) -> Iterator[Any]:
                with open(path, mode) as stream:
                    yield stream
                finisher.add(path)
                self._progress()

            try:
                _write_files_from_queue(
                    create_stream=create_stream,
                    file_queue=files,
                    result_queue=results,
                    planner=planner,
                    transforms=self.transforms,
                    # Copies ahead on a CUDA stream would wait for the training's work there.
                    inflight_threshhold=0,
                    use_fsync=False,
                    thread_count=1,
                    serialization_format=self.serialization_format,
                )
            except RuntimeError as error:
                # The context does not survive the way to the other ranks: raise the cause itself.
                hidden = error.__context__
                if isinstance(hidden, OSError):
                    raise hidden from None
                raise
            self.records = finisher.records(self._progress)
        return [result for written in results.queue for result in written]


class _Finisher:
    """Hashes and syncs written files, one thread for each."""

    def __init__(self) -> None:
        self._pools = ThreadPoolExecutor(1, "checkpoint-hash"), ThreadPoolExecutor(1, "checkpoint-sync")
        self._files: dict[str, tuple[Future[FileRecord], Future[None]]] = {}

    def add(self, path: Path) -> None:
        """Begin with a file, which stays as it is from here on."""
        hashing, syncing = self._pools
        self._files[path.name] = hashing.submit(FileRecord.of, path), syncing.submit(sync_file, path)

    def records(self, progress: Callable[[], None]) -> dict[str, FileRecord]:
        """Wait for all files. Raises OSError, also for what was written before and could not be kept."""
        records = {}
        for name, (record, synced) in self._files.items():
            records[name] = record.result()
            synced.result()
            progress()
        return records

    def __enter__(self) -> "_Finisher":
        return self

    def __exit__(self, *exception: object) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)


def sync_file(path: Path) -> None:
    """Flush a file to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def divided(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Slices by file, the largest first, so that little is left to hash and sync when the last is written."""
    limit = max(LEAST_FILE_BYTES, sum(map(_item_bytes, items)) // MOST_FILES)
    files: list[list[WriteItem]] = []
    room = 0
    for item in sorted(items, key=_item_bytes, reverse=True):
        if not files or _item_bytes(item) > room:
            files.append([])
            room = limit
        files[-1].append(item)
        room -= _item_bytes(item)
    return files


def _item_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None, f"{item.index.fqn} is no tensor"
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
