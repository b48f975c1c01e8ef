"""Time of an iteration by phase.

Phases with names that end in " wait" are communication that is not overlapped with computation.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from megacore.observe.heartbeat import WAIT, Heartbeat


class SetupTimes(dict[str, float]):
    """Milliseconds of each part of the set-up of this rank, by Megatron-LM's names."""

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Record the duration of the block as that of `part`."""
        start = time.perf_counter()
        yield
        self[part] = (time.perf_counter() - start) * 1000.0


def exposed_communication(milliseconds: Mapping[str, float]) -> float:
    """Return the milliseconds spent waiting for other ranks."""
    return sum(value for phase, value in milliseconds.items() if phase.endswith(WAIT))


class Timers:
    """Accumulator of milliseconds by phase.

    On a GPU it records CUDA events, so that timing does not wait for the device.
    """

    def __init__(self, device: torch.device, heartbeat: Heartbeat | None = None) -> None:
        """Measure phases on `device` and record each in `heartbeat`, even while paused."""
        self._events = device.type == "cuda"
        self._heartbeat = heartbeat
        self._running = True
        self._milliseconds: dict[str, float] = {}
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []
        """Events that may be recorded again; creating them takes host time."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the duration of the block to `phase`."""
        if self._heartbeat is None:
            with self._timed(phase):
                yield
            return
        outer = self._heartbeat.phase
        self._heartbeat.beat(phase)
        try:
            with self._timed(phase):
                yield
        finally:
            self._heartbeat.leave_phase(outer)

    def beat(self, phase: str, iteration: int | None = None) -> None:
        """Record a phase in the heartbeat, if there is one, without measuring it."""
        if self._heartbeat is not None:
            self._heartbeat.beat(phase, iteration)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        if not self._running:
            yield
        elif self._events:
            begin, end = self._event(), self._event()
            begin.record()
            yield
            end.record()
            self._pending.append((phase, begin, end))
            self._read_passed()
        else:
            start = time.perf_counter()
            yield
            self._add(phase, (time.perf_counter() - start) * 1000.0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the phases of the block from the measurement; such blocks may be nested."""
        outer, self._running = self._running, False
        try:
            yield
        finally:
            self._running = outer

    def take(self, iterations: int) -> dict[str, float]:
        """Return the milliseconds per iteration by phase since the last call, and reset them."""
        while self._pending:
            self._pending[0][2].synchronize()
            self._read_first()
        means = {phase: total / max(iterations, 1) for phase, total in self._milliseconds.items()}
        self._milliseconds.clear()
        return means

    def _add(self, phase: str, milliseconds: float) -> None:
        self._milliseconds[phase] = self._milliseconds.get(phase, 0.0) + milliseconds

    def _read_passed(self) -> None:
        """Read the events that the GPU has passed, so that their number stays bounded."""
        while self._pending and self._pending[0][2].query():  # type: ignore[no-untyped-call]
            self._read_first()

    def _read_first(self) -> None:
        phase, begin, end = self._pending.popleft()
        self._add(phase, begin.elapsed_time(end))
        self._free += (begin, end)

    def _event(self) -> torch.cuda.Event:
        if self._free:
            return self._free.pop()
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
