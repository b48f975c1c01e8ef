"""Transformer layers with the norm before each branch (pre-LN, Radford et al. 2019)."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megacore.config.model import ModelConfig
from megacore.config.train import Recompute
from megacore.models.layers.attention import SelfAttention
from megacore.models.layers.mlp import MLP
from megacore.models.masks import attention_bias
from megacore.parallel.mesh import ParallelGroup
from megacore.parallel.rng import seed_dropout, tensor_parallel_region


class TransformerLayer(nn.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))).

    Args:
        model: the architecture.
        number: the layer's index in the whole model.
        recompute: "full" keeps only the layer's input for the backward pass, which runs the layer once more with
            the same dropout (Chen et al. 2016, arXiv:1604.06174); "selective" leaves out only what attention
            computes between q, k, v and its output (Korthikanti et al. 2022, arXiv:2205.05198).
        tp: the ranks that share the layer.
        sequence_parallel: input, norms, dropout and output are of this rank's part of the sequence.
        device: where the parameters are.
    """

    def __init__(
        self,
        model: ModelConfig,
        number: int,
        *,
        recompute: Recompute,
        tp: ParallelGroup,
        sequence_parallel: bool,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        hidden = model.hidden_size
        self.number = number
        self.recompute = recompute
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.hidden_dropout = model.hidden_dropout
        self.input_layernorm = nn.LayerNorm(hidden, eps=model.layernorm_epsilon, device=device)
        self.self_attention = SelfAttention(
            model,
            number,
            recompute=recompute == "selective",
            tp=tp,
            sequence_parallel=sequence_parallel,
            device=device,
        )
        self.post_attention_layernorm = nn.LayerNorm(hidden, eps=model.layernorm_epsilon, device=device)
        self.mlp = MLP(hidden, model.ffn_size, tp=tp, sequence_parallel=sequence_parallel, device=device)

    def forward(self, x: Tensor, dropout_seed: int | None = None, bias: Tensor | None = None) -> Tensor:
        """[b, s, h] -> [b, s, h], with sequence parallelism [b, s/t, h] on both sides; `bias` see `SelfAttention`."""
        if self.recompute == "full" and self.training and torch.is_grad_enabled():
            return checkpoint(self._both, x, dropout_seed, bias, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
        return self._both(x, dropout_seed, bias)

    def partial_gradients(self) -> frozenset[str]:
        """With sequence parallelism each rank's norms see its own positions."""
        norms = ("input_layernorm", "post_attention_layernorm") if self.sequence_parallel else ()
        return frozenset(f"{norm}.{kind}" for norm in norms for kind in ("weight", "bias"))

    def _both(self, x: Tensor, dropout_seed: int | None, bias: Tensor | None) -> Tensor:
        if self.training and self.hidden_dropout:
            seed_dropout(dropout_seed, self.number)
        x = self._add(x, self.self_attention(self.input_layernorm(x), dropout_seed, bias))
        return self._add(x, self.mlp(self.post_attention_layernorm(x)))

    def _add(self, x: Tensor, branch: Tensor) -> Tensor:
        """X + dropout(branch)."""
        if self.training and self.hidden_dropout:
            with tensor_parallel_region(self.tp, x) if self.sequence_parallel else nullcontext():
                branch = F.dropout(branch, self.hidden_dropout)
        return x + branch


class Transformer(nn.Module):
    """Consecutive layers, under their indices in the whole model, and the final norm where the last of them is.

    Args:
        model: the architecture.
        layers: the indices.
        final_layernorm: whether the norm is here.
        recompute: what the first `recompute_num_layers` of the layers (None: all) compute once more.
        recompute_num_layers: see there.
        tp: the ranks that share each layer.
        sequence_parallel: activations between layers are of this rank's part of the sequence.
        device: where the parameters are.
    """

    def __init__(
        self,
        model: ModelConfig,
        layers: range,
        *,
        final_layernorm: bool,
        recompute: Recompute,
        recompute_num_layers: int | None,
        tp: ParallelGroup,
        sequence_parallel: bool,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        recomputed = layers if recompute_num_layers is None else layers[:recompute_num_layers]
        self.layers = nn.ModuleDict(
            {
                str(number): TransformerLayer(
                    model,
                    number,
                    recompute=recompute if number in recomputed else "none",
                    tp=tp,
                    sequence_parallel=sequence_parallel,
                    device=device,
                )
                for number in layers
            }
        )
        self.final_layernorm = (
            nn.LayerNorm(model.hidden_size, eps=model.layernorm_epsilon, device=device) if final_layernorm else None
        )

    def forward(self, x: Tensor, dropout_seed: int | None = None, *, documents: Tensor | None = None) -> Tensor:
        """[b, s, h] -> [b, s, h], with sequence parallelism [b, s/t, h] on both sides.

        `documents` [b, s] are numbers of documents; a token sees none but its own. All layers share one mask.
        """
        bias = None if documents is None else attention_bias(documents, x.dtype)
        for layer in self.layers.values():
            x = layer(x, dropout_seed, bias)
        return x if self.final_layernorm is None else self.final_layernorm(x)

    def partial_gradients(self) -> frozenset[str]:
        """With sequence parallelism each rank's norm sees its own positions."""
        here = self.sequence_parallel and self.final_layernorm is not None
        return frozenset({"final_layernorm.weight", "final_layernorm.bias"} if here else ())
