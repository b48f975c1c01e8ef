"""Where an iteration's time goes: phases, of which those named `… wait` are communication that nothing hides."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

WAIT = " wait"
"""How the name of a phase ends in which a rank waits for others; such phases lie within other ones."""


def exposed_communication(milliseconds: Mapping[str, float]) -> float:
    """Milliseconds of waiting for other ranks."""
    return sum(value for phase, value in milliseconds.items() if phase.endswith(WAIT))


class Timers:
    """Accumulates milliseconds by phase, on a GPU by its own clock, so that nothing waits for it in between."""

    def __init__(self, device: torch.device) -> None:
        """Measure what runs on `device`."""
        self._events = device.type == "cuda"
        self._running = True
        self._milliseconds: dict[str, float] = {}
        self._pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time of the body to `phase`."""
        if not self._running:
            yield
        elif self._events:
            begin, end = _event(), _event()
            begin.record()
            yield
            end.record()
            self._pending.append((phase, begin, end))
        else:
            start = time.perf_counter()
            yield
            self._add(phase, (time.perf_counter() - start) * 1000.0)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the body's phases out."""
        self._running = False
        try:
            yield
        finally:
            self._running = True

    def take(self, iterations: int) -> dict[str, float]:
        """Milliseconds per iteration by phase since the last call, and start anew."""
        for phase, begin, end in self._pending:
            end.synchronize()
            self._add(phase, begin.elapsed_time(end))
        means = {phase: total / max(iterations, 1) for phase, total in self._milliseconds.items()}
        self._pending.clear()
        self._milliseconds.clear()
        return means

    def _add(self, phase: str, milliseconds: float) -> None:
        self._milliseconds[phase] = self._milliseconds.get(phase, 0.0) + milliseconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
