"""Muon's whole matrices at owners: every layout makes the serial update."""

from typing import Any

import pytest
import torch

from megacore.config.parallel import ParallelConfig
from megacore.data_parallel.grad_sync import Bucket, BucketLayout
from megacore.data_parallel.owners import balanced, runs_of
from megacore.parallel.mesh import ProcessMesh
from tests.data_parallel import _ranks

Results = list[dict[str, Any]]
WAYS = ["whole", "sharded", "sharded, one bucket"]


@pytest.fixture(scope="module")
def serial() -> dict[torch.dtype, dict[str, Any]]:
    return {
        dtype: _ranks.muon(ProcessMesh.serial(), ParallelConfig(), dtype)
        for dtype in (torch.float32, torch.bfloat16)
    }


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
    owners = balanced(costs, 2)
    sums = [sum(costs[name] for name in costs if owners[name] == rank) for rank in range(2)]
    assert sorted(sums) == [8.0, 10.0]
    assert set(balanced(dict.fromkeys("abcd", 1.0), 4).values()) == {0, 1, 2, 3}


def test_runs_are_the_elements_of_a_matrix_in_every_shard() -> None:
    layout = BucketLayout({"bias": 5, "matrix": 100}, shards=2)
    bucket = Bucket(layout, torch.zeros(layout.length), range(layout.length // 2), ())
    assert layout.length == 128
    assert runs_of(bucket, {"matrix"}, 2) == {"matrix": [range(48), range(48, 100)]}
