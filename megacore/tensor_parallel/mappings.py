"""Conjugate pairs of communication, named by the region they enter or leave (Shoeybi et al. 2019, figure 3).

Each is the identity for a group of one.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.parallel.mesh import ParallelGroup


def copy_to_tensor_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Replicated activations that each rank is going to use in another way: identity, backward all-reduce."""
    return x if tp.size == 1 else _apply(_Copy, x, tp)


def reduce_from_tensor_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Partial sums to their replicated total: all-reduce, backward identity."""
    return x if tp.size == 1 else _apply(_Reduce, x, tp)


def gather_from_tensor_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Parts along the last dimension to the replicated whole: [..., k/t] -> [..., k]; backward takes the own part."""
    return x if tp.size == 1 else _apply(_Gather, x, tp)


def all_reduce(x: Tensor, tp: ParallelGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The reduction of `x` over the ranks as a new tensor; not differentiable."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op=op, group=tp.group)
    return total


def _apply(function: type[torch.autograd.Function], x: Tensor, tp: ParallelGroup) -> Tensor:
    result: Tensor = function.apply(x, tp)  # type: ignore[no-untyped-call]
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
        return all_reduce(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: ParallelGroup) -> Tensor:
        ctx.tp = tp
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(tp.size)]
        dist.all_gather(parts, x.contiguous(), group=tp.group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.tp.size, dim=-1)[ctx.tp.rank], None
