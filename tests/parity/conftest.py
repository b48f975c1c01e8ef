"""One thread: small tensors gain nothing from more, and cores that are busy elsewhere cost much."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Set and restore the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
