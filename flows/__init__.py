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


if sys.argv[0] == "-m":  # for `python -m flows.…`, which is looked up now, not in a worker
    sys.excepthook = report_uncaught

from megacore.errors import MegacoreError  # noqa: E402
from megacore.observe.logging import prepare_output  # noqa: E402
from tasks._environment import prepare_environment  # noqa: E402
from tasks._logging import shorten_user_errors  # noqa: E402
from tasks._temporary_server import GC_THRESHOLDS  # noqa: E402

prepare_output()
gc.set_threshold(*GC_THRESHOLDS)  # before Prefect is imported
atexit.register(gc.freeze)  # nothing needs to be collected when the process ends
try:
    prepare_environment()
    shorten_user_errors()
except MegacoreError as error:
    sys.stderr.write(f"error: {error}\n")
    raise SystemExit(error.exit_code) from None
