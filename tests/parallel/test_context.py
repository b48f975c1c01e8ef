"""Division of sequences: two chunks per rank, equal work, and the order of the whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megacore.parallel.context import (
    chunks_of_rank,
    dropout_part,
    in_order,
    into_parts,
    part_of_rank,
    positions_of_rank,
)
from megacore.parallel.mesh import SINGLE_RANK, ParallelGroup

CPU = torch.device("cpu")


def ranks(size: int) -> list[ParallelGroup]:
    return [ParallelGroup(None, rank, size) for rank in range(size)]


def test_rank_i_has_the_chunks_i_and_2cp_minus_1_minus_i() -> None:
    first, last = ranks(2)
    assert positions_of_rank(8, first, CPU).tolist() == [0, 1, 6, 7]
    assert positions_of_rank(8, last, CPU).tolist() == [2, 3, 4, 5]
    assert chunks_of_rank(16, ranks(4)[1]) == (range(2, 4), range(12, 14))


@given(st.integers(1, 6), st.integers(1, 5))
def test_ranks_have_all_positions_once_and_equally_many_scores(size: int, chunk: int) -> None:
    length = 2 * size * chunk
    positions = [positions_of_rank(length, rank, CPU) for rank in ranks(size)]
    assert sorted(torch.cat(positions).tolist()) == list(range(length))
    assert len({int((each + 1).sum()) for each in positions}) == 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_joined_parts_have_the_order_of_the_whole_and_gradients_of_their_places(size: int) -> None:
    whole = torch.arange(2.0 * 12 * size * 3).view(2, 12 * size, 3)
    parts = torch.stack([part_of_rank(whole, rank) for rank in ranks(size)]).requires_grad_()
    joined = in_order(parts)
    assert torch.equal(joined, whole)
    joined.backward(whole)
    assert parts.grad is not None
    assert torch.equal(parts.grad, parts.detach())
    group = ParallelGroup(None, 0, size)
    again = into_parts([whole, 2 * whole], group)
    assert torch.equal(again, torch.stack([parts.detach(), 2 * parts.detach()], 1))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("divided", [1, 2, 4, 6])
def test_dropout_has_the_places_that_tokens_have_without_division(size: int, divided: int) -> None:
    """Also those of the tensor-parallel rank that has a token with sequence parallelism."""
    length = 2 * size * divided
    owners = torch.arange(length).view(1, divided, -1, 1)  # each rank's consecutive tokens
    for cp in ranks(size):
        tokens = part_of_rank(torch.arange(length)[None, :, None], cp).chunk(divided, 1)
        for tp, expected in zip(ranks(divided), tokens, strict=True):
            rank, part = dropout_part(expected.shape[1], cp, tp)
            assert part is not None
            assert torch.equal(part.of(owners[:, rank]), expected)
            assert part.whole(expected) == owners[:, rank].shape


def test_dropout_of_one_part_is_that_of_the_rank() -> None:
    assert dropout_part(8, SINGLE_RANK) == (0, None)
    assert dropout_part(8, SINGLE_RANK, ranks(2)[1]) == (1, None)


def test_one_rank_has_the_whole() -> None:
    x = torch.arange(5)[None]
    assert part_of_rank(x, SINGLE_RANK) is x
