"""Saving beside the training, which waits for a copy in host memory alone."""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megacore.checkpoint.collective import RankGroup
from megacore.checkpoint.format import Marker
from megacore.checkpoint.retain import apply_retention
from megacore.checkpoint.save import check_types, encode_state, write_checkpoint
from megacore.checkpoint.shard import Tensors, TensorShard, pieces_of
from megacore.checkpoint.staging import HostBuffers, Shares

_POLL = 0.5
"""Seconds between two looks at a save that is waited for."""
_PATIENCE = 60.0
"""Seconds without progress after which `close` leaves a save to itself."""
_TIMEOUT = timedelta(hours=6)
"""Longest wait for a rank whose disk is slower; the connection to one that died breaks at once."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveStarted:
    """A save that the training need not wait for any more."""

    iteration: int
    """Optimizer steps done."""
    stall_seconds: float
    """That the training waited: for the save before, for the other ranks, and for the copy."""
    size_bytes: int
    """What this rank writes of the tensors."""


@dataclass(frozen=True)
class SaveFinished:
    """A checkpoint that is complete."""

    path: Path
    """Where it lies."""
    marker: Marker
    """What it is."""
    seconds: float
    """From the beginning of `save` until it was visible."""
    stall_seconds: float
    """Those of them that the training waited."""
    deleted: list[Path]
    """Checkpoints that no rule keeps any more, oldest first."""


@dataclass
class _Flight:
    """A save that is under way."""

    iteration: int
    began: float
    stall_seconds: float = 0.0
    thread: threading.Thread | None = None
    staging: Path | None = None
    steps: int = 0
    """Files written and parts of files brought."""
    finished: SaveFinished | None = None
    failure: BaseException | None = field(default=None, repr=False)


class CheckpointSaver:
    """A saver of one run's checkpoints, one at a time; all ranks make the same calls in order.

    What several ranks hold alike is copied and written by one of them. The writing, its collectives
    and the retention run in a thread over a process group of their own.
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
        """Make the process group. Collective.

        Args:
            root: directory of the run's checkpoints.
            asynchronous: whether `save` returns once the tensors are copied, else when the
                checkpoint is complete.
            keep_last: as for `apply_retention`.
            keep_every: likewise.
            keep_best: likewise.
            beat: called from the thread of the caller when a save that it waits for has come
                further.
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
        self._beat = beat
        self._ranks = RankGroup(group)
        self._shares = Shares(self._ranks)
        self._buffers = HostBuffers()
        self._flight: _Flight | None = None
        self._finished: deque[SaveFinished] = deque()

    @property
    def failed(self) -> bool:
        """Whether `wait` and `save` raise: ranks may agree on it in an exchange that exists."""
        flight = self._flight
        return flight is not None and flight.failure is not None

    def save(
        self,
        iteration: int,
        tensors: Tensors,
        state: Mapping[str, Any],
        *,
        validation_loss: float | None,
    ) -> SaveStarted:
        """Begin a checkpoint after the one before has ended. Collective.

        What is passed may change once this returns.

        Args:
            iteration: optimizer steps done.
            tensors: as for `save_checkpoint`.
            state: likewise.
            validation_loss: at this iteration, if it was measured.

        Raises:
            CheckpointError: `state` is not JSON, a value is no tensor, or there is no host memory
                for the copy.
            MegacoreError, RuntimeError: what the save before, or this one if it is synchronous,
                raised.
        """
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
        own = self._shares.own(tensors)
        flight = _Flight(iteration, began)
        if self._asynchronous:
            if changed:
                self._fit(own)
            own = self._buffers.copy(own)
            flight.thread = threading.Thread(
                target=self._run,
                args=(flight, own, text, validation_loss),
                name="checkpoint-save",
                daemon=True,
            )
            self._flight = flight
            flight.stall_seconds = time.monotonic() - began
            flight.thread.start()
        else:
            self._flight = flight
            self._run(flight, own, text, validation_loss)
            self._land()
        size = sum(_bytes(tensor) for tensor in own.values())
        return SaveStarted(iteration, time.monotonic() - began, size)

    def poll(self) -> SaveFinished | None:
        """Return the oldest save that ended well and was not returned before, or None.

        Never raises: ranks look at different moments. What a save raised comes from `wait` or the
        next `save`.
        """
        if self._flight is not None and self._flight.finished is not None:
            self._land()
        return self._finished.popleft() if self._finished else None

    def wait(self) -> SaveFinished | None:
        """Wait until nothing is in flight, then poll. Raises what the save raised."""
        self._land()
        return self._finished.popleft() if self._finished else None

    def progress(self) -> tuple[int, int] | None:
        """Return, on the first rank during a save, the bytes written by all ranks, and to write."""
        flight = self._flight
        if self._ranks.rank != 0 or flight is None or not _alive(flight):
            return None
        total = self._shares.total_bytes
        # Archives around the tensors make the files a little larger than the tensors.
        return min(sum(_sizes(flight.staging)), total), total

    def close(self) -> None:
        """Wait for a save while it makes progress, and give everything back. Raises nothing."""
        flight, self._flight = self._flight, None
        if flight is not None and not self._join(flight, patience=_PATIENCE):
            _logger.warning(
                "the checkpoint of iteration %d did not come further and is left", flight.iteration
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

    def _fit(self, own: Tensors) -> None:
        """Allocate host memory; a failure on one rank is raised on all. Collective."""
        try:
            self._ranks.everywhere(lambda: self._buffers.fit(own))
        except BaseException:
            self._shares = Shares(self._ranks)  # the next save decides, and allocates, anew
            raise

    def _land(self) -> None:
        """Wait for the save in flight, and raise what it raised."""
        flight = self._flight
        if flight is None:
            return
        self._join(flight, patience=None)
        self._flight = None
        if flight.failure is not None:
            raise flight.failure
        assert flight.finished is not None, "a save ends with a result or an error"
        self._finished.append(flight.finished)

    def _join(self, flight: _Flight, *, patience: float | None) -> bool:
        """Wait until a save ends (True) or makes no progress for `patience` seconds (False)."""
        seen, since = (_sizes(flight.staging), flight.steps), time.monotonic()
        while flight.thread is not None:
            flight.thread.join(_POLL)
            if not flight.thread.is_alive():
                break
            now = _sizes(flight.staging), flight.steps
            if now != seen:
                self._beat("wait for save")
                seen, since = now, time.monotonic()
            if patience is not None and time.monotonic() > since + patience:
                return False
        return True

    def _run(
        self, flight: _Flight, tensors: Tensors, state: str, validation_loss: float | None
    ) -> None:
        """Write and retain; what happens is kept in `flight`."""

        def staged(path: Path) -> None:
            flight.staging = path

        def progress() -> None:
            flight.steps += 1
            if not self._asynchronous:
                self._beat("save")

        try:
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
            deleted = self._ranks.on_first(lambda: apply_retention(self._root, **self._keep))
            stall = flight.stall_seconds if self._asynchronous else seconds
            flight.finished = SaveFinished(path, marker, seconds, stall, deleted)
        except BaseException as error:
            flight.failure = error


def _alive(flight: _Flight) -> bool:
    return flight.thread is not None and flight.thread.is_alive()


def _bytes(tensor: Tensor | TensorShard) -> int:
    return sum(piece.nbytes for piece in pieces_of(tensor).values())


def _sizes(staging: Path | None) -> list[int]:
    """Return the bytes of each file in a directory that may vanish at any time."""
    sizes: list[int] = []
    if staging is not None:
        with contextlib.suppress(FileNotFoundError), os.scandir(staging) as entries:
            sizes.extend(entry.stat().st_size for entry in entries)
    return sizes
