"""Fixtures that every package's tests share; nothing heavy is imported here."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

# A shell starts its background jobs deaf to SIGINT, and so would be the processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The directory of golden files (MEGACORE_SHARED, else ../shared); the test is skipped without it."""
    default = Path(__file__).resolve().parents[2] / "shared"
    directory = Path(os.environ.get("MEGACORE_SHARED") or default)
    if not directory.is_dir():
        pytest.skip(f"no shared data at {directory}: set MEGACORE_SHARED")
    return directory


@pytest.fixture(scope="session")
def two_ranks() -> list[dict[str, Any]]:
    """What each of two tensor-parallel ranks computed, by case of `tests/_two_ranks.py`."""
    from tests import _two_ranks
    from tests._dist import run_distributed

    return run_distributed(2, _two_ranks.run, timeout=120)
