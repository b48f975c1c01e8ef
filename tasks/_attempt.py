"""One attempt of a training, told to MLflow however it ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect import get_run_logger

from megacore.errors import TrainingStoppedError
from megacore.observe.events import EventReader
from tasks._forward import Forwarder
from tasks._mlflow import RunStatus, Tracking

FINAL_FLUSH = 60.0
"""Seconds that a finished training waits for MLflow."""
EXIT_TAG = "megacore.exit_reason"
"""Tag of the MLflow run: why its last attempt ended."""
STOP_FLUSH = 5.0
"""Seconds that a failed or stopped one does."""


@contextmanager
def reported_end(
    tracking: Tracking, forwarder: Forwarder, events: Path, attempt: int
) -> Iterator[None]:
    """Tell MLflow how the attempt in the body ended, whatever it raised.

    Args:
        tracking: the store.
        forwarder: of the run's events.
        events: the run's events.jsonl.
        attempt: its number.
    """
    try:
        yield
    except BaseException as error:
        _end(tracking, forwarder, events, attempt, error)
        raise
    _end(tracking, forwarder, events, attempt, None)


def exit_reason(events: Path, attempt: int, error: BaseException | None) -> str:
    """Why an attempt ended: what its ranks say in their `exit` event, else the name of the error.

    A cancellation or a signal to this process reaches the ranks as a signal, and they have said so
    if they could save.

    Args:
        events: the run's events.jsonl.
        attempt: its number.
        error: what ended it, None where it finished.
    """
    if isinstance(error, Exception) and not isinstance(error, TrainingStoppedError):
        return type(error).__name__  # the ranks may have finished before that
    mine = (
        event
        for event, _ in EventReader(events)
        if event["kind"] == "exit" and event["attempt"] == attempt
    )
    said = [str(event["reason"]) for event in mine]
    return said[-1] if said else "finished" if error is None else type(error).__name__


def _end(
    tracking: Tracking,
    forwarder: Forwarder,
    events: Path,
    attempt: int,
    error: BaseException | None,
) -> None:
    """Tell MLflow how the attempt ended; what it does not take now, publication sends."""
    status: RunStatus = "FINISHED"
    if error is not None:
        failed = isinstance(error, Exception) and not isinstance(error, TrainingStoppedError)
        status = "FAILED" if failed else "KILLED"
    try:
        run_id = forwarder.finish(status, FINAL_FLUSH if error is None else STOP_FLUSH)
        reason = exit_reason(events, attempt, error)
        with tracking.errors("take why the run ended"):
            tracking.client.set_tag(run_id, EXIT_TAG, reason)
    except Exception as failure:
        # whatever it is, it must neither hide a training's own error nor lose its end
        get_run_logger().warning("%s; what MLflow lacks is sent at publication", failure)
