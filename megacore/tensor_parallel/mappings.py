"""Communication of activations, with the conjugate communication of their gradients.

The names state the region that is entered or left; see Shoeybi et al. 2019, figure 3. Between the
tensor-parallel regions of a sequence-parallel model (Korthikanti et al. 2022, arXiv:2205.05198,
section 4.2.2) rank r has the s/t positions from r·s/t on of every sample. A gather and a
reduce-scatter move as many bytes as the all-reduce they replace, while norms, dropout and residuals
are divided by t. Each mapping is the identity for a group of one rank.

In a graph of torch.compile they are operators, which name their group by its key.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megacore.kernels.implementation import differentiable, operator
from megacore.parallel.collectives import all_gather, all_reduce_, reduce_scatter
from megacore.parallel.context import in_order, into_parts
from megacore.parallel.mesh import ParallelGroup, group_of

SEQUENCE = 1
"""Dimension of a [b, s, h] activation that sequence parallelism divides."""
Collective = Callable[[Tensor, ParallelGroup, int], Tensor]
"""Collective of a tensor over the ranks of a group along one dimension."""


def reduce_from_tensor_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Sum partial sums into `x` by all-reduce; the backward pass is the identity.

    `x` must be contiguous and not a view, and its values must not be needed elsewhere.
    """
    return x if tp.size == 1 else _apply(_Reduce, x, tp)


def gather_from_tensor_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Concatenate parts along the last dimension to a replicated tensor: [..., k/t] -> [..., k].

    The backward pass takes this rank's part.
    """
    return x if tp.size == 1 else _apply(_Conjugates, x, tp, -1, all_gather, _part)


def gather_within_tensor_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Concatenate parts along the last dimension to a tensor that each rank uses differently.

    [..., k/t] -> [..., k] by all-gather; the backward pass is a reduce-scatter.
    """
    if tp.size == 1:
        return x
    if torch.compiler.is_compiling():
        return torch.ops.megacore.exchange(x, tp.key, x.dim() - 1, True)  # type: ignore[no-any-return]
    return _apply(_Conjugates, x, tp, -1, all_gather, reduce_scatter)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Sum partial sums and return this rank's positions: [b, s, h] -> [b, s/t, h].

    The backward pass is an all-gather.
    """
    return x if tp.size == 1 else _apply(_Conjugates, x, tp, SEQUENCE, reduce_scatter, all_gather)


def gather_from_context_parallel_region(
    key: Tensor, value: Tensor, cp: ParallelGroup
) -> tuple[Tensor, Tensor]:
    """Join the parts of sequences that the ranks have: [..., s/cp, d] -> [..., s, d] each.

    This is an all-gather; the backward pass is a reduce-scatter.
    """
    if cp.size == 1:
        return key, value
    if torch.compiler.is_compiling():
        parts = torch.stack([key, value]).unsqueeze(0)
        key, value = in_order(torch.ops.megacore.exchange(parts, cp.key, 0, True)).unbind(0)
        return key, value
    whole: tuple[Tensor, Tensor] = _GatherSequences.apply(key, value, cp)  # type: ignore[no-untyped-call]
    return whole


def _resized(x: Tensor, group: int, dim: int, gathers: bool) -> Tensor:
    """Return a new tensor in the shape of the result of `exchange`."""
    shape, size = list(x.shape), group_of(group).size
    shape[dim] = shape[dim] * size if gathers else shape[dim] // size
    return x.new_empty(shape)


@operator("exchange(Tensor x, int group, int dim, bool gathers) -> Tensor", _resized)
def _exchange(x: Tensor, group: int, dim: int, gathers: bool) -> Tensor:
    """Gather the ranks' tensors along `dim`, or reduce-scatter them."""
    result = (all_gather if gathers else reduce_scatter)(x, group_of(group), dim)
    return result.contiguous()


def _save_exchange(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group, ctx.dim, ctx.gathers = inputs


def _exchange_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    back = torch.ops.megacore.exchange(grad, ctx.group, ctx.dim, not ctx.gathers)
    return back, None, None, None


differentiable("exchange", _exchange_backward, _save_exchange)


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
    """Autograd function: a collective along a dimension forward, its conjugate backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tp: ParallelGroup,
        dim: int,
        forward_op: Collective,
        backward_op: Collective,
    ) -> Tensor:
        ctx.tp, ctx.dim, ctx.back = tp, dim, backward_op
        return forward_op(x, tp, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        grad: Tensor = ctx.back(grads[0], ctx.tp, ctx.dim)
        return grad, None, None, None, None


class _GatherSequences(torch.autograd.Function):
    """Autograd function with as few copies as possible: keys and values are one message."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, cp: ParallelGroup) -> tuple[Tensor, Tensor]:
        ctx.cp = cp
        parts = all_gather(torch.stack([key, value]).unsqueeze(0), cp, 0)
        return in_order(parts[:, 0]), in_order(parts[:, 1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        key, value = reduce_scatter(into_parts(grads, ctx.cp), ctx.cp, 0)[0]
        return key, value, None


def _part(x: Tensor, tp: ParallelGroup, dim: int) -> Tensor:
    """Return this rank's part along `dim`, as a separate tensor."""
    return x.chunk(tp.size, dim)[tp.rank].clone(memory_format=torch.contiguous_format)
