"""Ending a training early, with a checkpoint: signals, time, intervals, a file."""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, Protocol

from megacore.artifact.files import workspace_errors
from megacore.artifact.workspace import STOP_FILE
from megacore.errors import PreemptedError, TrainingStoppedError

StopReason = Literal["signal", "exit_duration", "stop_file", "exit_interval"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What asks a rank to save and end: a launcher or a scheduler that stops the job, and Slurm's early
warning."""
_NOTICES: tuple[StopReason, ...] = ("signal", "exit_duration", "stop_file")
"""What one rank knows and the others do not, in the order of their precedence."""
_LOOK_INTERVAL = 1.0
"""Seconds between two looks for the stop file, which may lie on a slow file system."""


class Limits(Protocol):
    """What a run's configuration says of its end."""

    @property
    def train_iters(self) -> int:
        """Iterations of the whole run."""

    @property
    def exit_duration_minutes(self) -> float | None:
        """Minutes after whose end it stops; None means never."""

    @property
    def exit_interval(self) -> int | None:
        """Iterations at whose multiples it stops; None means never."""


@dataclass(frozen=True)
class StopLimits:
    """`Limits` of a run whose configuration has other names for them."""

    train_iters: int
    exit_duration_minutes: float | None = None
    exit_interval: int | None = None


class StopRequest:
    """Why this run is to end early, agreed upon by all ranks in each iteration."""

    def __init__(
        self, config: Limits, run_directory: Path, *, rank: int, started: float | None = None
    ) -> None:
        """Nothing is asked for yet.

        Args:
            config: the limits.
            run_directory: where the stop file may appear.
            rank: the first one watches the clock and the file.
            started: time.monotonic() when this attempt began; None means now.
        """
        self.file = run_directory / STOP_FILE
        self.signal: signal.Signals | None = None
        """The first signal that this rank got."""
        self._config = config
        self._watches = rank == 0
        self._started = time.monotonic() if started is None else started
        self._looked = float("-inf")
        self._file_seen = False

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Take note of `SIGNALS` within the block instead of ending at once.

        Only a main thread can.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._take_note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take_note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)

    def notices(self) -> tuple[bool, ...]:
        """What this rank has to tell the others, for `Engine.update`."""
        return (self.signal is not None, self._is_late(), self._sees_the_file())

    def reason(self, notices: Sequence[bool], iteration: int) -> StopReason | None:
        """Why all ranks stop after `iteration`, the same on each.

        `notices` are what all of them said together.
        """
        told = [reason for reason, given in zip(_NOTICES, notices, strict=False) if given]
        if told:
            return told[0]
        interval = self._config.exit_interval
        return "exit_interval" if interval is not None and iteration % interval == 0 else None

    def error(self, reason: StopReason, iteration: int, checkpoint: Path) -> TrainingStoppedError:
        """The run's end as an exception, its message saying how to go on."""
        limit = self._config.exit_duration_minutes
        why: dict[StopReason, str] = {
            "signal": (
                "a signal asked for it "
                f"({self.signal.name if self.signal else 'another rank got it'})"
            ),
            "exit_duration": f"train.exit_duration_minutes ({limit:g}) is over"
            if limit is not None
            else "",
            "stop_file": f"{self.file} was there (it is removed now)",
            "exit_interval": f"train.exit_interval is {self._config.exit_interval}",
        }
        kind = PreemptedError if reason == "signal" else TrainingStoppedError
        return kind(
            f"training stopped at iteration {iteration} of {self._config.train_iters} since "
            f"{why[reason]}: {checkpoint} is complete, and the same command goes on from there"
        )

    def take_away_file(self) -> None:
        """Remove the stop file, on the rank that watches it: the next attempt is to go on.

        Raises WorkspaceError.
        """
        if self._watches:
            with workspace_errors(self.file):
                self.file.unlink(missing_ok=True)

    def _is_late(self) -> bool:
        limit = self._config.exit_duration_minutes
        return (
            self._watches and limit is not None and time.monotonic() - self._started >= 60.0 * limit
        )

    def _sees_the_file(self) -> bool:
        now = time.monotonic()
        if self._watches and not self._file_seen and now - self._looked >= _LOOK_INTERVAL:
            self._looked = now
            self._file_seen = self.file.exists()
        return self._file_seen
