"""Retries of a training: counted as long as no new checkpoint comes, and never more than those."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.context import TaskRunContext
from prefect.states import State

from megacore.artifact.files import read_record, write_json
from megacore.errors import MegacoreError, PreemptedError, RankLostError

FAILURES_FILE = "failures.json"
"""In the run directory: the failures in a row of the task run that trains there."""
RETRIED = (RankLostError, PreemptedError)
"""What may pass: ranks that were lost, with their machine or without, that stalled, or that a
signal ended."""


@dataclass(frozen=True)
class Failures:
    """Failed attempts of one task run since it last had a new checkpoint.

    An attempt that saved one is the first.
    """

    task_run: str
    count: int
    iteration: int
    """Of the newest complete checkpoint after the last of them; 0 without one."""

    @classmethod
    def read(cls, directory: Path, task_run: str) -> "Failures":
        """Those of `task_run` in a run directory.

        None where it has noted none yet, whatever other task runs did.
        """
        noted = read_record(directory / FAILURES_FILE, cls)
        return noted if noted is not None and noted.task_run == task_run else cls(task_run, 0, 0)

    def after(self, before: int, now: int) -> "Failures":
        """With one more failure, of an attempt that led from checkpoint `before` to `now`."""
        return Failures(self.task_run, 1 if now > before else self.count + 1, now)

    def write(self, directory: Path) -> None:
        """Note them. Raises OSError."""
        write_json(directory / FAILURES_FILE, asdict(self))


def newest_iteration(run_directory: Path) -> int:
    """Iteration of the newest complete checkpoint, 0 without one."""
    from megacore.checkpoint.format import complete_checkpoints

    markers = complete_checkpoints(run_directory / "checkpoints").values()
    return max((marker.iteration for marker in markers), default=0)


@contextmanager
def counted_failures(run_directory: Path, task_run: str, retries: int) -> Iterator[None]:
    """Note in the run directory how the attempt in the body failed, and say what follows from it.

    Args:
        run_directory: of the training.
        task_run: id of the task run, the same in all its attempts.
        retries: how often it is tried again without a new checkpoint.

    Raises:
        MegacoreError: what the body raised; the last one says how many retries brought no new
            checkpoint.
    """
    before = newest_iteration(run_directory)
    try:
        yield
    except RETRIED as error:
        failures = Failures.read(run_directory, task_run).after(
            before, newest_iteration(run_directory)
        )
        try:
            failures.write(run_directory)
        except (OSError, MegacoreError) as unwritable:
            # What cannot be counted must not be repeated without end: the condition finds no
            # record.
            (run_directory / FAILURES_FILE).unlink(missing_ok=True)
            get_run_logger().warning(
                "the failure cannot be counted (%s), so it is not retried", unwritable
            )
            raise error from None
        if failures.count <= retries:
            get_run_logger().warning(
                "%s: %s; retry %d of at most %d in a row without progress goes on %s",
                type(error).__name__,
                error,
                failures.count,
                retries,
                _place(failures.iteration),
            )
            raise
        if retries == 0:
            raise
        raise type(error)(
            f"{error}; given up after {failures.count} attempts without progress, which is "
            f"launch.retries = {retries} and the first: the same command goes on "
            f"{_place(failures.iteration)}"
        ) from error


def training_may_pass(task: Any, task_run: Any, state: State[Any]) -> bool:
    """Prefect's retry condition of a pretraining.

    The run directory's account of the attempts so far decides it.
    """
    from tasks.train import run_directory

    return may_pass(
        task_run,
        state,
        lambda inputs: run_directory(inputs["config"], inputs["tokens"], inputs["tokenizer"]),
    )


def may_pass(
    task_run: Any, state: State[Any], directory_of: Callable[[Mapping[str, Any]], Path]
) -> bool:
    """Whether a training that failed is tried once more.

    `directory_of` its task's inputs is its run directory.
    """
    error = state.result(raise_on_failure=False)
    context = TaskRunContext.get()
    if not isinstance(error, RETRIED) or context is None:
        return False
    inputs = context.parameters
    failures = Failures.read(directory_of(inputs), str(task_run.id))
    return 0 < failures.count <= inputs["config"].launch.retries


def _place(iteration: int) -> str:
    return f"from iteration {iteration}" if iteration else "from the beginning"
