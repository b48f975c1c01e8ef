"""Causal self-attention (Vaswani et al. 2017), divided by heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.parallel.mesh import ParallelGroup
from megacore.parallel.rng import tensor_parallel_region
from megacore.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megacore.tensor_parallel.partition import divide


class SelfAttention(nn.Module):
    """Multi-head causal attention; the rows of query_key_value are [head][q, k, v][d], so that a part is whole heads.

    Raises ParallelLayoutError when the heads cannot be divided over the ranks.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        attention_dropout: float,
        tp: ParallelGroup,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.heads = divide(num_attention_heads, tp, "model.num_attention_heads")
        self.head_dim = hidden_size // num_attention_heads
        self.attention_dropout = attention_dropout
        self.query_key_value = ColumnParallelLinear(hidden_size, 3 * hidden_size, tp=tp, device=device)
        self.dense = RowParallelLinear(hidden_size, hidden_size, tp=tp, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        batch, length, _ = x.shape
        mixed = self.query_key_value(x).view(batch, length, self.heads, 3, self.head_dim)
        query, key, value = mixed.transpose(1, 2).unbind(3)  # each [b, n/t, s, d]
        context = self._attend(query, key, value).transpose(1, 2)
        return self.dense(context.reshape(batch, length, self.heads * self.head_dim))  # type: ignore[no-any-return]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not (self.training and self.attention_dropout):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        with tensor_parallel_region(self.tp, query):
            return F.scaled_dot_product_attention(query, key, value, dropout_p=self.attention_dropout, is_causal=True)
