"""Collective saving: files are staged, hashed, synced, marked and renamed.

A crash at any point leaves either the complete checkpoint or none. A checkpoint that is saved again
is not lost either: `retain.remove_stale` finishes the renaming.
"""

import contextlib
import json
import math
import os
import secrets
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megacore.artifact.files import naming, sync_directory, workspace_errors
from megacore.checkpoint.collective import RankGroup, transfer_files, writable_directory
from megacore.checkpoint.format import (
    METADATA_NAME,
    STALE_SUFFIX,
    STATE_NAME,
    FileRecord,
    Marker,
    directory_name,
    finite_or_none,
    write_tracker,
)
from megacore.checkpoint.metadata import chunks_of, private_name
from megacore.checkpoint.retain import publish, remove_stale
from megacore.checkpoint.shard import DeferredTensor, SavedTensors, TensorShard, pieces_of
from megacore.errors import CheckpointError, MegacoreError, WorkspaceError

T = TypeVar("T")
LEAST_FILE_BYTES = 64 << 20
"""Lower bound of the size limit of a file: a rank with fewer bytes writes one file."""
MOST_FILES = 16
"""Approximate maximum number of files per rank. Hashing the last of so many files takes a small
part of the time."""
_StorageInfo = private_name("torch.distributed.checkpoint.filesystem._StorageInfo")


def save_checkpoint(
    root: Path,
    iteration: int,
    tensors: SavedTensors,
    state: Mapping[str, Any],
    *,
    validation_loss: float | None = None,
) -> Path:
    """Save `tensors` and `state` as `root/iter_<iteration>`; return that path on every rank.

    Collective over the default group, if there is one. Tensors are saved under
    their global names, which may differ between ranks. If several ranks hold a plain tensor or a
    rectangle of a TensorShard, it is written by the rank with the least data. `state` is JSON, as
    Python writes it: numbers may be NaN or infinite. The first rank's is written. An existing
    checkpoint of this iteration is replaced.

    Raises WorkspaceError (disk full, not writable) or CheckpointError, on every rank; nothing is
    left visible.
    """
    ranks = RankGroup(None)

    def check() -> str:
        check_types(tensors)
        return encode_state(state, iteration) if ranks.rank == 0 else ""

    # Check before writing: a rank that fails while writing leaves the others in a collective.
    encoded = ranks.everywhere(check)[0]
    path, _ = write_checkpoint(
        root, iteration, tensors, encoded, ranks, validation_loss=validation_loss
    )
    return path


def write_checkpoint(
    root: Path,
    iteration: int,
    tensors: SavedTensors,
    state: str,
    ranks: RankGroup,
    *,
    validation_loss: float | None,
    staged: Callable[[Path], None] = lambda _: None,
    progress: Callable[[], None] = lambda: None,
) -> tuple[Path, Marker]:
    """Save tensors of checked types; return path and marker, on every rank. Collective.

    A rank whose host does not see the first rank's `root` writes to its local disk; its files are
    then transferred to the first rank.

    Args:
        root: directory of the checkpoints.
        iteration: number of completed optimizer steps.
        tensors: tensors that this rank may write.
        state: JSON; the first rank's is written.
        ranks: the ranks that save together.
        validation_loss: validation loss at this iteration.
        staged: callback that receives this rank's staging directory before anything is written.
        progress: callback after each file that this rank writes, and after each part of a transfer.
    """
    staging = local_staging = ranks.on_first(lambda: _open_staging(root, iteration))
    try:
        local_staging = ranks.everywhere(lambda: writable_directory(staging, ranks))[ranks.rank]
        staged(local_staging)
        records = ranks.everywhere(lambda: _write_tensors(local_staging, tensors, ranks, progress))
        elsewhere = None if local_staging == staging else local_staging
        transfer_files(staging, elsewhere, records[ranks.rank], ranks, progress=progress)
        state_records = ranks.on_first(lambda: _write_state(staging, state))
        files = {
            name: record
            for rank_records in [*records, state_records]
            for name, record in rank_records.items()
        }
        marker = Marker(iteration, finite_or_none(validation_loss), dict(sorted(files.items())))
        return ranks.on_first(lambda: _publish(staging, root, marker)), marker
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        if local_staging != staging:
            shutil.rmtree(local_staging, ignore_errors=True)


def check_types(tensors: SavedTensors) -> None:
    """Raise CheckpointError for a value that is not a tensor."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor | TensorShard | DeferredTensor):
            raise CheckpointError(
                f"{name} is {type(tensor).__name__}, not a tensor: put it into the state"
            )


def encode_state(state: Mapping[str, Any], iteration: int) -> str:
    """Return the state as JSON. Raises CheckpointError.

    An applied iteration may have an infinite loss, so NaN and infinite numbers are written too.
    """
    try:
        return json.dumps(dict(state), indent=2, sort_keys=True) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the state of {directory_name(iteration)} is not JSON: {error}"
        ) from error


def _open_staging(root: Path, iteration: int) -> Path:
    """Remove the remains of crashes and create the directory that all ranks write to."""
    with workspace_errors(root):
        try:
            root.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise WorkspaceError(
                f"cannot save into {root}: a file is in the way: move it away"
            ) from error
        remove_stale(root)
        staging = root / f"{directory_name(iteration)}{STALE_SUFFIX}{secrets.token_hex(4)}"
        staging.mkdir()
    return staging


def _write_tensors(
    staging: Path, tensors: SavedTensors, ranks: RankGroup, progress: Callable[[], None]
) -> dict[str, FileRecord]:
    """Write and sync the slices and `.metadata`; return this rank's file records. Collective."""
    writer = CheckpointWriter(staging, ranks.rank, progress=progress)
    # Permanent, since a temporary filter would affect all threads. A single rank is intended here.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    with workspace_errors(staging), naming(staging), _first_failure():
        save(
            {},
            storage_writer=writer,
            planner=ShardSavePlanner(tensors),
            process_group=ranks.group,
            no_dist=not ranks.distributed,
        )
    return writer.records


@contextlib.contextmanager
def _first_failure() -> Iterator[None]:
    """Raise the first failing rank's error instead of DCP's BaseException around it."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if isinstance(cause, OSError | KeyboardInterrupt | MegacoreError):
            raise cause from error
        raise CheckpointError(
            f"rank {rank} could not save its tensors: {type(cause).__name__}: {cause}"
        ) from error


class ShardSavePlanner(DefaultSavePlanner):
    """torch's planner for tensors and the rectangles of TensorShards.

    The planner receives the tensors, and `save` an empty dictionary: torch creates a log record of
    0.1 ms for each entry of the latter.
    """

    def __init__(self, tensors: SavedTensors) -> None:
        super().__init__()
        self._tensors = tensors

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Set the planner's tensors."""
        self.state_dict = dict(self._tensors)
        self.mappings = {name: (name,) for name in self._tensors}
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Plan to write all tensors of this rank; the global plan removes duplicates."""
        items = [
            item for name, tensor in self._tensors.items() for item in _write_items(name, tensor)
        ]
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the rectangle to write."""
        assert index.offset is not None, f"{index.fqn} was planned without an offset"
        tensor = self._tensors[index.fqn]
        return (
            _read(index.fqn, tensor)
            if isinstance(tensor, DeferredTensor)
            else (pieces_of(tensor)[index.offset])
        )


def _read(name: str, deferred: DeferredTensor) -> Tensor:
    """Read a deferred tensor. Raises CheckpointError if it is not the one that was announced."""
    tensor = deferred.read()
    if (tensor.shape, tensor.dtype) != (deferred.shape, deferred.dtype):
        raise CheckpointError(
            f"{name} has shape {tuple(tensor.shape)} and type {tensor.dtype} where its model says "
            f"{tuple(deferred.shape)} and {deferred.dtype}: import the model it belongs to"
        )
    return tensor


def _write_items(name: str, tensor: Tensor | TensorShard | DeferredTensor) -> list[WriteItem]:
    """Return torch's description of a tensor's rectangles."""
    if isinstance(tensor, Tensor):
        kind, properties = WriteItemType.TENSOR, TensorProperties.create_from_tensor(tensor)
    else:
        kind, properties = WriteItemType.SHARD, TensorProperties(dtype=tensor.dtype)
    chunks = (
        [ChunkStorageMetadata(torch.Size([0] * len(tensor.shape)), tensor.shape)]
        if isinstance(tensor, DeferredTensor)
        else chunks_of(tensor)
    )
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=kind,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.shape),
        )
        for chunk in chunks
    ]


class CheckpointWriter(FileSystemWriter):
    """Writer of a rank's slices into files of similar size, with their sizes and hashes.

    While a file is written, one thread hashes and another syncs the previous files: a save takes as
    long as the slowest of the three. The metadata contains no absolute path.
    """

    def __init__(self, directory: Path, rank: int, *, progress: Callable[[], None]) -> None:
        """Write into `directory`; `progress` is called after each file, from the same thread."""
        super().__init__(directory)
        self.records: dict[str, FileRecord] = {}
        self._directory, self._rank, self._progress = directory, rank, progress

    def storage_meta(self) -> StorageMeta | None:
        """Return None, since a checkpoint may be moved."""
        return None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write, hash and sync this rank's slices."""
        results = []
        with _Finisher() as finisher:
            for number, items in enumerate(divided(plan.items)):
                path = self._directory / f"__{self._rank}_{number}.distcp"
                with open(path, "wb") as stream:
                    results += [_write_slice(stream, path.name, item, planner) for item in items]
                finisher.add(path)
                self._progress()
            self.records = finisher.records(self._progress)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _write_slice(
    stream: IO[bytes], name: str, item: WriteItem, planner: SavePlanner
) -> WriteResult:
    """Append a slice to a file. Raises the OSError that torch's zip writer hides."""
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor), f"{item.index.fqn} is no tensor"
    tensor = tensor.detach().cpu()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # torch saves the complete storage of a tensor
    start = stream.tell()
    try:
        torch.save(tensor, stream)
    except RuntimeError as error:
        # The context is lost on the way to the other ranks: raise the cause directly.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    length = stream.tell() - start
    return WriteResult(item.index, length, _StorageInfo(name, start, length))


class _Finisher:
    """Pair of threads: one hashes written files, the other syncs them.

    A process whose disk hangs can exit: Python waits for an executor's threads, but not for these.
    """

    def __init__(self) -> None:
        self._hashing, self._syncing = _Worker("checkpoint-hash"), _Worker("checkpoint-sync")
        self._files: dict[str, tuple[futures.Future[FileRecord], futures.Future[None]]] = {}

    def add(self, path: Path) -> None:
        """Start to hash and sync a file, which must not change any more."""
        self._files[path.name] = (
            self._hashing.submit(FileRecord.of, path),
            self._syncing.submit(sync_file, path),
        )

    def records(self, progress: Callable[[], None]) -> dict[str, FileRecord]:
        """Wait for all files and return their records, by name.

        Raises OSError, also for an earlier write that failed.
        """
        records = {}
        for name, (record, synced) in self._files.items():
            records[name] = record.result()
            synced.result()
            progress()
        return records

    def __enter__(self) -> "_Finisher":
        return self

    def __exit__(self, *exception: object) -> None:
        for each in (future for pair in self._files.values() for future in pair):
            each.cancel()
        for worker in (self._hashing, self._syncing):
            worker.join()


class _Worker:
    """Daemon thread that calls functions with paths, one after the other."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[Path], T], path: Path) -> futures.Future[T]:
        """Call `function` later; return its result as a future."""
        future: futures.Future[T] = futures.Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(path))
                except BaseException as error:
                    future.set_exception(error)

        self._calls.put(call)
        return future

    def join(self) -> None:
        """Wait until all calls that are not cancelled have ended, and end the thread."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def sync_file(path: Path) -> None:
    """Flush a file to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def divided(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Divide slices into files, largest slices first.

    The last file is then small and leaves little to hash and sync.
    """
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


def _write_state(staging: Path, state: str) -> dict[str, FileRecord]:
    """Write and sync the state; return the records of the state and metadata files."""
    with workspace_errors(staging):
        with open(staging / STATE_NAME, "w", encoding="utf-8") as file:
            file.write(state)
            file.flush()
            os.fsync(file.fileno())
        sync_file(staging / METADATA_NAME)  # torch syncs it before its buffer is written
        return {name: FileRecord.of(staging / name) for name in (METADATA_NAME, STATE_NAME)}


def _publish(staging: Path, root: Path, marker: Marker) -> Path:
    """Write the marker, rename the directory, and update the tracker."""
    unmarked = {path.name for path in staging.iterdir()} - set(marker.files)
    if unmarked:
        raise CheckpointError(
            f"{staging} holds files that no rank wrote: {', '.join(sorted(unmarked))}"
        )
    target = root / directory_name(marker.iteration)
    with workspace_errors(staging):
        sync_directory(staging)
        marker.write(staging)
        publish(staging, target)
    write_tracker(root, marker.iteration)
    return target
