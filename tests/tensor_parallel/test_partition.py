"""Parts and wholes."""

import torch
from torch import nn

from megacore.tensor_parallel import ColumnParallelLinear, Partition, RowParallelLinear, partitions


def test_parts_join_to_the_whole_along_their_dimension() -> None:
    whole = torch.arange(24).view(4, 6)
    for dim in (0, 1):
        parts = [Partition(dim, rank, 2).shard(whole) for rank in range(2)]
        assert torch.equal(torch.cat(parts, dim), whole)
        assert Partition(dim, 0, 2).global_shape(tuple(parts[0].shape)) == (4, 6)


def test_a_model_says_how_each_parameter_is_divided() -> None:
    model = nn.Sequential(ColumnParallelLinear(2, 4), nn.LayerNorm(4), nn.Sequential(RowParallelLinear(4, 2)))
    assert partitions(model) == {
        "0.weight": Partition(0, 0, 1),
        "0.bias": Partition(0, 0, 1),
        "2.0.weight": Partition(1, 0, 1),
    }
