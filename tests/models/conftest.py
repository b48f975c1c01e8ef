"""Fixtures of the models' tests."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def family_single_rank() -> dict[str, Any]:
    """Return the results of a single rank, by model of `tests/_families.py`."""
    from tests import _family_ranks

    return _family_ranks.run(1)


@pytest.fixture(scope="session")
def family_ranks(computed_once: Callable[..., Any]) -> Any:
    """Return the results of each of two tensor-parallel ranks."""
    from tests import _family_ranks
    from tests._dist import run_distributed

    return computed_once("family-ranks", run_distributed, 2, _family_ranks.run, 2)
