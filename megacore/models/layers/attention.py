"""Self-attention and cross attention (Vaswani et al. 2017), divided over ranks by heads."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megacore.config.model import ModelConfig
from megacore.errors import ParallelLayoutError
from megacore.models.layers.norm import make_head_norm, parameters_of
from megacore.models.layers.shared import LayerSetup, Shared
from megacore.parallel.context import dropout_part
from megacore.parallel.mesh import ParallelGroup
from megacore.parallel.rng import context_parallel_region, seed_dropout, tensor_parallel_region
from megacore.tensor_parallel import ColumnParallelLinear, RowParallelLinear, column_parallel
from megacore.tensor_parallel.mappings import (
    gather_from_context_parallel_region,
    gather_within_tensor_parallel_region,
)
from megacore.tensor_parallel.partition import divide


class _Attention(nn.Module):
    """Base of attention layers: this rank's heads, the scores, and the output projection."""

    part: str | None = None
    """Name of the layer's dropout stream; None is the layer's default."""

    def __init__(
        self,
        model: ModelConfig,
        setup: LayerSetup,
        number: int,
        *,
        causal: bool,
        scale: float | None,
        recompute: bool,
    ) -> None:
        super().__init__()
        self.number = number
        self.causal = causal
        self.scale = scale
        self.recompute = recompute
        self.kernels, self.tp = setup.kernels, setup.tp
        self.sequence_parallel = setup.sequence_parallel
        attention, softcap = self.kernels.attention, model.attn_logit_softcapping
        self.attention = attention if softcap is None else partial(attention, softcap=softcap)
        self.head_dim = model.head_dim
        self.heads = divide(model.num_attention_heads, self.tp, "model.num_attention_heads")
        self.attention_dropout = model.attention_dropout
        self.dense = RowParallelLinear(
            model.attention_size,
            model.hidden_size,
            bias=model.add_bias_linear,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            device=setup.device,
        )

    def _column(
        self, model: ModelConfig, rows: int, device: torch.device | str
    ) -> ColumnParallelLinear:
        """Return a linear layer that projects to heads."""
        return ColumnParallelLinear(
            model.hidden_size,
            rows,
            bias=model.qkv_bias,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            device=device,
        )

    def _projected(self, attend: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Apply `attend` to its inputs, and project the result [b, n/t, s, d] to [b, s, h]."""
        if self.recompute and self.training and torch.is_grad_enabled():
            context = checkpoint(attend, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            context = attend(*inputs)
        return self.dense(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_seed: int | None,
        masks: Shared,
    ) -> Tensor:
        """Map q, k, v [b, n/t, s, d] (k, v per group) to the attention output [b, n/t, s, d].

        With context parallelism keys and values are gathered here, so that selective recomputation
        keeps only this rank's.
        """
        if masks.cp.size > 1:
            key, value = gather_from_context_parallel_region(key, value, masks.cp)
        return self._scores(query, key, value, dropout_seed, masks)

    def seed(self, dropout_seed: int | None) -> None:
        """Seed the dropout of this layer's attention for a micro batch; not part of a graph."""
        seed_dropout(dropout_seed, self.number, self.part)

    def _scores(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_seed: int | None,
        masks: Shared,
    ) -> Tensor:
        """Attend to all keys, with dropout in training.

        Fused kernels of GPUs draw in an order of their own, other ones by position.
        """
        unmasked = masks.bias is None and masks.spans is None
        attend = partial(
            self.attention,
            query,
            key,
            value,
            bias=masks.bias,
            causal=self.causal and unmasked and query.shape[2] == key.shape[2],
            scale=self.scale,
            spans=masks.spans,
        )
        if not (self.training and self.attention_dropout):
            return attend(dropout=0.0)
        if self.part is not None or self.recompute or not torch.compiler.is_compiling():
            self.seed(dropout_seed)
        with tensor_parallel_region(self.tp, query):
            if masks.cp.size == 1:
                return attend(dropout=self.attention_dropout)
            if query.is_cuda:
                with context_parallel_region(masks.cp, query):
                    return attend(dropout=self.attention_dropout)
            _, part = dropout_part(query.shape[2], masks.cp)
            return attend(dropout=self.attention_dropout, part=part)


class SelfAttention(_Attention):
    """Self-attention with n query heads and g key-value heads (Ainslie et al. 2023).

    n / g query heads share each key-value head.

    With g = n, one layer projects to q, k and v. The rows of query_key_value are
    [head][q, k, v][d], so that a rank's part consists of whole heads. Otherwise the rows of query
    are [head][d] and those of key_value are [group][k, v][d]. With fewer groups than ranks, each
    rank computes a part of all groups, gathers the other parts and selects the group of its heads.

    Args:
        model: model configuration.
        setup: kernels, ranks and device; with sequence parallelism input and output are this
            rank's part of the sequence.
        number: the layer's index in the whole model.
        causal: a token sees only itself and previous tokens.
        scale: factor on the scores; None means 1 / sqrt(d).
        recompute: keep only q, k and v for the backward pass, not what is computed from them.

    Raises:
        ParallelLayoutError: heads or groups cannot be divided over the ranks.
    """

    def __init__(
        self,
        model: ModelConfig,
        setup: LayerSetup,
        number: int,
        *,
        causal: bool = True,
        scale: float | None = None,
        recompute: bool,
    ) -> None:
        super().__init__(model, setup, number, causal=causal, scale=scale, recompute=recompute)
        self.groups = model.query_groups
        self.grouped = model.query_groups != model.num_attention_heads
        if self.grouped:
            _check_groups(self.groups, self.tp)
            self.query = self._column(model, model.attention_size, setup.device)
            self.key_value = self._column(model, 2 * self.groups * self.head_dim, setup.device)
        else:
            self.query_key_value = self._column(model, 3 * model.attention_size, setup.device)
        self.q_layernorm = make_head_norm(model, model.num_attention_heads, setup)
        self.k_layernorm = make_head_norm(model, self.groups, setup)
        softcapped = model.attn_logit_softcapping is not None
        self.packs = not (self.grouped or model.qk_layernorm or softcapped)
        """True if nothing changes q, k and v, and the packed kernel computes the scores."""

    def forward(
        self, x: Tensor, dropout_seed: int | None = None, shared: Shared | None = None
    ) -> Tensor:
        """Map [b, s, h] to [b, s, h]; with sequence parallelism both are [b, s/t, h]."""
        shared = shared or Shared()
        if self._takes_packed(shared):
            mixed: Tensor = self.query_key_value(x)
            packed = mixed.view(*mixed.shape[:2], self.heads, 3, self.head_dim)
            return self._projected(partial(self._attend_packed, shared=shared), packed)
        query, key, value = self.projections(x)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        if shared.rotary is not None:
            query, key = (
                self.kernels.rotate(query, shared.rotary),
                self.kernels.rotate(key, shared.rotary),
            )
        if shared.cache is not None:
            key, value = shared.cache.append(self.number, key, value)
        attend = partial(self._attend, dropout_seed=dropout_seed, masks=shared)
        return self._projected(attend, query, key, value)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_seed: int | None,
        shared: Shared,
    ) -> Tensor:
        """Map q [b, n/t, s/cp, d] to [b, n/t, s/cp, d] as the layer does, with gathered keys.

        k and v have the groups of the queries' heads, and the tokens of whole sequences.
        """
        if self._takes_packed(shared):
            packed = torch.stack([part.transpose(1, 2) for part in (query, key, value)], 3)
            return self._attend_packed(packed, shared)
        return self._scores(query, key, value, dropout_seed, shared)

    @property
    def local_groups(self) -> int:
        """Number of key-value heads of this rank's query heads."""
        return max(1, self.groups // self.tp.size)

    def partial_gradients(self) -> frozenset[str]:
        """Return the norms' parameters, which see only the rank's heads."""
        return (
            parameters_of(self, "q_layernorm", "k_layernorm") if self.tp.size > 1 else frozenset()
        )

    def _takes_packed(self, shared: Shared) -> bool:
        """Return True if attention can use q, k and v directly in their packed projection.

        This requires that nothing changes them, that there is no bias, cap, cache or dropout, and
        that all keys are on this rank.
        """
        unmodified = shared.bias is None and shared.rotary is None and shared.cache is None
        dropout = self.training and self.attention_dropout
        return unmodified and self.packs and not dropout and shared.cp.size == 1

    def _attend_packed(self, packed: Tensor, shared: Shared) -> Tensor:
        """Map [b, s, n/t, 3, d] to the attention output [b, n/t, s, d]."""
        causal = self.causal and shared.spans is None
        return self.kernels.packed_attention(
            packed, causal=causal, scale=self.scale, spans=shared.spans
        )

    def projections(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return this rank's queries [b, s, n/t, d], and the keys and values of their groups.

        Keys and values are [b, s, g/t or 1, d] each.
        """
        if not self.grouped:
            mixed: Tensor = self.query_key_value(x)
            return mixed.view(*mixed.shape[:2], self.heads, 3, self.head_dim).unbind(3)
        layers = [(layer.weight, layer.bias) for layer in (self.query, self.key_value)]
        query, mixed = column_parallel(x, layers, self.tp, self.sequence_parallel)
        if self.groups < self.tp.size:
            mixed = gather_within_tensor_parallel_region(mixed, self.tp)
            group = self.tp.rank * self.groups // self.tp.size
            mixed = mixed.narrow(-1, group * 2 * self.head_dim, 2 * self.head_dim)
        shape = mixed.shape[:2]
        key, value = mixed.view(*shape, -1, 2, self.head_dim).unbind(3)
        return query.view(*shape, self.heads, self.head_dim), key, value


class WindowedSelfAttention(SelfAttention):
    """Self-attention with the bias of the layers that have a sliding window, where not all do."""

    def forward(
        self, x: Tensor, dropout_seed: int | None = None, shared: Shared | None = None
    ) -> Tensor:
        """Map [b, s, h] to [b, s, h]; with sequence parallelism both are [b, s/t, h]."""
        assert shared is not None
        assert shared.windowed is not None, "a stack without the windows' bias"
        return super().forward(x, dropout_seed, shared.windowed)


class CrossAttention(_Attention):
    """Attention of a decoder's tokens to the encoder's output, with as many heads for both.

    The rows of query are [head][d], those of key_value [head][k, v][d].

    Args:
        model: model configuration.
        setup: kernels, ranks and device; with sequence parallelism input, memory and output are
            this rank's part of their sequence.
        number: the layer's index in the whole model.
        scale: factor on the scores; None means 1 / sqrt(d).
        recompute: keep only q, k and v for the backward pass, not what is computed from them.

    Raises:
        ParallelLayoutError: heads cannot be divided over the ranks.
    """

    part = "inter_attention"

    def __init__(
        self,
        model: ModelConfig,
        setup: LayerSetup,
        number: int,
        *,
        scale: float | None = None,
        recompute: bool,
    ) -> None:
        super().__init__(model, setup, number, causal=False, scale=scale, recompute=recompute)
        self.query = self._column(model, model.attention_size, setup.device)
        self.key_value = self._column(model, 2 * model.attention_size, setup.device)

    def forward(self, x: Tensor, dropout_seed: int | None, shared: Shared) -> Tensor:
        """Map [b, s, h] to [b, s, h]; with sequence parallelism both are [b, s/t, h]."""
        assert shared.memory is not None
        assert shared.memory_masks is not None
        query = self.query(x)
        project = partial(self._keys_and_values, shared.memory)
        key, value = (
            project() if shared.cache is None else shared.cache.memory(self.number, project)
        )
        query = query.view(*query.shape[:2], self.heads, self.head_dim).transpose(1, 2)
        attend = partial(self._attend, dropout_seed=dropout_seed, masks=shared.memory_masks)
        return self._projected(attend, query, key, value)

    def _keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Project the encoder's output [b, s_e, h] to keys and values [b, n/t, s_e, d]."""
        mixed = self.key_value(memory)
        key, value = (
            mixed.view(*mixed.shape[:2], self.heads, 2, self.head_dim).transpose(1, 2).unbind(3)
        )
        return key, value


def _check_groups(groups: int, tp: ParallelGroup) -> None:
    if max(groups, tp.size) % min(groups, tp.size):
        raise ParallelLayoutError(
            f"model.num_query_groups {groups} cannot be divided over the tensor parallel size "
            f"{tp.size}: one must be a multiple of the other"
        )
