"""Transformer layers with the norm before each branch (pre-LN, Radford et al. 2019)."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megacore.config.model import ModelConfig
from megacore.models.layers.attention import SelfAttention
from megacore.models.layers.mlp import MLP
from megacore.parallel.mesh import ParallelGroup


class TransformerLayer(nn.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x)))."""

    def __init__(self, model: ModelConfig, *, tp: ParallelGroup, device: torch.device | str) -> None:
        super().__init__()
        hidden = model.hidden_size
        self.hidden_dropout = model.hidden_dropout
        self.input_layernorm = nn.LayerNorm(hidden, eps=model.layernorm_epsilon, device=device)
        self.self_attention = SelfAttention(
            hidden, model.num_attention_heads, attention_dropout=model.attention_dropout, tp=tp, device=device
        )
        self.post_attention_layernorm = nn.LayerNorm(hidden, eps=model.layernorm_epsilon, device=device)
        self.mlp = MLP(hidden, model.ffn_size, tp=tp, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        x = x + F.dropout(self.self_attention(self.input_layernorm(x)), self.hidden_dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), self.hidden_dropout, self.training)


class Transformer(nn.Module):
    """The layers and the final norm.

    With recompute "full" a layer keeps only its input for the backward pass, which runs the layer once more with the
    same dropout (Chen et al. 2016, arXiv:1604.06174).
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        recompute: Literal["none", "full"],
        tp: ParallelGroup,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.layers = nn.ModuleList(TransformerLayer(model, tp=tp, device=device) for _ in range(model.num_layers))
        self.final_layernorm = nn.LayerNorm(model.hidden_size, eps=model.layernorm_epsilon, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        recompute = self.recompute == "full" and self.training and torch.is_grad_enabled()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        return self.final_layernorm(x)  # type: ignore[no-any-return]
