"""Random numbers that are functions of their place."""

from typing import Any

import torch

from megacore.parallel.mesh import ALONE
from megacore.parallel.rng import parameter_generator, seed_micro_batch, stable_seed, tensor_parallel_region


def test_a_seed_never_changes() -> None:
    assert stable_seed("dropout", 1234, 5) == 4371496953850108153


def test_seeds_do_not_collide_when_parts_are_joined_alike() -> None:
    assert len({stable_seed("a", 1, 23), stable_seed("a", 12, 3), stable_seed("a", 123), stable_seed("a1", 23)}) == 4


def test_parameters_differ_by_name_and_by_seed() -> None:
    def draw(seed: int, name: str) -> tuple[float, ...]:
        return tuple(torch.empty(4).normal_(generator=parameter_generator(seed, name)).tolist())

    assert draw(1, "a") == draw(1, "a")
    assert len({draw(1, "a"), draw(1, "b"), draw(2, "a")}) == 3


def test_dropout_is_a_function_of_the_position() -> None:
    def draw(*position: int) -> tuple[float, ...]:
        seed_micro_batch(*position)
        return tuple(torch.rand(4).tolist())

    first = draw(1, 10, 2, 0)
    torch.rand(100)
    assert draw(1, 10, 2, 0) == first
    assert len({first, draw(2, 10, 2, 0), draw(1, 11, 2, 0), draw(1, 10, 3, 0), draw(1, 10, 2, 1)}) == 5


def test_a_region_of_one_rank_changes_nothing() -> None:
    seed_micro_batch(1, 0, 0, 0)
    plain = torch.rand(4)
    seed_micro_batch(1, 0, 0, 0)
    with tensor_parallel_region(ALONE, plain):
        assert torch.equal(torch.rand(4), plain)


def test_a_region_sets_ranks_apart_and_repeats_itself(two_ranks: list[dict[str, Any]]) -> None:
    first, second = (found["region_rng"] for found in two_ranks)
    for place in ("before", "after"):
        assert torch.equal(first[f"first {place}"], second[f"first {place}"])
    assert not torch.equal(first["first within"], second["first within"])
    for found in (first, second):
        for place in ("before", "within", "after"):
            assert torch.equal(found[f"first {place}"], found[f"second {place}"])
