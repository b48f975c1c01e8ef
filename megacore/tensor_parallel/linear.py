"""Linear layers divided by output (column) or by input (row) features."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.parallel.mesh import ALONE, ParallelGroup
from megacore.tensor_parallel.mappings import copy_to_tensor_parallel_region, reduce_from_tensor_parallel_region
from megacore.tensor_parallel.partition import Partition, divide


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b with the rows of W, the output features, divided over the ranks.

    Parameters are left uninitialised.

    Args:
        in_features: width of the input, replicated on every rank.
        out_features: width of the whole output; each rank computes out_features / t of it.
        tp: the ranks that share the layer; a group of one makes it `torch.nn.Linear`.
        device: where the parameters are.

    Raises:
        ParallelLayoutError: out_features is not a multiple of t.
    """

    def __init__(
        self, in_features: int, out_features: int, *, tp: ParallelGroup = ALONE, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.tp = tp
        local = divide(out_features, tp, "the number of output features")
        self.weight = nn.Parameter(torch.empty(local, in_features, device=device))
        self.bias = nn.Parameter(torch.empty(local, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features / t]."""
        return F.linear(copy_to_tensor_parallel_region(x, self.tp), self.weight, self.bias)

    def partitions(self) -> dict[str, Partition]:
        """Both parameters are divided along their rows."""
        part = Partition(0, self.tp.rank, self.tp.size)
        return {"weight": part, "bias": part}


class RowParallelLinear(nn.Module):
    """y = x Wᵀ + b with the columns of W, the input features, divided over the ranks.

    The partial products are summed over the ranks; the bias, whole on every rank, is added once, after the sum.
    Parameters are left uninitialised.

    Args:
        in_features: width of the whole input; each rank is given in_features / t of it.
        out_features: width of the output, replicated on every rank.
        tp: the ranks that share the layer; a group of one makes it `torch.nn.Linear`.
        device: where the parameters are.

    Raises:
        ParallelLayoutError: in_features is not a multiple of t.
    """

    def __init__(
        self, in_features: int, out_features: int, *, tp: ParallelGroup = ALONE, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.tp = tp
        local = divide(in_features, tp, "the number of input features")
        self.weight = nn.Parameter(torch.empty(out_features, local, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features / t] -> [..., out_features]."""
        if self.tp.size == 1:
            return F.linear(x, self.weight, self.bias)
        return reduce_from_tensor_parallel_region(F.linear(x, self.weight), self.tp) + self.bias

    def partitions(self) -> dict[str, Partition]:
        """The weight is divided along its columns, the bias not at all."""
        return {"weight": Partition(1, self.tp.rank, self.tp.size)}
