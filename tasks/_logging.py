"""A user's error in Prefect's log is its sentence, without the engine's traceback."""

import logging

from megacore.errors import MegacoreError
from megacore.redact import redact_log

UNLIMITED_RETRIES = 1_000_000
"""Prefect's number of retries where a task's own condition counts."""
RUN_LOGGERS = ("prefect.flow_runs", "prefect.task_runs", "prefect.megacore")


class SentenceFilter(logging.Filter):
    """Drops the traceback of an exception that explains itself; of any other it stays.

    Prefect's own line on a retry is dropped where the task counts by itself, and says more.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is shown; an error is shortened, never lost."""
        if str(record.msg).startswith("Task run failed") and UNLIMITED_RETRIES in tuple(
            record.args or ()
        ):
            return False
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, MegacoreError):
            record.msg = f"{type(error).__name__}: {error}"
            record.args = ()
            record.exc_info = None
            record.exc_text = None
        return True


def shorten_user_errors() -> None:
    """Apply the filter to the loggers of flow and task runs, and hide secrets.

    Calling it again changes nothing.
    """
    for name in RUN_LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, SentenceFilter) for known in logger.filters):
            logger.addFilter(SentenceFilter())
        redact_log(logger)
