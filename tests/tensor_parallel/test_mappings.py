"""Outputs of the mappings between regions, and their conjugate gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.parallel.mesh import SINGLE_RANK
from megacore.tensor_parallel import mappings
from tests._tensor_ranks import random

MAPPINGS = [
    mappings.reduce_from_tensor_parallel_region,
    mappings.gather_from_tensor_parallel_region,
    mappings.gather_within_tensor_parallel_region,
    mappings.reduce_scatter_to_sequence_parallel_region,
]
Parts = list[dict[str, Tensor]]


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_one_rank_gets_its_input_without_a_copy(mapping: Callable[..., Tensor]) -> None:
    x = random("x", 2, 3)
    assert mapping(x, SINGLE_RANK) is x


def _parts(ranks: list[dict[str, Any]], mapping: Callable[..., Tensor]) -> Parts:
    return [rank["mapping_results"][mapping.__name__] for rank in ranks]


def _inputs(ranks: list[Any]) -> list[Tensor]:
    return [random("x", 2, 4, 8) + rank for rank in range(len(ranks))]


def _grads(parts: Parts) -> list[Tensor]:
    """Return the gradients of the outputs where each rank has a different one."""
    return [random("g", *part["y"].shape) + rank for rank, part in enumerate(parts)]


def _total(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def test_reduce_sums_and_passes_gradients_through(ranks: list[dict[str, Any]]) -> None:
    for part in _parts(ranks, mappings.reduce_from_tensor_parallel_region):
        torch.testing.assert_close(part["y"], _total(_inputs(ranks)))
        assert torch.equal(part["x"], random("g", 2, 4, 8))


@pytest.mark.parametrize(
    "mapping",
    [mappings.gather_from_tensor_parallel_region, mappings.gather_within_tensor_parallel_region],
)
def test_gather_concatenates_and_its_gradient_is_split(
    ranks: list[dict[str, Any]], mapping: Callable[..., Tensor]
) -> None:
    parts = _parts(ranks, mapping)
    if mapping is mappings.gather_from_tensor_parallel_region:
        total = random("g", *parts[0]["y"].shape)
    else:
        total = _total(_grads(parts))
    for rank, part in enumerate(parts):
        assert torch.equal(part["y"], torch.cat(_inputs(ranks), -1))
        torch.testing.assert_close(part["x"], total.chunk(len(ranks), -1)[rank])


def test_reduce_scatter_sums_and_its_gradient_is_gathered(ranks: list[dict[str, Any]]) -> None:
    parts = _parts(ranks, mappings.reduce_scatter_to_sequence_parallel_region)
    for rank, part in enumerate(parts):
        torch.testing.assert_close(part["y"], _total(_inputs(ranks)).chunk(len(ranks), 1)[rank])
        assert torch.equal(part["x"], torch.cat(_grads(parts), 1))
