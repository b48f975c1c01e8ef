"""The softmax of attention's scores, scaled, with a bias and dropout; fused as Megatron-LM's scaled_masked_softmax."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class ScaledMaskedSoftmax(Protocol):
    """dropout(softmax(scores * scale + bias))."""

    def __call__(
        self, scores: Tensor, bias: Tensor | None, *, scale: float, causal: bool = False, dropout: float = 0.0
    ) -> Tensor:
        """Weights of scores [b, n, s, s_k].

        Args:
            scores: products of queries and keys.
            bias: [b or 1, n or 1, s or 1, s_k]; one of [1, n, s, s_k] may be trained.
            scale: of the scores.
            causal: whether a query, of which the last is the last key's, sees only the keys up to its own.
            dropout: probability of dropping a weight.
        """
        ...


def reference(
    scores: Tensor, bias: Tensor | None, *, scale: float, causal: bool = False, dropout: float = 0.0
) -> Tensor:
    """See `ScaledMaskedSoftmax`."""
    scores = scores * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        queries, keys = scores.shape[-2:]
        unseen = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
        scores = scores.masked_fill(unseen, -torch.inf)
    weights = scores.softmax(-1)
    return F.dropout(weights, dropout) if dropout else weights
