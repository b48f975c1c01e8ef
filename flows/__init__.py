"""Prefect flows, which only define the order of the tasks."""

import gc
import sys

from megacore.errors import MegacoreError
from tasks._environment import prepare_environment
from tasks._logging import shorten_user_errors
from tasks._orphans import GC_THRESHOLDS

gc.set_threshold(*GC_THRESHOLDS)  # before Prefect is imported
try:
    prepare_environment()
    shorten_user_errors()
except MegacoreError as error:
    sys.stderr.write(f"error: {error}\n")
    raise SystemExit(error.exit_code) from None
