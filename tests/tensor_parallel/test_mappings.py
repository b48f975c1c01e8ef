"""The pairs: each mapping's output, and that its gradient is its conjugate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.parallel.mesh import ALONE
from megacore.tensor_parallel import mappings
from tests._tensor_ranks import random

PAIRS = [
    mappings.reduce_from_tensor_parallel_region,
    mappings.gather_from_tensor_parallel_region,
    mappings.gather_within_tensor_parallel_region,
    mappings.reduce_scatter_to_sequence_parallel_region,
]
Found = list[dict[str, Tensor]]


@pytest.mark.parametrize("mapping", PAIRS)
def test_alone_nothing_is_copied(mapping: Callable[..., Tensor]) -> None:
    x = random("x", 2, 3)
    assert mapping(x, ALONE) is x


def _found(ranks: list[dict[str, Any]], mapping: Callable[..., Tensor]) -> Found:
    return [found["pairs"][mapping.__name__] for found in ranks]


def _inputs(ranks: list[Any]) -> list[Tensor]:
    return [random("x", 2, 4, 8) + rank for rank in range(len(ranks))]


def _grads(found: Found) -> list[Tensor]:
    """What the outputs were given, where each rank had its own."""
    return [random("g", *part["y"].shape) + rank for rank, part in enumerate(found)]


def _total(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def test_reduce_sums_and_hands_gradients_on(ranks: list[dict[str, Any]]) -> None:
    for part in _found(ranks, mappings.reduce_from_tensor_parallel_region):
        torch.testing.assert_close(part["y"], _total(_inputs(ranks)))
        assert torch.equal(part["x"], random("g", 2, 4, 8))


@pytest.mark.parametrize(
    "mapping",
    [mappings.gather_from_tensor_parallel_region, mappings.gather_within_tensor_parallel_region],
)
def test_gather_joins_and_its_gradient_takes_apart(
    ranks: list[dict[str, Any]], mapping: Callable[..., Tensor]
) -> None:
    found = _found(ranks, mapping)
    if mapping is mappings.gather_from_tensor_parallel_region:
        whole = random("g", *found[0]["y"].shape)
    else:
        whole = _total(_grads(found))
    for rank, part in enumerate(found):
        assert torch.equal(part["y"], torch.cat(_inputs(ranks), -1))
        torch.testing.assert_close(part["x"], whole.chunk(len(ranks), -1)[rank])


def test_reduce_scatter_sums_and_its_gradient_joins(ranks: list[dict[str, Any]]) -> None:
    found = _found(ranks, mappings.reduce_scatter_to_sequence_parallel_region)
    for rank, part in enumerate(found):
        torch.testing.assert_close(part["y"], _total(_inputs(ranks)).chunk(len(ranks), 1)[rank])
        assert torch.equal(part["x"], torch.cat(_grads(found), 1))
