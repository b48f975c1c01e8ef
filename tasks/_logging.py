"""Logging of flows: user errors as one sentence, and displays that fail as a warning."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from megacore.artifact.files import access_error
from megacore.errors import MegacoreError
from megacore.redact import redact_log
from tasks._temporary_server import database_problem

RUN_LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.megacore")


class CountedRetries(int):
    """Number of retries that a task run raises itself, as long as it makes progress."""


class SentenceFilter(logging.Filter):
    """Filter that drops tracebacks of a MegacoreError, a failing disk or Prefect's full database.

    Prefect's message about a retry is dropped when the task counts its retries and logs a better
    one, and that about a cache key without one, because the task fails with the same error.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record is shown."""
        values = record.args if isinstance(record.args, tuple) else ()
        if str(record.msg).startswith("Task run failed") and any(
            isinstance(value, CountedRetries) for value in values
        ):
            return False
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, OSError):
            error = access_error(error)
        if isinstance(error, MegacoreError):
            if str(record.msg).startswith("Error encountered when computing cache key"):
                return False
            record.msg = f"{type(error).__name__}: {error}"
            record.args = ()
            record.exc_info = None
            record.exc_text = None
        elif (
            type(error).__name__ == "PrefectHTTPStatusError"
            and str(error).startswith("Server")
            and database_problem()
        ):
            record.exc_info = record.exc_text = None  # a line of the server's output tells why
        return True


class EventFilter(logging.Filter):
    """Filter that drops lines about events that say nothing of the run.

    These are the content of events that a server did not take (Prefect warns of the lost connection
    in another line), and a flow run's heartbeat that comes after the run has ended.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a line that shows a whole event, or a heartbeat that is too late."""
        message = str(record.msg)
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        too_late = (
            message == "Error emitting event: prefect.flow-run.heartbeat"
            and isinstance(error, RuntimeError)
            and "stopped service" in str(error)
        )
        return not too_late and not message.startswith("Service %r failed to process item")


@contextmanager
def shown_in_prefect(what: str) -> Iterator[None]:
    """Turn an error of the body, which stores `what` in Prefect, into a warning.

    A server that is down must not fail a stage whose result is on disk.
    """
    from prefect import get_run_logger  # it is imported after the environment is prepared

    try:
        yield
    except Exception as error:
        get_run_logger().warning("%s was not stored: %s", what, error)


def shorten_user_errors() -> None:
    """Apply the filter to the loggers of flow and task runs, and hide secrets.

    Calling it again changes nothing.
    """
    for name in RUN_LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, SentenceFilter) for known in logger.filters):
            logger.addFilter(SentenceFilter())
        redact_log(logger)
    for name in ("EventsWorker", "APILogWorker"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they warn of each wait, however short
    for name in ("prefect._internal.concurrency", "prefect.events.utilities"):
        logger = logging.getLogger(name)
        if not any(isinstance(known, EventFilter) for known in logger.filters):
            logger.addFilter(EventFilter())
