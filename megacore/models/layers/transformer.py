"""Transformer layers with norms before each branch or after each sum.

See Radford et al. 2019 for the former, Vaswani et al. 2017 for the latter.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megacore.config.model import ModelConfig
from megacore.config.train import Recompute
from megacore.models.layers.attention import CrossAttention, SelfAttention, WindowedSelfAttention
from megacore.models.layers.attention_bias import RelativeBias
from megacore.models.layers.mlp import MLP
from megacore.models.layers.norm import make_norm, parameters_of
from megacore.models.layers.shared import LayerSetup, Shared
from megacore.parallel.context import dropout_part
from megacore.parallel.mesh import SINGLE_RANK
from megacore.parallel.rng import seed_dropout, tensor_parallel_region

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "post_inter_attention_layernorm",
    "output_layernorm",
    "post_self_attn_layernorm",
    "post_mlp_layernorm",
)


_BRANCH_NORMS = ("sandwich", "reordered")
"""Values of norm_position with a norm after each branch."""


def recomputed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply `function` to `x`, and keep only `x` for the backward pass."""
    return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]


class TransformerLayer(nn.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))).

    A decoder's layer has cross attention in between. With `norm_position` post each step is
    norm(x + dropout(branch(x))). With `parallel_residual` both branches read x and are added
    together.

    Args:
        model: model configuration.
        setup: kernels, ranks and device; with sequence parallelism input, norms, dropout and output
            are this rank's part of the sequence.
        number: the layer's index in the whole model.
        causal: a token sees only itself and previous tokens.
        cross_attention: add attention to an encoder's output.
        scale: factor on attention scores; None means 1 / sqrt(d).
        inner_dropout: see `MLP`.
        recompute: "full" keeps only the layer's input for the backward pass, which runs the layer
            again with the same dropout (Chen et al. 2016, arXiv:1604.06174); "selective" recomputes
            only attention from q, k, v to its output (Korthikanti et al. 2022, arXiv:2205.05198).
    """

    def __init__(
        self,
        model: ModelConfig,
        setup: LayerSetup,
        number: int,
        *,
        causal: bool = True,
        cross_attention: bool = False,
        scale: float | None = None,
        inner_dropout: float = 0.0,
        recompute: Recompute,
    ) -> None:
        super().__init__()
        self.number = number
        self.recompute = recompute
        self.recomputed: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] = recomputed
        """Function that runs the layer with full recomputation; an engine may replace it."""
        self.kernels, self.tp = setup.kernels, setup.tp
        self.sequence_parallel = setup.sequence_parallel
        self.hidden_dropout = model.hidden_dropout
        self.dropout = bool(model.hidden_dropout or model.attention_dropout)
        self.parallel_residual = model.parallel_residual
        self.post_norm = model.norm_position == "post"
        norm = partial(make_norm, model, model.hidden_size, setup)
        attention: dict[str, Any] = {"scale": scale, "recompute": recompute == "selective"}
        reordered = model.norm_position == "reordered"
        windowed = model.window_attn_skip_freq is not None and model.has_window(number)
        kind = WindowedSelfAttention if windowed else SelfAttention
        self.input_layernorm = None if self.post_norm or reordered else norm()
        self.self_attention = kind(model, setup, number, causal=causal, **attention)
        self.post_attention_layernorm = nn.Identity() if reordered else norm()
        self.inter_attention = (
            CrossAttention(model, setup, number, **attention) if cross_attention else None
        )
        self.post_inter_attention_layernorm = norm() if cross_attention else None
        self.mlp = MLP(model, setup, inner_dropout=inner_dropout)
        self.output_layernorm = norm() if self.post_norm else None
        normed_branches = model.norm_position in _BRANCH_NORMS
        self.post_self_attn_layernorm = norm() if normed_branches else None
        self.post_mlp_layernorm = norm() if normed_branches else None

    def forward(
        self, x: Tensor, dropout_seed: int | None = None, shared: Shared | None = None
    ) -> Tensor:
        """Map [b, s, h] to [b, s, h]; with sequence parallelism both are [b, s/t, h]."""
        if self.recompute == "full" and self.training and torch.is_grad_enabled():
            return self.recomputed(
                partial(self._seeded, dropout_seed=dropout_seed, shared=shared), x
            )
        return self._seeded(x, dropout_seed, shared)

    def partial_gradients(self) -> frozenset[str]:
        """Return the norms' parameters, whose gradients are partial with sequence parallelism."""
        return parameters_of(self, *_NORMS) if self.sequence_parallel else frozenset()

    def _seeded(self, x: Tensor, dropout_seed: int | None, shared: Shared | None) -> Tensor:
        """Seed this layer's dropout for a micro batch and compute the layer.

        Recomputation calls this function again.
        """
        if self.training and self.dropout:
            seed_dropout(dropout_seed, self.number)
        return self.branches(x, dropout_seed, shared)

    def branches(self, x: Tensor, dropout_seed: int | None, shared: Shared | None) -> Tensor:
        """Compute the whole layer, [b, s, h] to [b, s, h].

        This function is compiled, as one graph where possible. So its dropout is already seeded.
        """
        if self.input_layernorm is None:
            return self._post_norm(x, dropout_seed, shared)
        attended = self.self_attention(self.input_layernorm(x), dropout_seed, shared)
        if self.parallel_residual:
            output = self.mlp(self.post_attention_layernorm(x))
            return self._add(self._add(x, attended, shared), output, shared)
        x = self._add(x, attended, shared)
        normed = self.post_attention_layernorm(x)
        if self.inter_attention is not None and self.post_inter_attention_layernorm is not None:
            x = self._add(x, self.inter_attention(normed, dropout_seed, shared), shared)
            normed = self.post_inter_attention_layernorm(x)
        return self._add(x, self.mlp(normed), shared)

    def _post_norm(self, x: Tensor, dropout_seed: int | None, shared: Shared | None) -> Tensor:
        assert self.output_layernorm is not None
        x = self.post_attention_layernorm(
            self._add(x, self.self_attention(x, dropout_seed, shared), shared)
        )
        return self.output_layernorm(self._add(x, self.mlp(x), shared))  # type: ignore[no-any-return]

    def _add(self, x: Tensor, branch: Tensor, shared: Shared | None) -> Tensor:
        """Return x + dropout(branch)."""
        if not (self.training and self.hidden_dropout):
            return self.kernels.bias_dropout_add(branch, None, x, 0.0)
        cp = SINGLE_RANK if shared is None else shared.cp
        rank, part = dropout_part(
            x.shape[1], cp, self.tp if self.sequence_parallel else SINGLE_RANK
        )
        with tensor_parallel_region(self.tp, x, rank) if self.sequence_parallel else nullcontext():
            return self.kernels.bias_dropout_add(branch, None, x, self.hidden_dropout, part)


class SandwichLayer(TransformerLayer):
    """x + dropout(norm(attention(norm(x)))), then x + dropout(norm(mlp(norm(x)))).

    See Ding et al. 2021, arXiv:2105.13290. The norms before and after a branch are Megatron core's
    `input_layernorm` and `post_self_attn_layernorm`, and before and after the MLP
    `post_attention_layernorm` (in Megatron core `pre_mlp_layernorm`) and `post_mlp_layernorm`. With
    `norm_position` reordered there are no norms before the branches (Walsh et al. 2024,
    arXiv:2501.00656).
    """

    def branches(self, x: Tensor, dropout_seed: int | None, shared: Shared | None) -> Tensor:
        """Compute the whole layer, [b, s, h] to [b, s, h]."""
        assert self.post_self_attn_layernorm is not None
        assert self.post_mlp_layernorm is not None
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        attended = self.self_attention(normed, dropout_seed, shared)
        x = self._add(x, self.post_self_attn_layernorm(attended), shared)
        output = self.mlp(self.post_attention_layernorm(x))
        return self._add(x, self.post_mlp_layernorm(output), shared)


class Transformer(nn.Module):
    """Consecutive layers of a stack, named by their indices in the whole stack.

    The part with the last layer has the final norm.

    Args:
        model: model configuration.
        setup: kernels, ranks and device of each layer.
        layers: indices of the layers.
        final_layernorm: add the final norm; ignored with norms after sums, which need none.
        recompute: part that the first `recompute_num_layers` layers recompute.
        recompute_num_layers: number of layers that recompute; None means all.
        causal: a token sees only itself and previous tokens.
        cross_attention: add attention to an encoder's output.
        relative_bias: add T5's table of relative positions, `relative_attention_bias`; the creator
            of `Shared` adds it to the scores.
        scale: factor on attention scores; None means 1 / sqrt(d).
        inner_dropout: see `MLP`.
        first_number: index of the stack's first layer among all layers of the model, used as its
            dropout stream.
    """

    def __init__(
        self,
        model: ModelConfig,
        setup: LayerSetup,
        layers: range,
        *,
        final_layernorm: bool,
        recompute: Recompute = "none",
        recompute_num_layers: int | None = None,
        causal: bool = True,
        cross_attention: bool = False,
        relative_bias: bool = False,
        scale: float | None = None,
        inner_dropout: float = 0.0,
        first_number: int = 0,
    ) -> None:
        super().__init__()
        self.sequence_parallel = setup.sequence_parallel
        kind = SandwichLayer if model.norm_position in _BRANCH_NORMS else TransformerLayer
        recomputed = layers if recompute_num_layers is None else layers[:recompute_num_layers]
        self.layers = nn.ModuleDict(
            {
                str(index): kind(
                    model,
                    setup,
                    first_number + index,
                    causal=causal,
                    cross_attention=cross_attention,
                    scale=scale,
                    inner_dropout=inner_dropout,
                    recompute=recompute if index in recomputed else "none",
                )
                for index in layers
            }
        )
        self.relative_attention_bias = (
            RelativeBias(
                model.relative_attention_num_buckets,
                model.relative_attention_max_distance,
                model.num_attention_heads,
                bidirectional=not causal,
                tp=setup.tp,
                device=setup.device,
            )
            if relative_bias
            else None
        )
        has_norm = final_layernorm and model.norm_position != "post"
        self.final_layernorm = make_norm(model, model.hidden_size, setup) if has_norm else None

    def forward(
        self, x: Tensor, dropout_seed: int | None = None, *, shared: Shared | None = None
    ) -> Tensor:
        """Map [b, s, h] to [b, s, h]; with sequence parallelism both are [b, s/t, h]."""
        for layer in self.layers.values():
            x = layer(x, dropout_seed, shared)
        return x if self.final_layernorm is None else self.final_layernorm(x)

    def partial_gradients(self) -> frozenset[str]:
        """Return the final norm's parameters; with sequence parallelism, gradients are partial."""
        return parameters_of(self, "final_layernorm") if self.sequence_parallel else frozenset()
