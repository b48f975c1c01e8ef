"""Conjugate pairs of communication, named by the region they enter or leave.

See Shoeybi et al. 2019, figure 3.

Each is the identity for a group of one. `sequence_parallel` has those along the sequence.

Conjugate pairs along the sequence (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

Between the tensor-parallel regions each rank holds the positions r·s/t … of every sample. Together
a gather and a reduce-scatter move as much as the all-reduce they replace, while norms, dropout and
residuals are divided by t. Each is the identity for a group of one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megacore.parallel.collectives import all_gather, all_reduce, all_reduce_, reduce_scatter
from megacore.parallel.mesh import ParallelGroup

Collective = Callable[[Tensor, ParallelGroup, int], Tensor]
"""Of a tensor over the ranks of a group along one dimension."""


def copy_to_tensor_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Replicated activations that ranks use in different ways: identity, backward all-reduce."""
    return x if tp.size == 1 else _apply(_Copy, x, tp)


def reduce_from_tensor_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Partial sums to their replicated total, which overwrites them: all-reduce, backward identity.

    `x` is contiguous and no view, and nothing else needs its values.
    """
    return x if tp.size == 1 else _apply(_Reduce, x, tp)


def gather_from_tensor_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Parts along the last dimension to the replicated whole: [..., k/t] -> [..., k].

    Backward takes the own part.
    """
    return x if tp.size == 1 else _apply(_Conjugates, x, tp, -1, all_gather, _part)


def gather_within_tensor_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Parts along the last dimension to a whole that each rank is going to use in another way.

    [..., k/t] -> [..., k]: all-gather, backward reduce-scatter.
    """
    return all_gather_summed(x, tp, -1)


def all_gather_summed(x: Tensor, tp: ParallelGroup, dim: int) -> Tensor:
    """All-gather along `dim`, backward reduce-scatter."""
    return x if tp.size == 1 else _apply(_Conjugates, x, tp, dim, all_gather, reduce_scatter)


def reduce_scattered(x: Tensor, tp: ParallelGroup, dim: int) -> Tensor:
    """Reduce-scatter along `dim`, backward all-gather."""
    return x if tp.size == 1 else _apply(_Conjugates, x, tp, dim, reduce_scatter, all_gather)


def own_part(x: Tensor, tp: ParallelGroup, dim: int) -> Tensor:
    """This rank's part of a replicated whole along `dim`, backward all-gather."""
    return x if tp.size == 1 else _apply(_Conjugates, x, tp, dim, _part, all_gather)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: ParallelGroup) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0], ctx.tp), None


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
    """This rank's part along `dim`, as a tensor of its own."""
    return x.chunk(tp.size, dim)[tp.rank].clone(memory_format=torch.contiguous_format)


SEQUENCE = 1
"""The dimension of a [b, s, h] activation that is divided."""


def scatter_to_sequence_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Replicated activations to this rank's part: [b, s, h] -> [b, s/t, h], backward all-gather."""
    return own_part(x, tp, SEQUENCE)


def gather_from_sequence_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Parts to the whole that a tensor-parallel region takes.

    [b, s/t, h] -> [b, s, h], backward reduce-scatter.
    """
    return all_gather_summed(x, tp, SEQUENCE)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Partial sums to this rank's part of the total: [b, s, h] -> [b, s/t, h].

    Backward all-gathers.
    """
    return reduce_scattered(x, tp, SEQUENCE)
