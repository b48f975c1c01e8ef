"""Attention, in one pass over blocks (Dao et al. 2022, arXiv:2205.14135) or with stored weights.

With dropout or a bias, the weights may be stored between two matmuls. Their softmax is then fused
with scale, bias and dropout, as in Megatron-LM's scaled_masked_softmax.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.kernels.dropout import SequencePart
from megacore.kernels.dropout import dropout as drop
from megacore.kernels.implementation import (
    Implementation,
    Setting,
    cpp_obstacle,
    cpp_obstacle_uncompiled,
    everywhere,
    flex_obstacle,
)
from megacore.kernels.spans import Spans


class Attention(Protocol):
    """Interface of attention with n query heads and g key-value heads."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        bias: Tensor | None,
        dropout: float,
        causal: bool,
        scale: float | None,
        softcap: float | None = None,
        spans: Spans | None = None,
        part: SequencePart | None = None,
    ) -> Tensor:
        """Compute softmax(q kᵀ scale + bias) v.

        Args:
            query: [b, n, s, d].
            key: [b, g, s_k, d].
            value: [b, g, s_k, d].
            bias: bias added to the scores, [b or 1, n or 1, s or 1, s_k].
            dropout: probability of dropping a weight.
            causal: a query sees only the keys up to its own position; requires s = s_k.
            scale: factor on the scores; None means 1 / sqrt(d).
            softcap: c, if the scaled scores become c tanh(score / c) before the bias is added
                (Riviere et al. 2024, arXiv:2408.00118). Only kernels that are chosen for it take
                it.
            spans: keys that each query sees, instead of `causal`; a bias is then added to the
                scores of the visible ones.
            part: part of the sequences that the queries have, for dropout; the weights are then
                stored.

        Returns:
            [b, n, s, d], with any strides.
        """
        ...


class PackedAttention(Protocol):
    """Interface of self-attention with q, k, v and their gradients packed in one tensor."""

    def __call__(
        self, mixed: Tensor, *, causal: bool, scale: float | None, spans: Spans | None = None
    ) -> Tensor:
        """Map [b, s, n, 3, d] to [b, n, s, d], without dropout or bias."""
        ...


class ScaledMaskedSoftmax(Protocol):
    """Interface of dropout(softmax(scores * scale + bias))."""

    def __call__(
        self,
        scores: Tensor,
        bias: Tensor | None,
        *,
        scale: float,
        causal: bool = False,
        dropout: float = 0.0,
        part: SequencePart | None = None,
    ) -> Tensor:
        """Return the attention weights of scores [b, n, s, s_k].

        Args:
            scores: products of queries and keys.
            bias: bias [b or 1, n or 1, s or 1, s_k]; only one of shape [1, n, s, s_k] may be
                trained.
            scale: factor on the scores.
            causal: a query sees only the keys up to its own position; the last query is at the
                position of the last key.
            dropout: probability of dropping a weight.
            part: part of the sequences that the queries have; None if they have them whole.
        """
        ...


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    softcap: float | None = None,
    spans: Spans | None = None,
    part: SequencePart | None = None,
    softmax: ScaledMaskedSoftmax | None = None,
) -> Tensor:
    """Compute attention with torch, see `Attention`; spans become a dense mask.

    torch's fused kernels have no soft cap and do not drop a part of whole sequences: the scores are
    then stored. With a `softmax`, they are also stored for dropout and for a trained bias.
    """
    if spans is not None:
        mask = spans.bias(key.shape[2], query.dtype)
        bias, causal = mask if bias is None else bias + mask, False
    if softcap is not None:
        context = _softcapped(query, key, value, bias, dropout, causal, scale, softcap, part)
    elif (dropout and part is not None) or (
        softmax is not None and (dropout or (bias is not None and bias.requires_grad))
    ):
        softmax = softmax or _plain_softmax
        context = _stored(query, key, value, bias, dropout, causal, scale, softmax, part)
    else:
        context = _fused(query, key, value, bias, dropout, causal, scale)
    return context if spans is None else spans.hide(context)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Compute attention with the kernel that torch selects: FlashAttention, cuDNN's or its own."""
    sharing = query.shape[1] // key.shape[1]
    if sharing > 1 and query.shape[2] == 1:
        # The heads of a single query that share keys are like several queries of one head.
        b, _, _, d = query.shape
        grouped = query.reshape(b, key.shape[1], sharing, d)
        if bias is not None and bias.shape[1] > 1:
            bias = bias.reshape(bias.shape[0], key.shape[1], sharing, bias.shape[3])
        context = F.scaled_dot_product_attention(
            grouped, key, value, attn_mask=bias, dropout_p=dropout, scale=scale
        )
        return context.flatten(1, 2).unsqueeze(2)
    if bias is not None and sharing > 1:  # no fused kernel of torch takes a bias and shared keys
        key, value = (part.repeat_interleave(sharing, 1) for part in (key, value))
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=bias,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def _softcapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    softcap: float,
    part: SequencePart | None,
) -> Tensor:
    """Compute attention with a soft cap of the scores, which are stored.

    Cap and softmax are computed in fp32: c tanh in bf16 would be wrong by up to c / 512. The query
    heads that share keys are multiplied together, so that keys and values are not repeated.
    """
    (b, n, s, d), groups, keys = query.shape, key.shape[1], key.shape[2]
    scale = d**-0.5 if scale is None else scale
    grouped = query.reshape(b, groups, n // groups * s, d)
    scores = (grouped @ key.transpose(-1, -2)).view(b, n, s, keys)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = (scores * (scale / softcap)).tanh() * softcap
    if bias is not None:
        scores = scores + bias
    elif causal:
        hidden = torch.ones(s, keys, dtype=torch.bool, device=query.device).triu(keys - s + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    weights = scores.softmax(-1).to(value.dtype)
    weights = drop(weights, dropout, part) if dropout else weights
    return (weights.view(b, groups, n // groups * s, keys) @ value).view(b, n, s, d)


def _stored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    softmax: ScaledMaskedSoftmax,
    part: SequencePart | None,
) -> Tensor:
    """Compute attention with two matmuls and a softmax between them.

    The weights are stored in the dtype of `query`.
    """
    sharing = query.shape[1] // key.shape[1]
    if sharing > 1:
        key, value = (part.repeat_interleave(sharing, 1) for part in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-1, -2)
    if bias is not None and bias.requires_grad and bias.shape != (1, *scores.shape[1:]):
        # The gradient of this bias is not only a sum over the batch, so torch computes it.
        scores, scale, bias = torch.add(bias, scores, alpha=scale), 1.0, None
    weights = softmax(scores, bias, scale=scale, causal=causal, dropout=dropout, part=part)
    return weights @ value


def _plain_softmax(
    scores: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    causal: bool = False,
    dropout: float = 0.0,
    part: SequencePart | None = None,
) -> Tensor:
    """Compute the attention weights with torch, see `ScaledMaskedSoftmax`."""
    assert not causal, "the queries of a part have a bias"
    scores = scores * scale
    weights = (scores if bias is None else scores + bias).softmax(-1)
    return drop(weights, dropout, part) if dropout else weights


def _load_cpp(*, with_softmax: bool) -> Attention:
    """Return the one-pass kernel of C++, and torch for dropout and biases.

    With the softmax of C++, it is used for dropout and trained biases.
    """
    from megacore.kernels.cpu.attention import attention, supports
    from megacore.kernels.cpu.softmax import scaled_masked_softmax

    softmax = scaled_masked_softmax if with_softmax else None

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        bias: Tensor | None,
        dropout: float,
        softcap: float | None = None,
        part: SequencePart | None = None,
        **options: Any,
    ) -> Tensor:
        assert softcap is None, "this kernel is not chosen for models with a soft cap"
        if bias is None and not dropout and supports(query, key, value):
            return attention(query, key, value, **options)
        return reference(
            query,
            key,
            value,
            bias=bias,
            dropout=dropout,
            part=part,
            softmax=softmax,
            **options,
        )

    return attend


def _load_packed_cpp() -> PackedAttention:
    from megacore.kernels.cpu.attention import packed_attention, supports_packed

    otherwise = _packed(reference)

    def attend(
        mixed: Tensor, *, causal: bool, scale: float | None, spans: Spans | None = None
    ) -> Tensor:
        if supports_packed(mixed):
            return packed_attention(mixed, causal=causal, scale=scale, spans=spans)
        return otherwise(mixed, causal=causal, scale=scale, spans=spans)

    return attend


def _load_flex() -> Attention:
    from megacore.kernels.flex import attention

    def attend(
        query: Tensor, key: Tensor, value: Tensor, *, spans: Spans | None = None, **options: Any
    ) -> Tensor:
        if spans is None or spans.blocks is None:
            return reference(query, key, value, spans=spans, **options)
        assert options["bias"] is None, "a mask in blocks replaces the bias"
        assert not options["dropout"], "this kernel is not chosen with attention dropout"
        scale, softcap = options["scale"], options.get("softcap")
        return attention(query, key, value, spans, scale=scale, softcap=softcap)

    return attend


def _load_tiled() -> Attention:
    from megacore.kernels.tiles import attention

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        bias: Tensor | None,
        dropout: float,
        spans: Spans | None = None,
        **options: Any,
    ) -> Tensor:
        if spans is None or bias is not None or dropout:
            return reference(query, key, value, bias=bias, dropout=dropout, spans=spans, **options)
        return attention(query, key, value, spans, scale=options["scale"])

    return attend


def _packed(attention: Attention) -> PackedAttention:
    """Return a kernel for packed tensors from one for three tensors."""

    def attend(
        mixed: Tensor, *, causal: bool, scale: float | None, spans: Spans | None = None
    ) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in mixed.unbind(3))
        return attention(
            query, key, value, bias=None, dropout=0.0, causal=causal, scale=scale, spans=spans
        )

    return attend


def _uncapped(obstacle: Callable[[Setting], str | None]) -> Callable[[Setting], str | None]:
    """Return an obstacle that also refuses a soft cap of the scores."""
    return lambda setting: (
        "it has no soft cap of the scores (model.attn_logit_softcapping)"
        if setting.softcapped
        else obstacle(setting)
    )


def _tiles_obstacle(setting: Setting) -> str | None:
    return None if setting.device.type == "cpu" else "it is only for CPUs"


def _softcap_obstacle(setting: Setting) -> str | None:
    return None if setting.softcapped else "it is only for scores with a soft cap"


_FLEX = "torch FlexAttention for masks"
_TORCH = "torch scaled_dot_product_attention"
_TILED = f"{_TORCH}, masks in tiles"
IMPLEMENTATIONS = (
    Implementation[Attention](
        "cpp",
        "C++ with AVX-512, torch for biases",
        partial(_load_cpp, with_softmax=True),
        _uncapped(cpp_obstacle_uncompiled),
        masks="spans",
    ),
    Implementation[Attention](
        "cpp",
        "C++ with AVX-512, torch for dropout and biases",
        partial(_load_cpp, with_softmax=False),
        _uncapped(cpp_obstacle),
        masks="spans",
    ),
    Implementation[Attention](
        "flex",
        _FLEX,
        _load_flex,
        flex_obstacle,
        lambda setting: setting.masked,
        masks="blocks",
    ),
    Implementation[Attention](
        "plain", "torch with stored scores", lambda: reference, _softcap_obstacle
    ),
    Implementation[Attention]("plain", _TILED, _load_tiled, _tiles_obstacle, masks="spans"),
    Implementation[Attention]("plain", _TORCH, lambda: reference, everywhere),
)
PACKED = (
    Implementation[PackedAttention]("cpp", "C++ with AVX-512", _load_packed_cpp, cpp_obstacle),
    Implementation[PackedAttention](
        "flex", _FLEX, lambda: _packed(_load_flex()), flex_obstacle, lambda setting: setting.masked
    ),
    Implementation[PackedAttention](
        "plain", _TILED, lambda: _packed(_load_tiled()), _tiles_obstacle
    ),
    Implementation[PackedAttention]("plain", _TORCH, lambda: _packed(reference), everywhere),
)
