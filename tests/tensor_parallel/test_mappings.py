"""Gathering; the other pair is covered by the layers that use it."""

from typing import Any

import torch

from megacore.parallel.mesh import ALONE
from megacore.tensor_parallel import mappings
from tests._two_ranks import random


def test_alone_nothing_is_copied() -> None:
    x = random("x", 2, 3)
    assert mappings.copy_to_tensor_parallel_region(x, ALONE) is x
    assert mappings.reduce_from_tensor_parallel_region(x, ALONE) is x
    assert mappings.gather_from_tensor_parallel_region(x, ALONE) is x


def test_gather_joins_parts_and_its_gradient_takes_them_apart(two_ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(two_ranks):
        assert torch.equal(found["gather"]["y"], random("x", 2, 3, 8))
        assert torch.equal(found["gather"]["x"], random("g", 2, 3, 8).chunk(2, -1)[rank])
