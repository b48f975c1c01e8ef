"""Softmax in C++ for attention with its weights in memory, for dropout and trained biases.

On CPUs torch has no fused kernel for either, and makes several copies of the weights.
"""

from typing import Any

import torch
from torch import Tensor

from megacore.errors import ConfigError
from megacore.kernels.cpu import _kernels
from megacore.kernels.cpu.common import address, is_half, kept_like, operator
from megacore.kernels.dropout import SequencePart


def scaled_masked_softmax(
    scores: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    causal: bool = False,
    dropout: float = 0.0,
    part: SequencePart | None = None,
) -> Tensor:
    """Compute dropout(softmax(scores * scale + bias)) of [b, n, s, s_k].

    A row with only -inf becomes zeros.
    """
    if bias is not None and bias.requires_grad and bias.shape != (1, *scores.shape[1:]):
        raise ConfigError(
            f"A trained bias of attention is [1, heads, queries, keys] = {[1, *scores.shape[1:]]}, "
            f"not {[*bias.shape]}."
        )
    kept = kept_like(scores, dropout, part) if dropout else None
    keep_scale = 1.0 / (1.0 - dropout)
    return _Softmax.apply(scores, bias, kept, scale, keep_scale, causal)  # type: ignore[no-any-return, no-untyped-call]


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        bias: Tensor | None,
        kept: Tensor | None,
        scale: float,
        keep_scale: float,
        causal: bool,
    ) -> Tensor:
        probs, dropped = torch.ops.megacore.scaled_masked_softmax(
            scores, bias, kept, scale, keep_scale, causal
        )
        ctx.save_for_backward(probs, kept)
        ctx.settings = scale, keep_scale, causal
        ctx.trained = bias is not None and bias.requires_grad
        return probs if kept is None else dropped  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dscores, dbias = torch.ops.megacore.scaled_masked_softmax_backward(
            grads[0], *ctx.saved_tensors, *ctx.settings, ctx.trained
        )
        return dscores, dbias if ctx.trained else None, None, None, None, None


def _outputs(
    scores: Tensor,
    bias: Tensor | None,
    kept: Tensor | None,
    scale: float,
    keep_scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    return scores.new_empty(scores.shape), scores.new_empty(0 if kept is None else scores.shape)


def _gradients(
    grads: Tensor,
    probs: Tensor,
    kept: Tensor | None,
    scale: float,
    keep_scale: float,
    causal: bool,
    trained: bool,
) -> tuple[Tensor, Tensor]:
    return probs.new_empty(probs.shape), probs.new_empty((1, *probs.shape[1:]) if trained else 0)


@operator(
    "scaled_masked_softmax(Tensor scores, Tensor? bias, Tensor? kept, float scale, float "
    "keep_scale, bool causal) -> (Tensor, Tensor)",
    fake=_outputs,
)
def _forward(
    scores: Tensor,
    bias: Tensor | None,
    kept: Tensor | None,
    scale: float,
    keep_scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    half, scores = is_half(scores, bias, kept), scores.contiguous()
    probs, dropped = _outputs(scores, bias, kept, scale, keep_scale, causal)
    kept = None if kept is None else kept.contiguous()
    if bias is not None:
        bias = bias.expand(*bias.shape[:-1], scores.shape[-1])
        bias = (bias if bias.stride(-1) == 1 else bias.contiguous()).expand(scores.shape)
    _kernels.softmax_forward(
        scores.data_ptr(),
        address(bias),
        0 if bias is None else bias.stride(0),
        0 if bias is None else bias.stride(1),
        0 if bias is None else bias.stride(2),
        address(kept),
        probs.data_ptr(),
        dropped.data_ptr(),
        scores.shape[0],
        scores.shape[1],
        scores.shape[2],
        scores.shape[3],
        causal,
        scale,
        keep_scale,
        half,
        torch.get_num_threads(),
    )
    return probs, dropped


@operator(
    "scaled_masked_softmax_backward(Tensor grads, Tensor probs, Tensor? kept, float scale, float "
    "keep_scale, bool causal, bool trained) -> (Tensor, Tensor)",
    fake=_gradients,
)
def _backward(
    grads: Tensor,
    probs: Tensor,
    kept: Tensor | None,
    scale: float,
    keep_scale: float,
    causal: bool,
    trained: bool,
) -> tuple[Tensor, Tensor]:
    half, grads = is_half(probs, grads, kept), grads.contiguous()
    dscores, dbias = _gradients(grads, probs, kept, scale, keep_scale, causal, trained)
    kept = None if kept is None else kept.contiguous()
    _kernels.softmax_backward(
        grads.data_ptr(),
        probs.data_ptr(),
        address(kept),
        dscores.data_ptr(),
        dbias.data_ptr() if trained else 0,
        probs.shape[0],
        probs.shape[1],
        probs.shape[2],
        probs.shape[3],
        causal,
        scale,
        keep_scale,
        half,
        torch.get_num_threads(),
    )
    return dscores, dbias
