"""Prefect flows, which only define the order of the tasks."""

import atexit
import gc
import sys
from types import TracebackType


def report_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print a Ctrl-C while modules are imported, which `run_flow` cannot catch, as one line."""
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("stopped before the flow began\n")
    else:
        sys.__excepthook__(kind, error, trace)


def _prepare() -> None:
    """Prepare the process for the import of Prefect, or end it with a user error."""
    from megacore.errors import MegacoreError
    from megacore.observe.logging import prepare_output
    from tasks._environment import prepare_environment
    from tasks._logging import shorten_user_errors
    from tasks._temporary_server import GC_THRESHOLDS

    prepare_output()
    gc.set_threshold(*GC_THRESHOLDS)  # before Prefect is imported
    atexit.register(gc.freeze)  # nothing needs to be collected when the process ends
    try:
        prepare_environment()
        shorten_user_errors()
    except MegacoreError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(error.exit_code) from None


if sys.argv[0] == "-m":  # for `python -m flows.…`, which is looked up now, not in a worker
    sys.excepthook = report_uncaught
_prepare()
