"""Prefect flows, which only define the order of the tasks."""

import sys

from megacore.errors import MegacoreError
from tasks._environment import prepare_environment
from tasks._logging import shorten_user_errors

try:
    prepare_environment()
    shorten_user_errors()
except MegacoreError as error:
    sys.stderr.write(f"error: {error}\n")
    raise SystemExit(error.exit_code) from None
