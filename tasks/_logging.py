"""A user's error in Prefect's log is its sentence, without forty lines of the engine's traceback."""

import logging

from megacore.errors import MegacoreError

RUN_LOGGERS = ("prefect.flow_runs", "prefect.task_runs")


class SentenceFilter(logging.Filter):
    """Drops the traceback of an exception that explains itself; of any other it stays."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Always true: the record is shortened, never lost."""
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(error, MegacoreError):
            record.msg = f"{type(error).__name__}: {error}"
            record.args = ()
            record.exc_info = None
            record.exc_text = None
        return True


def shorten_user_errors() -> None:
    """Apply the filter to the loggers of flow and task runs; calling it again changes nothing."""
    for name in RUN_LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, SentenceFilter) for known in logger.filters):
            logger.addFilter(SentenceFilter())
