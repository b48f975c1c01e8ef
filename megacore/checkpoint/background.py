"""Background saving: training goes on while the tensors are copied to host memory and written.

Only an update of the weights waits for the copy. Each rank copies and writes its share of the
rectangles of all tensors.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.checkpoint.collective import RankGroup
from megacore.checkpoint.format import Marker
from megacore.checkpoint.retain import apply_retention
from megacore.checkpoint.shard import Tensors, TensorShard, pieces_of
from megacore.errors import CheckpointError

Key = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Rectangle of a tensor: global name, position of its first element, shape."""

_ALIGNMENT = 64
_LARGE = 1 << 15
"""Number of elements above which torch copies with all threads, which takes longer for starting
them than for copying."""
_CHUNK = 16 << 20
_THREADS = 4
"""Maximum number of copying threads, which share the memory bandwidth."""


class Shares:
    """Division of the rectangles among the ranks.

    It is repeated only if some rank's tensors change form.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self.total_bytes = 0
        """Bytes of all ranks, each rectangle counted once."""
        self._ranks = ranks
        self._form: list[tuple[Key, torch.dtype, str]] | None = None
        self._own: frozenset[Key] = frozenset()

    def differ(self, tensors: Tensors) -> bool:
        """Return True if this rank's tensors have changed form since the last `decide`."""
        return memory_form(rectangles_of(tensors)) != self._form

    def decide(self, tensors: Tensors) -> None:
        """Divide the rectangles among the ranks. Collective."""
        pieces = rectangles_of(tensors)
        local_sizes = {key: piece.nbytes for key, piece in pieces.items()}
        all_sizes = self._ranks.everywhere(lambda: local_sizes)
        self._own = divide_rectangles(all_sizes)[self._ranks.rank]
        self._form = memory_form(pieces)
        self.total_bytes = sum(
            {key: size for sizes in all_sizes for key, size in sizes.items()}.values()
        )

    def own(self, tensors: Tensors) -> dict[str, Tensor | TensorShard]:
        """Return the tensors, and those of their rectangles, that this rank writes."""
        selected: dict[str, Tensor | TensorShard] = {}
        for name, tensor in tensors.items():
            pieces = {
                at: piece
                for at, piece in pieces_of(tensor).items()
                if _key(name, at, piece) in self._own
            }
            if pieces:
                selected[name] = _with_pieces(tensor, pieces)
        return selected


def rectangles_of(tensors: Tensors) -> dict[Key, Tensor]:
    """Return every rectangle on this rank."""
    return {
        _key(name, offsets, piece): piece
        for name, tensor in tensors.items()
        for offsets, piece in pieces_of(tensor).items()
    }


def memory_form(pieces: Mapping[Key, Tensor]) -> list[tuple[Key, torch.dtype, str]]:
    """Return the properties of `pieces` that determine the memory for a copy."""
    return [(key, piece.dtype, piece.device.type) for key, piece in pieces.items()]


def _key(name: str, offsets: torch.Size, piece: Tensor) -> Key:
    return name, tuple(offsets), tuple(piece.shape)


def _with_pieces(
    tensor: Tensor | TensorShard, pieces: dict[torch.Size, Tensor]
) -> Tensor | TensorShard:
    """Return the same tensor with other pieces."""
    if isinstance(tensor, TensorShard):
        return TensorShard(tensor.shape, tensor.dtype, pieces)
    (piece,) = pieces.values()
    return piece


def divide_rectangles(sizes_by_rank: Sequence[Mapping[Key, int]]) -> list[frozenset[Key]]:
    """Return the rectangles that each rank writes, with bytes divided evenly.

    Args:
        sizes_by_rank: bytes of each rectangle on each rank.
    """
    holders: dict[Key, list[int]] = {}
    sizes: dict[Key, int] = {}
    for rank, pieces in enumerate(sizes_by_rank):
        for key, size in pieces.items():
            holders.setdefault(key, []).append(rank)
            sizes[key] = size
    load = [0] * len(sizes_by_rank)
    assigned: list[set[Key]] = [set() for _ in sizes_by_rank]
    # Rectangles that only one rank has come first, then the largest; small ones even out the load.
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key], key)):
        rank = min(holders[key], key=lambda rank: (load[rank], rank))
        load[rank] += sizes[key]
        assigned[rank].add(key)
    return [frozenset(keys) for keys in assigned]


class HostBuffers:
    """Host memory for one rank's share, reused while the tensors keep their form.

    It is one block, page-locked if a tensor is on a CUDA device, so that copies from there run
    asynchronously.
    """

    def __init__(self) -> None:
        self._form: list[tuple[Key, torch.dtype, str]] = []
        self._buffers: dict[Key, Tensor] = {}
        self.device: torch.device | None = None
        """GPU that has tensors of the share, if any."""
        self._pinned: int | None = None
        self._stream: torch.cuda.Stream | None = None
        """Stream of the copies from the GPU, which run while it computes."""

    def copy(
        self, tensors: Tensors, after: torch.cuda.Event | None = None
    ) -> dict[str, Tensor | TensorShard]:
        """Copy the tensors into host memory; the copies are valid until the next call.

        Args:
            tensors: tensors that nobody changes before the return.
            after: event of a GPU at which they have their values; None means that the caller's
                current stream computes them.

        Raises CheckpointError if there is not enough memory.
        """
        self.fit(tensors)
        if self._stream is not None:
            self._stream.wait_event(after or torch.cuda.current_stream(self.device).record_event())
        pieces = rectangles_of(tensors)
        _copy([(self._buffers[key], piece.detach()) for key, piece in pieces.items()], self._stream)
        return {
            name: _with_pieces(
                tensor,
                {
                    at: self._buffers[_key(name, at, piece)]
                    for at, piece in pieces_of(tensor).items()
                },
            )
            for name, tensor in tensors.items()
        }

    def fit(self, tensors: Tensors) -> None:
        """Allocate memory for tensors of this form, unless it exists.

        Raises CheckpointError if there is not enough memory.
        """
        pieces = rectangles_of(tensors)
        form = memory_form(pieces)
        if form != self._form:
            self.free()
            self._allocate(pieces)
            self._form = form

    def free(self) -> None:
        """Release the memory; the copies must not be in use any more."""
        if self._pinned is not None:
            _cuda_runtime().cudaHostUnregister(self._pinned)
        self._pinned, self._form, self._buffers = None, [], {}
        self.device, self._stream = None, None

    def _allocate(self, pieces: Mapping[Key, Tensor]) -> None:
        """Allocate a separate storage for each tensor, since torch saves complete storages."""
        size = sum(_aligned(piece.nbytes) for piece in pieces.values())
        try:
            memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise CheckpointError(_too_little(size, error.strerror or str(error))) from error
        device = next((piece.device for piece in pieces.values() if piece.is_cuda), None)
        if device is not None:
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            code = int(_cuda_runtime().cudaHostRegister(address, len(memory), 0))
            if code != 0:
                raise CheckpointError(
                    _too_little(size, f"CUDA error {code} while its pages were locked")
                )
            self._pinned, self.device = address, device
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        position = 0
        for key, piece in pieces.items():
            if piece.numel() == 0:
                self._buffers[key] = torch.empty(piece.shape, dtype=piece.dtype)
                continue
            flat = torch.frombuffer(memory, dtype=piece.dtype, count=piece.numel(), offset=position)
            self._buffers[key] = flat.view(piece.shape)
            position += _aligned(piece.nbytes)


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _too_little(size: int, reason: str) -> str:
    return (
        f"there is no host memory for {size / 2**20:,.0f} MiB of this rank's share of a "
        f"checkpoint ({reason}): set checkpoint.asynchronous to false"
    )


def _copy(pairs: Sequence[tuple[Tensor, Tensor]], stream: torch.cuda.Stream | None) -> None:
    """Fill the first of each pair from the second, and wait until it is done.

    Copies from a GPU run on `stream`.
    """
    large: list[tuple[Tensor, Tensor]] = []
    others: list[tuple[Tensor, Tensor]] = []
    for target, source in pairs:
        is_large = (
            source.device.type == "cpu" and source.is_contiguous() and source.numel() >= _LARGE
        )
        (large if is_large else others).append((target, source))
    # Copies from a GPU run while the large tensors are copied here.
    with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
        for target, source in others:
            target.copy_(source, non_blocking=True)
    _copy_memory(large)
    if stream is not None:
        stream.synchronize()


def _copy_memory(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy bytes on a few threads; unlike torch, the C library bypasses the caches."""
    chunks = [
        (target.data_ptr() + first, source.data_ptr() + first, min(_CHUNK, source.nbytes - first))
        for target, source in pairs
        for first in range(0, source.nbytes, _CHUNK)
    ]

    def move(part: list[tuple[int, int, int]]) -> None:
        for target, source, count in part:
            ctypes.memmove(target, source, count)

    threads = min(_THREADS, torch.get_num_threads(), len(chunks))
    if threads <= 1:
        move(chunks)
        return
    with ThreadPoolExecutor(threads, "checkpoint-copy") as pool:
        for _ in pool.map(move, [chunks[number::threads] for number in range(threads)]):
            pass


_WRITER = "megacore.checkpoint.save"
"""Module that imports torch's writer of checkpoints, which takes as long as half of `import torch`.
"""
_POLL = 0.5
"""Seconds between two checks of a save during a wait."""
_PATIENCE = 60.0
"""Seconds without progress after which `close` abandons a save."""
_TIMEOUT = timedelta(hours=6)
"""Longest wait for a rank with a slower disk; the connection to a dead rank breaks at once."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveFinished:
    """Complete checkpoint."""

    path: Path
    """Path of the checkpoint."""
    marker: Marker
    """Marker of the checkpoint."""
    seconds: float
    """Time from the start of `save` until the checkpoint was visible."""
    stall_seconds: float
    """Part of `seconds` during which training waited: for the previous save, for the other ranks,
    and, before the next update, for the copy."""
    deleted: list[Path]
    """Checkpoints deleted by the retention rules, oldest first."""


@dataclass
class _RunningSave:
    """Save in progress."""

    iteration: int
    began: float
    stall_seconds: float = 0.0
    thread: threading.Thread | None = None
    copied: threading.Event = field(default_factory=threading.Event)
    """Set when the tensors are copied, or the save has failed."""
    waiting_since: float | None = None
    """Time at which training began to wait for `copied`."""
    staging: Path | None = None
    steps: int = 0
    """Number of files written and of file parts received."""
    finished: SaveFinished | None = None
    failure: BaseException | None = field(default=None, repr=False)


class CheckpointSaver:
    """Saver of one run's checkpoints, one at a time; all ranks make the same calls in order.

    Tensors that several ranks hold are copied and written by one of them. The writing, its
    collectives and the retention run in a thread with a separate process group.
    """

    def __init__(
        self,
        root: Path,
        *,
        asynchronous: bool,
        keep_last: int,
        keep_every: int | None = None,
        keep_best: bool = True,
        beat: Callable[[str], None] = lambda phase: None,
    ) -> None:
        """Create the process group. Collective.

        Args:
            root: directory of the run's checkpoints.
            asynchronous: True if `save` returns before the tensors are copied, False if it returns
                when the checkpoint is complete.
            keep_last: see `apply_retention`.
            keep_every: see `apply_retention`.
            keep_best: see `apply_retention`.
            beat: callback in the caller's thread for progress of a save that it waits for.
        """
        group = None
        if dist.is_available() and dist.is_initialized():
            group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        self._root = root
        self._asynchronous = asynchronous
        self._keep: dict[str, Any] = {
            "keep_last": keep_last,
            "keep_every": keep_every,
            "keep_best": keep_best,
        }
        self.losses: dict[int, float] = {}
        """Validation losses, by iteration, that were measured after the save; for the retention.
        The first rank has them."""
        self.damaged: set[Path] = set()
        """Checkpoints of the run that its resume passed over, which no retention rule keeps."""
        self._beat = beat
        self._ranks = RankGroup(group)
        self._shares = Shares(self._ranks)
        self._buffers = HostBuffers()
        self._flight: _RunningSave | None = None
        self._finished: deque[SaveFinished] = deque()
        self._writer: threading.Thread | None = None
        """Thread that imports _WRITER after the first step, which does not wait for it."""

    @property
    def failed(self) -> bool:
        """True if `wait` and `save` will raise. Ranks can send it along with other values."""
        flight = self._flight
        if flight is None:
            return False
        # Read before the result, which the thread stores last.
        ended = flight.thread is not None and not flight.thread.is_alive()
        return flight.failure is not None or (ended and flight.finished is None)

    def save(
        self,
        iteration: int,
        tensors: Tensors,
        state: Mapping[str, Any],
        *,
        validation_loss: float | None,
    ) -> None:
        """Start a checkpoint after the previous one has ended. Collective.

        The state may change after the return, the tensors after `finish_copy`.

        Args:
            iteration: number of completed optimizer steps.
            tensors: see `save_checkpoint`.
            state: see `save_checkpoint`.
            validation_loss: validation loss at this iteration, if measured.

        Raises:
            CheckpointError: `state` is not JSON, a value is not a tensor, or host memory does not
                suffice for the copy.
            MegacoreError, RuntimeError: the previous save failed, or this one if it is synchronous.
        """
        from megacore.checkpoint.save import check_types, encode_state

        began = time.monotonic()
        self._land()
        text = ""

        def look() -> bool:
            nonlocal text
            check_types(tensors)
            text = encode_state(state, iteration) if self._ranks.rank == 0 else ""
            return self._shares.differ(tensors)

        changed = any(self._ranks.everywhere(look))
        if changed:
            self._shares.decide(tensors)
        share = self._shares.own(tensors)
        flight = _RunningSave(iteration, began)
        if self._asynchronous:
            if changed:
                self._fit(share)
            device = self._buffers.device
            computed = device and torch.cuda.current_stream(device).record_event()
            flight.thread = threading.Thread(
                target=self._run,
                args=(flight, share, text, validation_loss, computed),
                name="checkpoint-save",
                daemon=True,
            )
            self._flight = flight
            flight.stall_seconds = time.monotonic() - began
            try:
                flight.thread.start()
            except RuntimeError as error:  # raised by all ranks through `failed`, not only here
                flight.thread = None
                flight.copied.set()
                flight.failure = CheckpointError(
                    f"the thread that saves the checkpoint of iteration {iteration} cannot start "
                    f"({error}): raise the limit on processes (`ulimit -u`, or that of the "
                    "container), or set checkpoint.asynchronous to false"
                )
        else:
            self._flight = flight
            self._run(flight, share, text, validation_loss, None)
            self._land()

    def finish_copy(self) -> None:
        """Wait until the tensors of the last save may change."""
        flight = self._flight
        if flight is None or flight.copied.is_set():
            return
        device = self._buffers.device
        if device is not None:  # what the GPU computes during the copy is no waiting
            torch.cuda.current_stream(device).synchronize()
        flight.waiting_since = time.monotonic()
        flight.copied.wait()

    def poll(self) -> SaveFinished | None:
        """Return the oldest finished save that was not returned before, or None.

        Never raises, because ranks poll at different times. `wait` or the next `save` raises the
        error of a save.
        """
        if self._writer is None:
            self._writer = threading.Thread(
                target=import_module, args=(_WRITER,), name="checkpoint-import", daemon=True
            )
            with contextlib.suppress(RuntimeError):  # the save imports it, or reports the limit
                self._writer.start()
        if self._flight is not None and self._flight.finished is not None:
            self._land()
        return self._finished.popleft() if self._finished else None

    def wait(self) -> SaveFinished | None:
        """Wait until no save is in progress, then poll. Raises the error of the save."""
        self._land()
        return self._finished.popleft() if self._finished else None

    @property
    def saving(self) -> bool:
        """True while this rank takes part in a save in the background."""
        return self._flight is not None and _alive(self._flight)

    def progress(self) -> tuple[int, int] | None:
        """Return the bytes that all ranks have written, and the total.

        Return None on other ranks than the first, and if no save is in progress.
        """
        flight = self._flight
        if self._ranks.rank != 0 or flight is None or not _alive(flight):
            return None
        total = self._shares.total_bytes
        # Archives around the tensors make the files slightly larger than the tensors.
        return min(sum(_sizes(flight.staging)), total), total

    def close(self) -> None:
        """Wait for a save while it makes progress, then release everything. Raises nothing."""
        flight, self._flight = self._flight, None
        if flight is not None and not self._join(flight, patience=_PATIENCE):
            _logger.warning(
                "the checkpoint of iteration %d made no progress and is abandoned", flight.iteration
            )
            return
        if flight is not None and flight.failure is not None:
            _logger.warning(
                "the checkpoint of iteration %d was not saved: %s", flight.iteration, flight.failure
            )
        self._buffers.free()
        if self._ranks.group is not None and dist.is_initialized():
            dist.destroy_process_group(self._ranks.group)
            self._ranks.group = None

    def retain(self, in_use: Path) -> list[Path]:
        """Delete the checkpoints that the retention rules do not keep, on one rank."""
        self.damaged.discard(in_use)  # saved again at the same iteration
        return apply_retention(
            self._root, in_use=in_use, losses=self.losses, damaged=self.damaged, **self._keep
        )

    def _fit(self, share: Tensors) -> None:
        """Allocate host memory; a failure on one rank is raised on all. Collective."""
        try:
            self._ranks.everywhere(lambda: self._buffers.fit(share))
        except BaseException:
            self._shares = Shares(self._ranks)  # the next save decides and allocates again
            raise

    def _land(self) -> None:
        """Wait for the save in progress and raise its error."""
        flight = self._flight
        if flight is None:
            return
        self._join(flight, patience=None)
        self._flight = None
        if flight.failure is not None:
            raise flight.failure
        if flight.finished is None:
            raise CheckpointError(
                f"the thread that saves the checkpoint of iteration {flight.iteration} ended "
                "without a result or an error: resume from the checkpoint before it"
            )
        self._finished.append(flight.finished)

    def _join(self, flight: _RunningSave, *, patience: float | None) -> bool:
        """Wait until a save ends (True) or makes no progress for `patience` seconds (False)."""
        previous, changed_at = (_sizes(flight.staging), flight.steps), time.monotonic()
        while flight.thread is not None:
            flight.thread.join(_POLL)
            if not flight.thread.is_alive():
                break
            current = _sizes(flight.staging), flight.steps
            if current != previous:
                self._beat("wait for save")
                previous, changed_at = current, time.monotonic()
            if patience is not None and time.monotonic() > changed_at + patience:
                return False
        return True

    def _run(
        self,
        flight: _RunningSave,
        tensors: Tensors,
        state: str,
        validation_loss: float | None,
        computed: torch.cuda.Event | None,
    ) -> None:
        """Copy, write the checkpoint and apply retention; store the result or error in `flight`.

        A GPU has computed the tensors at the event `computed`.
        """

        def staged(path: Path) -> None:
            flight.staging = path

        def progress() -> None:
            flight.steps += 1
            if not self._asynchronous:
                self._beat("save")

        try:
            if self._asynchronous:
                tensors = self._buffers.copy(tensors, computed)
                flight.copied.set()
                if flight.waiting_since is not None:
                    flight.stall_seconds += time.monotonic() - flight.waiting_since
            from megacore.checkpoint.save import write_checkpoint

            path, marker = write_checkpoint(
                self._root,
                flight.iteration,
                tensors,
                state,
                self._ranks,
                validation_loss=validation_loss,
                staged=staged,
                progress=progress,
            )
            seconds = time.monotonic() - flight.began
            deleted = self._ranks.on_first(lambda: self.retain(path))
            stall = flight.stall_seconds if self._asynchronous else seconds
            flight.finished = SaveFinished(path, marker, seconds, stall, deleted)
        except BaseException as error:
            flight.failure = error
        finally:
            flight.copied.set()


def _alive(flight: _RunningSave) -> bool:
    return flight.thread is not None and flight.thread.is_alive()


def _sizes(staging: Path | None) -> list[int]:
    """Return the bytes of each file in a directory that may vanish at any time."""
    sizes: list[int] = []
    if staging is not None:
        # On NFS a vanished file is a stale handle, and a busy server may time out.
        with contextlib.suppress(OSError), os.scandir(staging) as entries:
            sizes.extend(entry.stat().st_size for entry in entries)
    return sizes
