"""Collectives against sums and joins of numbers that every process knows."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.parallel import collectives
from megacore.parallel.mesh import ALONE, ParallelGroup
from tests._tensor_ranks import random

Ranks = list[dict[str, Any]]


def _inputs(ranks: Ranks) -> list[Tensor]:
    return [random("x", 4, 8, 12) + rank for rank in range(len(ranks))]


def _found(ranks: Ranks, way: str) -> list[dict[str, Tensor]]:
    if way == "none to share" and len(ranks) == 1:
        way = "memory"
    return [found["communication"][way] for found in ranks]


WAYS = pytest.mark.parametrize("way", ["memory", "messages", "none to share"])


@WAYS
def test_every_rank_has_the_same_bits_of_a_sum(ranks: Ranks, way: str) -> None:
    total = torch.stack(_inputs(ranks)).sum(0).transpose(0, 1)
    for found in _found(ranks, way):
        torch.testing.assert_close(found["all_reduce"], total)
        assert torch.equal(found["all_reduce"], _found(ranks, way)[0]["all_reduce"])
        assert torch.equal(found["maximum"], _inputs(ranks)[-1])


@WAYS
def test_parts_are_gathered_and_sums_are_scattered_along_any_dimension(
    ranks: Ranks, way: str
) -> None:
    inputs, size = _inputs(ranks), len(ranks)
    for rank, found in enumerate(_found(ranks, way)):
        assert torch.equal(found["own"], inputs[rank])  # what is sent is not changed
        for dim in (0, 1, -1):
            assert torch.equal(found[f"all_gather {dim}"], torch.cat(inputs, dim))
            part = torch.stack(inputs).sum(0).chunk(size, dim)[rank]
            torch.testing.assert_close(found[f"reduce_scatter {dim}"], part)


@WAYS
def test_several_may_be_under_way_and_are_waited_for_in_any_order(ranks: Ranks, way: str) -> None:
    inputs, size = _inputs(ranks), len(ranks)
    total = torch.stack(inputs).sum(0)
    for rank, found in enumerate(_found(ranks, way)):
        expected = [
            total,
            torch.cat(inputs, 1),
            total.chunk(size, 1)[rank],
            2 * total,
            3 * torch.cat(inputs, 1),
        ]
        for number, value in enumerate(expected):
            torch.testing.assert_close(found[f"flight {number}"], value)


@WAYS
def test_one_after_another_of_any_size_and_type(ranks: Ranks, way: str) -> None:
    size = len(ranks)
    for found in _found(ranks, way):
        for number in range(9):
            assert found[f"turn {number}"].tolist() == [number * size + sum(range(size))]


def test_alone_nothing_is_copied() -> None:
    x = random("x", 2, 3)
    assert collectives.all_reduce(x, ALONE) is x
    assert collectives.all_gather(x, ALONE, 0) is x
    assert collectives.reduce_scatter(x, ALONE, 0) is x


def test_waiting_is_timed_under_the_groups_name(ranks: Ranks) -> None:
    phase = collectives.wait_phase(ParallelGroup(name="tensor"))
    for found in ranks:
        assert found["waiting"] == ({phase} if len(ranks) > 1 else set())
