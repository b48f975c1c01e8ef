"""Output layer fused with the cross entropy of its logits.

Ranks exchange a few numbers per token, but no logits.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacore.kernels.cross_entropy import REFERENCE, CrossEntropy
from megacore.kernels.matmul import affine, multiply
from megacore.parallel.collectives import (
    all_gather,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megacore.parallel.mesh import SINGLE_RANK, ParallelGroup
from megacore.tensor_parallel.linear import matmul_gradient, sink_of
from megacore.tensor_parallel.mappings import SEQUENCE

_FP16_SCALE = 4096.0
"""Factor on the logits' gradient when it overwrites fp16 logits: the smallest normal fp16 number,
6e-5, is larger than most probabilities."""
_FP16_PRODUCT_SCALE = 2.0**-4
"""Factor on the product of such a gradient and the weights, before it is rounded: without it, a
weight of 16 gives infinity at a token that the model predicts badly."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    tp: ParallelGroup = SINGLE_RANK,
    sequence_parallel: bool = False,
    kernel: CrossEntropy = REFERENCE,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the negative log-likelihood of each label under the logits hidden Wᵀ + b.

    The logits exist once, in the type of `hidden`. The forward pass already overwrites them with
    their gradient, for an upstream gradient of one per token. The backward pass applies the actual
    upstream gradient to the rows of smaller tensors, the layer's input and its gradient.

    Args:
        hidden: replicated, [b, s, h], or with sequence parallelism this rank's part of the
            sequence, [b, s/t, h].
        weight: this rank's rows of the output layer, [v/t, h].
        labels: ids in the whole vocabulary, [b, s].
        bias: bias of the output layer, [v/t].
        tp: the ranks that share the vocabulary.
        sequence_parallel: True if `hidden` is a part of the sequence.
        kernel: implementation of the losses and the logits' gradients.
        label_smoothing: ε of the target (1 - ε) onehot + ε / v (Szegedy et al. 2016), as in
            `torch.nn.CrossEntropyLoss`; v includes the padding rows, which count like all others.
        z_loss: factor of the added term logsumexp² (Chowdhery et al. 2022, section 5), which keeps
            logits near zero.

    Returns:
        The loss of each token, [b, s], fp32 (fp64 for fp64), the same on every rank; NaN, or an
            error, for an invalid label.
    """
    terms = _Terms(
        tp,
        sequence_parallel and tp.size > 1,
        kernel,
        label_smoothing,
        z_loss,
        torch.is_grad_enabled(),
    )
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, labels, terms)  # type: ignore[no-untyped-call]
    return loss


@dataclass(frozen=True)
class _Terms:
    tp: ParallelGroup
    sequence_parallel: bool
    kernel: CrossEntropy
    smoothing: float
    z_loss: float
    trains: bool
    """True if gradients may be requested."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Autograd function that overwrites the logits with G, the gradient of each row's loss.

    With upstream gradients g of the rows: dx = diag(g) (G W), dW = Gᵀ (diag(g) x), db = Gᵀ g. A
    gathered input is not kept but gathered again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        terms: _Terms,
    ) -> Tensor:
        full_input = all_gather(hidden, terms.tp, SEQUENCE) if terms.sequence_parallel else hidden
        logits = affine(full_input, weight, bias).view(-1, weight.shape[0])
        # sequences of one token are a view with gaps
        flat = labels.reshape(-1).contiguous()
        ctx.scale = _FP16_SCALE if logits.dtype == torch.float16 else 1.0
        if terms.tp.size == 1 and terms.trains:
            losses = terms.kernel.loss_(logits, flat, terms.smoothing, terms.z_loss, ctx.scale)
        else:
            losses = _divided_loss_(logits, flat, terms, ctx.scale)
        if terms.trains:
            ctx.tp, ctx.sequence_parallel, ctx.sink = (
                terms.tp,
                terms.sequence_parallel,
                sink_of(weight),
            )
            ctx.save_for_backward(hidden, weight, logits)
        return losses.view(labels.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, gradient = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gathering = start_all_gather(hidden, ctx.tp, SEQUENCE) if ctx.sequence_parallel else None
        upstream = (grads[0] / ctx.scale).reshape(-1, 1)
        reduction = None
        if needs_hidden:
            if gradient.dtype == torch.float16:
                dx = torch.addmm(
                    weight[0], gradient, weight, beta=0, alpha=_FP16_PRODUCT_SCALE
                ).mul_(upstream / _FP16_PRODUCT_SCALE)
            else:
                dx = multiply(gradient, weight).mul_(upstream)
            dx = dx.view(*grads[0].shape, -1)
            reduction = (
                start_reduce_scatter(dx, ctx.tp, SEQUENCE)
                if ctx.sequence_parallel
                else start_all_reduce(dx, ctx.tp)
            )
        full_input = gathering.wait() if gathering else hidden
        rows = (full_input.reshape(-1, full_input.shape[-1]) * upstream).to(weight.dtype)
        weight_grad = matmul_gradient(ctx.sink, gradient, rows) if needs_weight else None
        bias_grad = (gradient.t() @ upstream.to(gradient.dtype)).view(-1) if needs_bias else None
        return reduction.wait() if reduction else None, weight_grad, bias_grad, None, None


def _divided_loss_(logits: Tensor, labels: Tensor, terms: _Terms, scale: float) -> Tensor:
    """Return the losses of rows [n, v/t] that are divided over the ranks.

    In training the gradient overwrites the logits.
    """
    tp, kernel, smoothing, z_loss = terms.tp, terms.kernel, terms.smoothing, terms.z_loss
    width = logits.shape[1]
    local = labels - tp.rank * width
    columns = local.masked_fill((local < 0) | (local >= width), -1)
    statistics = kernel.statistics(logits, columns, smoothing > 0)
    # each [t, n]
    maxima, label_logits, totals, *sums = all_gather(statistics.unsqueeze(0), tp, 0).unbind(1)
    maximum = maxima.amax(0)
    log_total = (totals * (maxima - maximum).exp()).sum(0).log()
    log_normaliser = log_total + maximum
    # Relative to the maximum, which cancels: with large logits the difference keeps its precision.
    losses = log_total - (1.0 - smoothing) * (label_logits.sum(0) - maximum)
    if smoothing:
        losses -= smoothing * (sums[0].sum(0) / (width * tp.size) - maximum)
    if z_loss:
        losses += z_loss * log_normaliser.square()
    # A label outside the vocabulary is an error in the data that must not go unnoticed.
    losses.masked_fill_((labels < 0) | (labels >= width * tp.size), torch.nan)
    if terms.trains:
        factor = scale * (1.0 + 2.0 * z_loss * log_normaliser) if z_loss or scale != 1.0 else None
        uniform = scale * smoothing / (width * tp.size)
        kernel.gradient_(
            logits, columns, log_normaliser, factor, scale * (1.0 - smoothing), uniform
        )
    return losses
