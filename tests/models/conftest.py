"""Fixtures of the models' tests."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Compute with one thread, and restore the number of threads.

    Small tensors gain nothing from more, and busy cores cost much.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def family_single_rank() -> dict[str, Any]:
    """Return the results of a single rank, by model of `tests/_families.py`."""
    from tests import _family_ranks

    return _family_ranks.run(1)


@pytest.fixture(scope="session")
def family_ranks() -> list[dict[str, Any]]:
    """Return the results of each of two tensor-parallel ranks."""
    from tests import _family_ranks
    from tests._dist import run_distributed

    return run_distributed(2, _family_ranks.run, 2)
