"""Retries of a training: only failures in a row without a new checkpoint are limited."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from prefect import State, get_run_logger
from prefect.context import TaskRunContext
from prefect.runtime import task_run

from megacore.artifact import lock
from megacore.artifact.files import read_record, workspace_errors, write_json
from megacore.artifact.workspace import CHECKPOINTS_NAME, STOP_FILE
from megacore.checkpoint.format import MARKER_NAME, complete_checkpoints
from megacore.config.launch import LaunchConfig
from megacore.errors import (
    MegacoreError,
    PreemptedError,
    RankLostError,
    TrainingStoppedError,
    TransientFileError,
)
from tasks._cache import RetryCondition, holder_name
from tasks._flow_config import FlowConfig
from tasks._logging import CountedRetries

FAILURES_FILE = "failures.json"
"""Name of the file in the run directory that counts the failures in a row of the current task
run."""
RETRIED = (RankLostError, PreemptedError, TransientFileError)
"""Errors that a retry may fix: lost ranks, with or without their host, stalled ranks, ranks that a
signal ended, and a disk or file server that failed for a cause that may pass."""
LONGEST_DELAY = 300.0
"""Seconds that the wait before a retry grows to, such as for a host that restarts."""
_GROWING_DELAYS = 40
"""Number of retries with a wait of their own, of the 50 that Prefect takes; the last is repeated
after them."""

_LOOK_INTERVAL = 1.0
"""Seconds between two checks for the stop file during a wait."""


def retry_delays(launch: LaunchConfig) -> list[float]:
    """Return the seconds before each retry in a row, the first `launch.retry_delay`.

    Each is twice the one before it, up to LONGEST_DELAY. No number means no wait.
    """
    first = launch.retry_delay
    if first == 0:
        return []
    longest = max(first, LONGEST_DELAY)
    number = min(launch.retries, _GROWING_DELAYS)
    return [min(first * 2**doublings, longest) for doublings in range(number)]


@dataclass(frozen=True)
class Failures:
    """Failed attempts of one task run since its last new checkpoint.

    The first of them is the attempt that saved the checkpoint.
    """

    task_run: str
    count: int
    iteration: int
    """Iteration of the newest complete checkpoint after the last failure; 0 without one."""
    retry_at: float = 0.0
    """Time before which a retry does not begin, in Unix seconds; 0 without a retry."""

    @classmethod
    def read(cls, directory: Path, task_run: str) -> "Failures":
        """Read the failures of `task_run` from a run directory.

        Return zero failures if it has recorded none yet; those of other task runs do not count.
        """
        recorded = read_record(directory / FAILURES_FILE, cls)
        return (
            recorded
            if recorded is not None and recorded.task_run == task_run
            else cls(task_run, 0, 0)
        )

    def after(self, now: int, *, progress: bool) -> "Failures":
        """Return the failures with one more; `progress` if the attempt saved a new checkpoint."""
        return Failures(self.task_run, 1 if progress else self.count + 1, now)

    def write(self, directory: Path) -> None:
        """Write the failures to the run directory. Raises OSError."""
        write_json(directory / FAILURES_FILE, asdict(self))


def newest_iteration(run_directory: Path) -> int:
    """Return the iteration of the newest complete checkpoint, 0 without one."""
    markers = complete_checkpoints(run_directory / CHECKPOINTS_NAME).values()
    return max((marker.iteration for marker in markers), default=0)


def last_save(run_directory: Path) -> int:
    """Return the time of the last complete save in nanoseconds, 0 without one.

    A checkpoint that is damaged, and so passed over, may have a later iteration than a new one.
    """
    complete = complete_checkpoints(run_directory / CHECKPOINTS_NAME)
    markers = (path / MARKER_NAME for path in complete)
    return max((marker.stat().st_mtime_ns for marker in markers), default=0)


@contextmanager
def counted_failures(run_directory: Path, task_run: str, launch: LaunchConfig) -> Iterator[None]:
    """Count the failure of the attempt in the body, and log whether it is retried.

    `task_run` is the same in all attempts. Raises the error of the body; the last one states how
    many retries brought no new checkpoint.
    """
    retries = launch.retries
    before: int | None = None
    saved_before = 0
    try:
        # also turns what the operating system reports in this process into an error that counts
        with workspace_errors(run_directory):
            before, saved_before = newest_iteration(run_directory), last_save(run_directory)
            yield
    except RETRIED as error:
        try:
            now, saved = newest_iteration(run_directory), last_save(run_directory)
        except (OSError, MegacoreError):
            # an unreadable folder must not replace the error that is retried
            now, saved = before or 0, saved_before
        progress = before is not None and (now > before or saved > saved_before)
        try:
            failures = Failures.read(run_directory, task_run).after(now, progress=progress)
            delay = _delay(launch, failures.count)
            if failures.count <= retries:
                failures = replace(failures, retry_at=time.time() + delay)
            failures.write(run_directory)
        except (OSError, MegacoreError) as unwritable:
            # A failure that cannot be counted must not be retried forever: without a record, the
            # condition refuses a retry.
            with suppress(OSError):
                (run_directory / FAILURES_FILE).unlink(missing_ok=True)
            get_run_logger().warning(
                "the failure cannot be counted (%s), so it is not retried", unwritable
            )
            raise error from None
        if failures.count <= retries:
            allow_retries(1 + retries - failures.count)
            get_run_logger().warning(
                "%s: %s; retry %d of at most %d in a row without progress %s%s",
                type(error).__name__,
                error,
                failures.count,
                retries,
                _place(failures.iteration),
                f" in {delay:,g} s" if delay else "",
            )
            raise
        if retries == 0:
            raise
        raise type(error)(
            f"{error}; given up after {failures.count} attempts without progress, which is "
            f"launch.retries = {retries} and the first: the same command "
            f"{_place(failures.iteration)}"
        ) from error


@contextmanager
def attempt(
    config: FlowConfig, directory: Path, problem: Callable[[], str | None]
) -> Iterator[int | None]:
    """Hold a training's directory for the attempt in the body, and count the attempt's failure.

    Yields the descriptor of the lock, which the guard of the ranks keeps, after the wait that
    follows a failure; or None if the training is complete, because `problem()` is None.
    """
    task_run_id = str(task_run.id)
    with workspace_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    held = lock(directory, holder=holder_name(), on_wait=get_run_logger().info)
    with counted_failures(directory, task_run_id, config.launch), held as descriptor:
        if problem() is None:
            yield None
        else:
            wait_to_retry(directory, task_run_id, config.launch)
            yield descriptor


def _delay(launch: LaunchConfig, count: int) -> float:
    """Return the seconds before the next attempt after `count` failures in a row."""
    delays = retry_delays(launch)
    return delays[min(count, len(delays)) - 1] if delays else 0.0


def allow_retries(more: int) -> None:
    """Let Prefect retry the current task run `more` times from now on.

    Prefect has its number of retries from the start of the task run, without those that progress
    earns.
    """
    context = TaskRunContext.get()
    if context is not None:
        before = context.task_run.run_count - 1
        context.task.retries = CountedRetries(before + more)


def wait_to_retry(run_directory: Path, task_run: str, launch: LaunchConfig) -> None:
    """Wait until the next attempt may begin, if an attempt of this task run has failed before.

    Prefect would wait between the attempts. The wait is part of the next one, which holds the run's
    lock: the run is shown as running, and a stop can be requested.

    Raises:
        TrainingStoppedError: the stop file is there, which is removed.
    """
    failures = Failures.read(run_directory, task_run)
    if failures.count == 0:
        return
    # a clock that was set back must not make the wait longer
    left = min(failures.retry_at - time.time(), _delay(launch, failures.count))
    ends = time.monotonic() + left
    stop = run_directory / STOP_FILE
    while not os.path.exists(stop):  # False, not an error, while the mount is lost
        left = ends - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, _LOOK_INTERVAL))
    stop.unlink(missing_ok=True)
    raise TrainingStoppedError(
        f"training stopped before retry {failures.count} since {stop} was there (it is removed "
        f"now): the same command {_place(failures.iteration)}"
    )


def may_retry(directory_of: Callable[..., Path]) -> RetryCondition:
    """Return a training's retry condition: the failures recorded in the run directory decide.

    `directory_of` takes the arguments of the training's task and returns the run directory.
    """

    def condition(task: Any, task_run: Any, state: State[Any]) -> bool:
        error = state.result(raise_on_failure=False)
        context = TaskRunContext.get()
        if not isinstance(error, RETRIED) or context is None:
            return False
        inputs = context.parameters
        failures = Failures.read(directory_of(**inputs), str(task_run.id))
        retries: int = inputs["config"].launch.retries
        return 0 < failures.count <= retries

    return condition


def _place(iteration: int) -> str:
    return f"resumes from iteration {iteration}" if iteration else "starts from the beginning"
