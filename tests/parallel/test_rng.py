"""Random numbers that depend only on seed, name and position."""

from typing import Any

import pytest
import torch

from megacore.parallel.mesh import SINGLE_RANK, ParallelGroup
from megacore.parallel.rng import (
    EMBEDDING,
    context_parallel_region,
    micro_batch_seed,
    parameter_generator,
    seed_dropout,
    stable_seed,
    tensor_parallel_region,
)


def test_stable_seed_has_a_fixed_value() -> None:
    assert stable_seed("dropout", 1234, 5) == 4371496953850108153


def test_seeds_differ_for_parts_with_equal_concatenations() -> None:
    assert (
        len(
            {
                stable_seed("a", 1, 23),
                stable_seed("a", 12, 3),
                stable_seed("a", 123),
                stable_seed("a1", 23),
            }
        )
        == 4
    )


def test_parameters_differ_by_name_and_by_seed() -> None:
    def draw(seed: int, name: str) -> tuple[float, ...]:
        return tuple(torch.empty(4).normal_(generator=parameter_generator(seed, name)).tolist())

    assert draw(1, "a") == draw(1, "a")
    assert len({draw(1, "a"), draw(1, "b"), draw(2, "a")}) == 3


def test_dropout_is_a_function_of_seed_sample_and_layer() -> None:
    def draw(seed: int, sample: int, number: int) -> tuple[float, ...]:
        seed_dropout(micro_batch_seed(seed, sample), number)
        return tuple(torch.rand(4).tolist())

    first = draw(1, 10, 2)
    torch.rand(100)
    assert draw(1, 10, 2) == first
    assert len({first, draw(2, 10, 2), draw(1, 11, 2), draw(1, 10, 3), draw(1, 10, EMBEDDING)}) == 5


def test_dropout_without_a_seed_is_refused() -> None:
    with pytest.raises(AssertionError, match="needs the dropout_seed"):
        seed_dropout(None, 0)


def test_a_region_of_one_rank_changes_nothing() -> None:
    torch.manual_seed(1)
    plain = torch.rand(4)
    torch.manual_seed(1)
    with tensor_parallel_region(SINGLE_RANK, plain):
        assert torch.equal(torch.rand(4), plain)


def test_a_region_draws_the_numbers_of_the_named_rank() -> None:
    first, second = (ParallelGroup(None, rank, 2) for rank in range(2))
    drawn = []
    for group, rank in ((first, None), (first, 1), (second, None)):
        torch.manual_seed(1)
        with tensor_parallel_region(group, torch.empty(0), rank):
            drawn.append(torch.rand(4))
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[1], drawn[2])


def test_context_parallel_ranks_draw_differently_only_in_a_region() -> None:
    drawn = []
    for rank in range(2):
        torch.manual_seed(1)
        with context_parallel_region(ParallelGroup(None, rank, 2), torch.empty(0)):
            within = torch.rand(4)
        drawn.append((within, torch.rand(4)))
    assert not torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])


def test_a_region_draws_differently_on_each_rank_and_repeats_itself(
    ranks: list[dict[str, Any]],
) -> None:
    drawn = [result["region_rng"] for result in ranks]
    for place in ("before", "after"):
        assert all(
            torch.equal(result[f"first {place}"], drawn[0][f"first {place}"]) for result in drawn
        )
    assert len({tuple(result["first within"].tolist()) for result in drawn}) == len(ranks)
    for result in drawn:
        for place in ("before", "within", "after"):
            assert torch.equal(result[f"first {place}"], result[f"second {place}"])
