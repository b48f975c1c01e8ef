"""Fixtures that every package's tests share; nothing heavy is imported here."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

# A shell starts its background jobs deaf to SIGINT, and so would be the processes that tests start
# and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The directory of golden files (MEGACORE_SHARED, else ../shared).

    The test is skipped without it.
    """
    default = Path(__file__).resolve().parents[2] / "shared"
    directory = Path(os.environ.get("MEGACORE_SHARED") or default)
    if not directory.is_dir():
        pytest.skip(f"no shared data at {directory}: set MEGACORE_SHARED")
    return directory


@pytest.fixture(scope="session")
def one_rank() -> list[dict[str, Any]]:
    """What a rank without others computes, by case of `tests/_tensor_ranks.py`."""
    from tests import _tensor_ranks

    return [_tensor_ranks.run(1)]


@pytest.fixture(scope="session")
def two_ranks() -> list[dict[str, Any]]:
    """What each of two tensor-parallel ranks computed."""
    from tests import _tensor_ranks
    from tests._dist import run_distributed

    return run_distributed(2, _tensor_ranks.run, 2)


@pytest.fixture(scope="session")
def four_ranks() -> list[dict[str, Any]]:
    """What each of four tensor-parallel ranks computed."""
    from tests import _tensor_ranks
    from tests._dist import run_distributed

    return run_distributed(4, _tensor_ranks.run, 4)


@pytest.fixture(params=["one_rank", "two_ranks", "four_ranks"], ids=["tp1", "tp2", "tp4"])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each of 1, 2 and 4 ranks computed."""
    found: list[dict[str, Any]] = request.getfixturevalue(request.param)
    return found
