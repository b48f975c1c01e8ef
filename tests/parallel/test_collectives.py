"""Collectives, compared with sums and concatenations that every process can compute."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.parallel import collectives
from megacore.parallel.mesh import SINGLE_RANK, ParallelGroup
from tests._tensor_ranks import random

Ranks = list[dict[str, Any]]


def _inputs(ranks: Ranks) -> list[Tensor]:
    return [random("x", 4, 8, 12) + rank for rank in range(len(ranks))]


def _results(ranks: Ranks, transport: str) -> list[dict[str, Tensor]]:
    if transport in ("none to share", "pieces") and len(ranks) == 1:
        transport = "memory"
    return [rank["communication"][transport] for rank in ranks]


WAYS = pytest.mark.parametrize("way", ["memory", "messages", "none to share", "pieces"])


@WAYS
def test_sums_have_the_same_bits_on_every_rank(ranks: Ranks, way: str) -> None:
    total = torch.stack(_inputs(ranks)).sum(0).transpose(0, 1)
    for result in _results(ranks, way):
        torch.testing.assert_close(result["all_reduce"], total)
        assert torch.equal(result["all_reduce"], _results(ranks, way)[0]["all_reduce"])
        assert torch.equal(result["maximum"], _inputs(ranks)[-1])


def test_bits_of_sums_in_pieces_do_not_depend_on_other_sums_that_have_started(
    ranks: Ranks,
) -> None:
    for result in _results(ranks, "pieces"):
        assert torch.equal(result["beside another True"], result["beside another False"])


@WAYS
def test_parts_are_gathered_and_sums_are_scattered_along_any_dimension(
    ranks: Ranks, way: str
) -> None:
    inputs, size = _inputs(ranks), len(ranks)
    for rank, result in enumerate(_results(ranks, way)):
        assert torch.equal(result["own"], inputs[rank])  # the input is unchanged
        for dim in (0, 1, -1):
            assert torch.equal(result[f"all_gather {dim}"], torch.cat(inputs, dim))
            part = torch.stack(inputs).sum(0).chunk(size, dim)[rank]
            torch.testing.assert_close(result[f"reduce_scatter {dim}"], part)


@WAYS
def test_concurrent_collectives_may_finish_in_any_order(ranks: Ranks, way: str) -> None:
    inputs, size = _inputs(ranks), len(ranks)
    total = torch.stack(inputs).sum(0)
    for rank, result in enumerate(_results(ranks, way)):
        expected = [
            total,
            torch.cat(inputs, 1),
            total.chunk(size, 1)[rank],
            2 * total,
            3 * torch.cat(inputs, 1),
        ]
        for number, value in enumerate(expected):
            torch.testing.assert_close(result[f"flight {number}"], value)


@WAYS
def test_successive_collectives_may_have_any_size_and_type(ranks: Ranks, way: str) -> None:
    size = len(ranks)
    for result in _results(ranks, way):
        for number in range(9):
            assert result[f"turn {number}"].tolist() == [number * size + sum(range(size))]


def test_a_single_rank_returns_its_input() -> None:
    x = random("x", 2, 3)
    assert collectives.all_reduce(x, SINGLE_RANK) is x
    assert collectives.all_gather(x, SINGLE_RANK, 0) is x
    assert collectives.reduce_scatter(x, SINGLE_RANK, 0) is x


def test_waiting_is_timed_under_the_groups_name(ranks: Ranks) -> None:
    phase = collectives.wait_phase(ParallelGroup(name="tensor"))
    for result in ranks:
        assert result["waiting"] == ({phase} if len(ranks) > 1 else set())
