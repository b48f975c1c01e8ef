"""One spawn per world size."""

from typing import Any

import pytest

from tests._dist import run_distributed
from tests.data_parallel import _ranks


@pytest.fixture(scope="package")
def two_replicas() -> list[dict[str, Any]]:
    """What each of two replicas computed."""
    return run_distributed(2, _ranks.replicas)


@pytest.fixture(scope="package")
def four_ranks() -> list[dict[str, Any]]:
    """What each of four ranks computed: as four replicas, as 2 x 2 tensor parallel, as 2 x 2
    stages."""
    return run_distributed(4, _ranks.axes)
