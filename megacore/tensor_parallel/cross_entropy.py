"""Cross entropy over a divided vocabulary: a few numbers per token are exchanged, the logits never are."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megacore.parallel.collectives import all_gather
from megacore.parallel.mesh import ALONE, ParallelGroup

_CACHED_ELEMENTS = 1 << 17
"""Logits per thread of a block that stays in the cores' caches between passes: half a MiB of fp32."""


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    tp: ParallelGroup = ALONE,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Negative log-likelihood of each label, in one buffer: exponentials and then the gradient overwrite the logits.

    Args:
        logits: this rank's part of the vocabulary, [b, s, v/t], overwritten unless in half precision, which is
            computed in fp32; no other operation may need its values.
        labels: ids in the whole vocabulary, [b, s].
        tp: the ranks that share the vocabulary.
        label_smoothing: the target is (1 - ε) onehot + ε / v (Szegedy et al. 2016), as in
            `torch.nn.CrossEntropyLoss`; v counts the padding too, which is a row of logits like any other here.
        z_loss: adds this times logsumexp² (Chowdhery et al. 2022, section 5), which keeps logits near zero.

    Returns:
        The loss of each token, [b, s], fp32 (fp64 for fp64 logits), the same on every rank. It can be
        differentiated once.
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    loss: Tensor = _CrossEntropy.apply(logits, labels, tp, label_smoothing, z_loss)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    """loss = logsumexp - (1 - ε) logit_label - ε mean(logits) + z logsumexp².

    Its gradient, (1 + 2 z logsumexp) softmax - (1 - ε) onehot - ε / v, is local to each part. All logits are taken
    relative to the largest of their row, which cancels out but for the z-loss: within a rank to the largest of its
    own part, so that one pass and one exchange suffice.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: ParallelGroup, smoothing: float, z_loss: float) -> Tensor:
        rows = logits.detach().flatten(0, -2)
        width, flat = rows.shape[1], labels.reshape(-1, 1)
        column, elsewhere = _local_columns(flat, width, tp)
        sums = _exponentials_(rows, column, with_sum=smoothing > 0)
        maximum, shift, (label, total, *logit_sum) = _over_ranks(sums, flat // width, width, tp)
        log_total = total.log()
        loss = log_total - label
        if smoothing:
            loss += smoothing * (label - logit_sum[0] / (width * tp.size))
        if z_loss:
            loss += z_loss * (log_total + maximum).square_()
        scale = shift.exp_().div_(total)
        if z_loss:
            scale *= 1 + 2 * z_loss * (log_total + maximum)
        ctx.exponentials, ctx.shape = rows, logits.shape
        ctx.smoothing, ctx.evenly = smoothing, smoothing / (width * tp.size)
        ctx.save_for_backward(column, elsewhere, scale)
        return loss.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows, ctx.exponentials = ctx.exponentials, None
        if rows is None:
            raise RuntimeError(
                "vocab_parallel_cross_entropy can be differentiated once: its buffer became the gradient"
            )
        column, elsewhere, scale = ctx.saved_tensors
        grad = grads[0].reshape(-1, 1)
        own = grad * (ctx.smoothing - 1.0)
        if elsewhere is not None:
            own.masked_fill_(elsewhere, 0.0)
        scale, evenly = scale * grad, grad * ctx.evenly
        for block in _blocks(rows):
            rows[block].mul_(scale[block]).scatter_add_(1, column[block], own[block])
            if ctx.smoothing:
                rows[block].sub_(evenly[block])
        return rows.view(ctx.shape), None, None, None, None


def _local_columns(labels: Tensor, width: int, tp: ParallelGroup) -> tuple[Tensor, Tensor | None]:
    """Each label's column in this rank's part (0 where it has none), and which rows have none."""
    if tp.size == 1:
        return labels, None
    local = labels - tp.rank * width
    elsewhere = (local < 0) | (local >= width)
    return local.masked_fill_(elsewhere, 0), elsewhere


def _exponentials_(rows: Tensor, column: Tensor, *, with_sum: bool) -> Tensor:
    """Replace logits by exp(logit - maximum) of their row, [n, v/t], a block at a time.

    Returns each row's maximum, and relative to it the logit at `column`, the sum of the exponentials and, if asked
    for, that of the logits: [3 or 4, n, 1].
    """
    sums = rows.new_empty(4 if with_sum else 3, rows.shape[0], 1)
    for block in _blocks(rows):
        logits, (maximum, label, total, *logit_sum) = rows[block], sums[:, block]
        torch.amax(logits, 1, keepdim=True, out=maximum)
        logits.sub_(maximum)
        torch.gather(logits, 1, column[block], out=label)
        if with_sum:
            torch.sum(logits, 1, keepdim=True, out=logit_sum[0])
        torch.sum(logits.exp_(), 1, keepdim=True, out=total)
    return sums


def _over_ranks(sums: Tensor, owner: Tensor, width: int, tp: ParallelGroup) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Each row's maximum over all ranks, this rank's own relative to it, and all other sums relative to it, [n, 1].

    The logit of the label is taken from its `owner`.
    """
    if tp.size == 1:
        return sums[0], torch.zeros_like(sums[0]), list(sums[1:])
    maxima, labels, totals, *logit_sums = all_gather(sums.unsqueeze(0), tp, 0).unbind(1)  # each [t, n, 1]
    maximum = maxima.amax(0)
    shifts = maxima - maximum
    label = (labels + shifts).gather(0, owner.unsqueeze(0)).squeeze(0)
    relative = [label, (totals * shifts.exp()).sum(0)]
    relative += [(logits + width * shifts).sum(0) for logits in logit_sums]
    return maximum, shifts[tp.rank].clone(), relative


def _blocks(rows: Tensor) -> Iterator[slice]:
    """Runs of rows that are worked on together; all of them on a GPU, where launches cost more than memory traffic."""
    count, width = rows.shape
    cached = _CACHED_ELEMENTS * torch.get_num_threads()
    step = max(1, cached // width if rows.device.type == "cpu" else count)
    for start in range(0, count, step):
        yield slice(start, start + step)
