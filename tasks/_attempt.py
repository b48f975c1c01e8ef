"""Reports to MLflow of the end of a training attempt."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect import get_run_logger

from megacore.errors import TrainingStoppedError
from megacore.observe.events import EventReader
from tasks._mlflow import RunStatus, Tracking
from tasks._mlflow_events import Forwarder
from tasks._run_page import update_run_page

FINAL_FLUSH = 60.0
"""Seconds that a finished training waits for MLflow."""
EXIT_TAG = "megacore.exit_reason"
"""Tag of the MLflow run: the reason why its last attempt ended."""
STOP_FLUSH = 5.0
"""Seconds that a failed or stopped training waits for MLflow."""


@contextmanager
def report_end(
    tracking: Tracking, forwarder: Forwarder, events: Path, attempt: int
) -> Iterator[None]:
    """Report to MLflow how the attempt in the body ended, whatever error it raised.

    Args:
        tracking: MLflow store.
        forwarder: forwarder of the run's events.
        events: path of the run's events.jsonl.
        attempt: number of the attempt.
    """
    try:
        yield
    except BaseException as error:
        _end(tracking, forwarder, events, attempt, error)
        raise
    _end(tracking, forwarder, events, attempt, None)


def exit_reason(events: Path, attempt: int, error: BaseException | None) -> str:
    """Return the reason why an attempt ended.

    It is the reason in the `exit` event of the attempt's ranks, otherwise the name of the error. A
    cancellation or a signal to this process reaches the ranks as a signal. They report it if they
    could save.

    Args:
        events: path of the run's events.jsonl.
        attempt: number of the attempt.
        error: error that ended the attempt, or None if it finished.
    """
    if isinstance(error, Exception) and not isinstance(error, TrainingStoppedError):
        return type(error).__name__  # the ranks may have finished before the error
    exits = (
        event
        for event, _ in EventReader(events)
        if event["kind"] == "exit" and event["attempt"] == attempt
    )
    reasons = [str(event["reason"]) for event in exits]
    return reasons[-1] if reasons else "finished" if error is None else type(error).__name__


def _end(
    tracking: Tracking,
    forwarder: Forwarder,
    events: Path,
    attempt: int,
    error: BaseException | None,
) -> None:
    """Report the attempt's end to MLflow; publication sends what MLflow does not accept now."""
    status: RunStatus = "FINISHED"
    if error is not None:
        failed = isinstance(error, Exception) and not isinstance(error, TrainingStoppedError)
        status = "FAILED" if failed else "KILLED"
    try:
        run_id = forwarder.finish(status, FINAL_FLUSH if error is None else STOP_FLUSH)
        reason = exit_reason(events, attempt, error)
        with tracking.errors("take why the run ended"):
            tracking.client.set_tag(run_id, EXIT_TAG, reason)
        update_run_page(tracking, run_id, events.parent, forwarder.facts, ending=reason)
    except Exception as failure:
        # a failed report must neither hide the training's error nor fail a finished training
        get_run_logger().warning("%s; what MLflow lacks is sent at publication", failure)
