"""Muon's whole matrices at owners: every layout makes the serial update."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megacore.config.parallel import ParallelConfig
from megacore.data_parallel.owners import (
    Runs,
    Slices,
    balanced,
    plan_rounds,
    rounds_of,
    runs_of,
    staggered,
)
from megacore.data_parallel.sharding import Sharding
from megacore.parallel.mesh import ParallelGroup, ProcessMesh
from tests.data_parallel import _ranks

Results = list[dict[str, Any]]
WAYS = ["whole", "sharded", "sharded, one bucket"]


@pytest.fixture(scope="module")
def serial() -> Iterator[dict[torch.dtype, dict[str, Any]]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have
    yield {
        dtype: _ranks.muon(ProcessMesh.serial(), ParallelConfig(), dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_four_replicas_update_like_one_bit_for_bit(
    four_ranks: Results, serial: dict[torch.dtype, dict[str, Any]], way: str, dtype: torch.dtype
) -> None:
    for result in four_ranks:
        weights = result[f"muon, {way}, {dtype}"]["weights"]
        for name, expected in serial[dtype]["weights"].items():
            assert torch.equal(weights[name], expected), name
    assert_same_state(four_ranks, f"muon, {way}, {dtype}", serial[dtype])


@pytest.mark.parametrize("way", WAYS)
def test_tensor_parallel_ranks_orthogonalize_whole_matrices(
    four_ranks: Results, serial: dict[torch.dtype, dict[str, Any]], way: str
) -> None:
    assert_same_state(four_ranks, f"muon, tensor, {way}", serial[torch.float32])


def assert_same_state(ranks: Results, case: str, serial: dict[str, Any]) -> None:
    """Assert that the ranks' pieces cover the serial run's state and have its bits."""
    for name, pieces in serial["state"].items():
        (whole,) = pieces.values()
        covered = torch.zeros_like(whole, dtype=torch.bool)
        for result in ranks:
            for place, piece in result[case]["state"][name].items():
                at = tuple(
                    slice(start, start + length)
                    for start, length in zip(place, piece.shape, strict=True)
                )
                assert torch.equal(whole[at], piece), name
                covered[at] = True
        assert covered.all(), name
    assert all(result[case]["state"].keys() == serial["state"].keys() for result in ranks)


def test_owners_have_similar_work() -> None:
    costs = {"a": 5.0, "b": 4.0, "c": 3.0, "d": 3.0, "e": 3.0}
    owners = balanced([costs], costs, 2)
    sums = [sum(costs[name] for name in costs if owners[name] == rank) for rank in range(2)]
    assert sorted(sums) == [8.0, 10.0]
    assert set(balanced(["abcd"], dict.fromkeys("abcd", 1.0), 4).values()) == {0, 1, 2, 3}


def test_rounds_have_similar_cost_and_keep_the_order() -> None:
    costs = dict.fromkeys("abcdefgh", 1.0)
    assert rounds_of(costs, 4) == [["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"]]
    assert rounds_of({"a": 1.0, "b": 6.0, "c": 1.0}, 2) == [["a"], ["b", "c"]]


def test_a_round_waits_for_its_messages_after_the_work_of_others() -> None:
    done = []

    def matrices(number: int) -> Iterator[None]:
        done.append(f"send {number}")
        yield
        done.append(f"work {number}")
        yield
        done.append(f"apply {number}")

    staggered([matrices(0), matrices(1), matrices(2)])
    assert done == [
        *["send 0", "send 1", "work 0", "send 2", "work 1", "apply 0"],
        *["work 2", "apply 1", "apply 2"],
    ]


@pytest.mark.parametrize("tensor", [1, 2])
def test_each_matrix_has_one_owner(tensor: int) -> None:
    """Of two replicas with two tensor-parallel ranks each, the product of ranks decides."""
    names = [f"m{number}" for number in range(9)]
    shards = {name: Runs([range(4), range(4, 8)]) for name in names}
    slices = {name: Slices((4, 4), 0, 2) for name in names} if tensor == 2 else {}
    owned = []
    for replica in range(2):
        for rank in range(tensor):
            groups = ParallelGroup(rank=replica, size=2), ParallelGroup(rank=rank, size=tensor)
            levels = zip((shards, slices), groups, strict=True)
            planned = plan_rounds(
                dict.fromkeys(names, 1.0), levels, 4, torch.float32, torch.device("cpu")
            )
            owned.append([name for each in planned for name in each.hops[-1].owned.sizes])
            assert [name for each in planned for name in each.names] == names
            assert len(planned) == (4 if tensor == 1 else 2)
    assert sorted(name for each in owned for name in each) == names
    assert max(map(len, owned)) - min(map(len, owned)) <= 1


def test_runs_are_the_elements_of_a_matrix_in_every_shard() -> None:
    sharding = Sharding("optimizer", 2)
    layout = sharding.bucket({"bias": 5, "matrix": 100})
    assert layout.length == 128
    assert runs_of(layout, {"matrix"}, sharding) == {"matrix": Runs([range(48), range(48, 100)])}
