"""Sharding of tensors and the list of sharded parameters of a model."""

import torch
from torch import nn

from megacore.parallel.mesh import SINGLE_RANK, ParallelGroup
from megacore.tensor_parallel import (
    ColumnParallelLinear,
    Partition,
    RowParallelLinear,
    partial_gradients,
    partitions,
)


def test_shards_concatenate_to_the_global_tensor() -> None:
    tensor = torch.arange(24).view(4, 6)
    for dim in (0, 1):
        parts = [Partition(dim, rank, 2).shard(tensor) for rank in range(2)]
        assert torch.equal(torch.cat(parts, dim), tensor)
        assert Partition(dim, 0, 2).global_shape(tuple(parts[0].shape)) == (4, 6)


def test_partitions_list_every_sharded_parameter() -> None:
    def layers(tp: ParallelGroup) -> nn.Module:
        row = nn.Sequential(RowParallelLinear(4, 2, tp=tp))
        return nn.Sequential(ColumnParallelLinear(2, 4, tp=tp), nn.LayerNorm(4), row)

    assert partitions(layers(SINGLE_RANK)) == {}
    assert partitions(layers(ParallelGroup(None, 1, 2))) == {
        "0.weight": Partition(0, 1, 2),
        "0.bias": Partition(0, 1, 2),
        "2.0.weight": Partition(1, 1, 2),
    }


def test_partial_gradients_list_parameters_of_nested_modules() -> None:
    class Norm(nn.LayerNorm):
        def partial_gradients(self) -> frozenset[str]:
            return frozenset({"weight"})

    assert partial_gradients(nn.Sequential(nn.LayerNorm(2), nn.Sequential(Norm(2)))) == {
        "1.0.weight"
    }
    assert partial_gradients(Norm(2)) == {"weight"}
