"""Communication of activations with its conjugate as gradient, named by the region it crosses.

See Shoeybi et al. 2019, figure 3. Between the tensor-parallel regions of a sequence-parallel model
(Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2) each rank holds the positions r·s/t … of
every sample: a gather and a reduce-scatter move as much as the all-reduce they replace, while
norms, dropout and residuals are divided by t. Each mapping is the identity for a group of one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megacore.parallel.collectives import all_gather, all_reduce_, reduce_scatter
from megacore.parallel.mesh import ParallelGroup

SEQUENCE = 1
"""The dimension of a [b, s, h] activation that sequence parallelism divides."""
Collective = Callable[[Tensor, ParallelGroup, int], Tensor]
"""Of a tensor over the ranks of a group along one dimension."""


def reduce_from_tensor_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Sum partial sums into `x`: all-reduce, backward identity.

    `x` is contiguous and no view, and nothing else needs its values.
    """
    return x if tp.size == 1 else _apply(_Reduce, x, tp)


def gather_from_tensor_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Join parts along the last dimension to the replicated whole: [..., k/t] -> [..., k].

    Backward takes this rank's part.
    """
    return x if tp.size == 1 else _apply(_Conjugates, x, tp, -1, all_gather, _part)


def gather_within_tensor_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Join parts along the last dimension to a whole that each rank uses in another way.

    [..., k/t] -> [..., k]: all-gather, backward reduce-scatter.
    """
    return x if tp.size == 1 else _apply(_Conjugates, x, tp, -1, all_gather, reduce_scatter)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Sum partial sums to this rank's positions of the total: [b, s, h] -> [b, s/t, h].

    Backward all-gathers.
    """
    return x if tp.size == 1 else _apply(_Conjugates, x, tp, SEQUENCE, reduce_scatter, all_gather)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: ParallelGroup) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce_(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Conjugates(torch.autograd.Function):
    """One communication along a dimension forward, its conjugate backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tp: ParallelGroup, dim: int, there: Collective, back: Collective
    ) -> Tensor:
        ctx.tp, ctx.dim, ctx.back = tp, dim, back
        return there(x, tp, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        grad: Tensor = ctx.back(grads[0], ctx.tp, ctx.dim)
        return grad, None, None, None, None


def _part(x: Tensor, tp: ParallelGroup, dim: int) -> Tensor:
    """Return this rank's part along `dim`, as a tensor of its own."""
    return x.chunk(tp.size, dim)[tp.rank].clone(memory_format=torch.contiguous_format)
