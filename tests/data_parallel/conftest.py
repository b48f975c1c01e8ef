"""Fixtures with one spawn per world size."""

from collections.abc import Callable
from typing import Any

import pytest

from tests._dist import run_distributed
from tests.data_parallel import _ranks


@pytest.fixture(scope="package")
def two_replicas(computed_once: Callable[..., Any]) -> Any:
    """Return the results of each of two replicas."""
    return computed_once("two-replicas", run_distributed, 2, _ranks.replicas)


@pytest.fixture(scope="package")
def four_ranks(computed_once: Callable[..., Any]) -> Any:
    """Return the results of each of four ranks.

    Cases: four replicas, 2 x 2 tensor parallel, and 2 x 2 stages.
    """
    return computed_once("four-replicas", run_distributed, 4, _ranks.four_ranks)
