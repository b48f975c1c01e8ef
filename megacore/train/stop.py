"""Early end of a training, with a checkpoint: signals, time limit, interval, stop file."""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from megacore.artifact.files import workspace_errors
from megacore.artifact.workspace import STOP_FILE
from megacore.config.train import TrainConfig
from megacore.errors import PreemptedError, TrainingStoppedError
from megacore.paths import exists

StopReason = Literal["signal", "exit_duration", "stop_file", "exit_interval"]

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a rank to save and exit: from a launcher or scheduler that stops the job, and
Slurm's early warning."""
_NOTICES: tuple[StopReason, ...] = ("signal", "exit_duration", "stop_file")
"""Reasons that only one rank knows, in order of precedence."""
_LOOK_INTERVAL = 1.0
"""Seconds between two checks for the stop file, which may be on a slow file system."""


@dataclass(frozen=True)
class StopLimits:
    """Limits of a run whose configuration has other names for them than `TrainConfig`."""

    train_iters: int
    exit_duration_minutes: float | None = None
    exit_interval: int | None = None


class StopRequest:
    """Request to end this run early, agreed upon by all ranks in each iteration.

    Signals are also agreed upon within evaluations.
    """

    def __init__(
        self,
        config: TrainConfig | StopLimits,
        run_directory: Path,
        *,
        rank: int,
        started: float | None = None,
    ) -> None:
        """Create the request; no stop is requested yet.

        Args:
            config: limits of the run.
            run_directory: directory in which the stop file may appear.
            rank: rank of this process; the first one watches the clock and the stop file.
            started: time.monotonic() at the start of this attempt; None means now.
        """
        self.file = run_directory / STOP_FILE
        self.signal: signal.Signals | None = None
        """First signal that this rank received."""
        self._config = config
        self._watches = rank == 0
        self._started = time.monotonic() if started is None else started
        self._looked = float("-inf")
        self._file_seen = False

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Record `SIGNALS` within the block instead of exiting at once.

        Has an effect only in the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous_handlers = {
            number: signal.signal(number, self._record_signal) for number in SIGNALS
        }
        try:
            yield
        finally:
            for number, handler in previous_handlers.items():
                # None: one of C code, such as a preloaded profiler, which Python cannot restore
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)

    def notices(self) -> tuple[bool, ...]:
        """Return this rank's notices for the other ranks, to be passed to `Engine.update`."""
        return (self.signal is not None, self._is_late(), self._sees_the_file())

    def reason(self, notices: Sequence[bool], iteration: int) -> StopReason | None:
        """Return the reason why all ranks stop after `iteration`, or None; identical on all ranks.

        `notices` are the combined notices of all ranks.
        """
        reasons = [reason for reason, notice in zip(_NOTICES, notices, strict=False) if notice]
        if reasons:
            return reasons[0]
        interval = self._config.exit_interval
        return "exit_interval" if interval is not None and iteration % interval == 0 else None

    def error(self, reason: StopReason, iteration: int, checkpoint: Path) -> TrainingStoppedError:
        """Return the exception for the end of the run; its message says how to resume."""
        limit = self._config.exit_duration_minutes
        causes: dict[StopReason, str] = {
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
            f"{causes[reason]}: {checkpoint} is complete, and the same command resumes from there"
        )

    def remove_stop_file(self) -> None:
        """Remove the stop file, on the rank that watches it, so that the next attempt can run.

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
            with suppress(OSError):  # a lost mount is no request: the next check decides
                self._file_seen = exists(self.file)
        return self._file_seen
