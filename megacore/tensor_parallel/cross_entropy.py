"""Cross entropy over a divided vocabulary: three numbers per token are exchanged, the logits never are."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.parallel.mesh import ALONE, ParallelGroup
from megacore.tensor_parallel.mappings import all_reduce

_CACHED_ELEMENTS = 1 << 18
"""Logits of a block that stays in a core's cache between passes: 1 MiB of fp32."""


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, tp: ParallelGroup = ALONE) -> Tensor:
    """Negative log-likelihood of each label, in one buffer: exponentials and then the gradient overwrite the logits.

    Args:
        logits: this rank's part of the vocabulary, [b, s, v/t], overwritten unless in half precision, which is
            computed in fp32; no other operation may need its values.
        labels: ids in the whole vocabulary, [b, s].
        tp: the ranks that share the vocabulary.

    Returns:
        The loss of each token, [b, s], fp32 (fp64 for fp64 logits), the same on every rank. It can be
        differentiated once.
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    loss: Tensor = _CrossEntropy.apply(logits, labels, tp)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    """loss = log(sum_v exp(logit_v)) - logit_label; its gradient is softmax - onehot, local to each part."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: ParallelGroup) -> Tensor:
        rows = logits.detach().flatten(0, -2)
        column, elsewhere = _local_columns(labels.reshape(-1, 1), rows.shape[1], tp)
        maximum = _over_ranks(rows.amax(dim=1, keepdim=True), tp, dist.ReduceOp.MAX)
        label_logit, total = torch.empty_like(maximum), torch.empty_like(maximum)
        for block in _blocks(rows):
            rows[block].sub_(maximum[block])
            torch.gather(rows[block], 1, column[block], out=label_logit[block])
            torch.sum(rows[block].exp_(), 1, keepdim=True, out=total[block])
        if elsewhere is not None:
            label_logit.masked_fill_(elsewhere, 0.0)
        label_logit, total = _over_ranks(torch.stack([label_logit, total]), tp, dist.ReduceOp.SUM)
        ctx.exponentials, ctx.elsewhere, ctx.shape = rows, elsewhere, logits.shape
        ctx.save_for_backward(column, total)
        loss: Tensor = (total.log() - label_logit).view(labels.shape)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        rows, ctx.exponentials = ctx.exponentials, None
        if rows is None:
            raise RuntimeError(
                "vocab_parallel_cross_entropy can be differentiated once: its buffer became the gradient"
            )
        column, total = ctx.saved_tensors
        grad = grads[0].reshape(-1, 1)
        own = -grad if ctx.elsewhere is None else -grad.masked_fill(ctx.elsewhere, 0.0)
        scale = grad / total
        for block in _blocks(rows):
            rows[block].mul_(scale[block]).scatter_add_(1, column[block], own[block])
        return rows.view(ctx.shape), None, None


def _local_columns(labels: Tensor, width: int, tp: ParallelGroup) -> tuple[Tensor, Tensor | None]:
    """Each label's column in this rank's part (0 where it has none), and which rows have none."""
    if tp.size == 1:
        return labels, None
    local = labels - tp.rank * width
    elsewhere = (local < 0) | (local >= width)
    return local.masked_fill(elsewhere, 0), elsewhere


def _over_ranks(x: Tensor, tp: ParallelGroup, op: dist.ReduceOp.RedOpType) -> Tensor:
    return x if tp.size == 1 else all_reduce(x, tp, op)


def _blocks(rows: Tensor) -> Iterator[slice]:
    """Runs of rows that are worked on together; all of them on a GPU, where launches cost more than memory traffic."""
    count, width = rows.shape
    step = max(1, _CACHED_ELEMENTS // width) if rows.device.type == "cpu" else max(1, count)
    for start in range(0, count, step):
        yield slice(start, start + step)
