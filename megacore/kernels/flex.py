"""Masks on GPUs: FlexAttention, which skips blocks in which no query sees a key.

torch.compile generates its kernels, forward and backward, with masks, soft caps and ALiBi in them
(Dong et al. 2024, arXiv:2412.05496). Its backward pass adds nothing atomically: equal inputs give
equal bits.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from megacore.config.model import ModelConfig
from megacore.kernels.spans import BLOCK, Spans


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    *,
    scale: float | None,
    softcap: float | None = None,
) -> Tensor:
    """Compute attention with spans that have blocks, see `megacore.kernels.attention.Attention`.

    Soft cap, ALiBi and softmax are fp32. A query that sees nothing has output 0. Uncompiled, this
    stores all scores.
    """
    assert spans.blocks is not None, "these spans have no blocks"
    options: Any = {"FORCE_USE_FLEX_ATTENTION": True}  # another kernel is for generation only
    mask: Any = flex.BlockMask
    first, last, slopes = spans.first, spans.last, spans.slopes
    queries, keys = query.shape[2], key.shape[2]
    if len(first) == 1:  # an index 0 would become a tensor, copied from the host
        first, last = first[0], last[0]

        def sees(b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j >= first[i]) & (j <= last[i])
    else:

        def sees(b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j >= first[b, i]) & (j <= last[b, i])

    def changed(score: Tensor, b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score + slopes[head] * (j - i - (keys - queries))
        return score

    return flex.flex_attention(
        query,
        key,
        value,
        score_mod=None if softcap is None and slopes is None else changed,
        block_mask=mask((queries, keys), *spans.blocks, (BLOCK, BLOCK), sees),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=options,
    )


def try_out(
    backend: Callable[..., Any], device: torch.device, dtype: torch.dtype, model: ModelConfig
) -> None:
    """Compile a model's attention, forward and backward, and run it on a small causal input.

    The compiler's errors are raised.
    """
    tokens, heads = 2 * BLOCK, model.num_attention_heads // model.query_groups
    query, key, value = [
        torch.zeros(
            1, count, tokens, model.head_dim, dtype=dtype, device=device, requires_grad=True
        )
        for count in (heads, 1, 1)
    ]
    alibi = model.position_embedding_type == "alibi"
    slopes = torch.ones(heads, device=device) if alibi else None
    spans = Spans.of(tokens, tokens, causal=True, device=device).blocked(tokens, tokens, slopes)
    compiled = torch.compile(attention, backend=backend, fullgraph=True, dynamic=False)
    output = compiled(query, key, value, spans, scale=None, softcap=model.attn_logit_softcapping)
    torch.autograd.grad(output, [query, key, value], torch.ones_like(output))
