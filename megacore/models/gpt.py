"""Causal language models with Megatron-LM's parameter names.

These are GPT-2 (Radford et al. 2019) and its descendants. Llama and GPT-NeoX differ only by values
of the configuration: norms, positions, activation, heads, biases.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megacore.config.rope import same_up_to
from megacore.kernels.spans import Spans
from megacore.models.base import LM_LOSS, Losses, Model
from megacore.models.inputs import ModelInput
from megacore.models.layers.attention_bias import alibi_slopes, attention_mask
from megacore.models.layers.rotary import Rotary
from megacore.models.layers.shared import KeyValueCache, LayerSetup, Shared, positions_of
from megacore.parallel.context import part_of_rank, positions_of_rank
from megacore.tensor_parallel import column_parallel
from megacore.tensor_parallel.mappings import gather_from_tensor_parallel_region


class GPTModel(Model):
    """A causal language model, or a chunk of one."""

    def _build(self, setup: LayerSetup) -> None:
        self.encoder = self._stack(
            setup,
            self.chunk.layers,
            final_layernorm=self.has_head,
            recomputed=self.recompute_num_layers,
            scale=self.model.score_scale,
        )
        self._slopes: Tensor | None = None
        self._rotary = Rotary(self.model) if self.model.position_embedding_type == "rope" else None

    def forward(
        self,
        tokens: Tensor,
        *,
        position_ids: Tensor | None = None,
        present: Tensor | None = None,
        cache: KeyValueCache | None = None,
        last: int | None = None,
    ) -> Tensor:
        """Return the whole model's logits of the next token, gathered over the ranks.

        Args:
            tokens: ids [b, s].
            position_ids: positions [b, s]; None continues after the tokens in the cache.
            present: bool mask [b, s], False for padding. With a cache, s includes its tokens.
            cache: keys and values of the previous tokens; those of `tokens` are added. None if
                rotations depend on the length of the sequence, beyond `same_up_to` tokens.
            last: number of tokens at the end whose logits are computed; None means all.

        Returns:
            Logits [b, s, v], or [b, last, v].
        """
        assert self.has_embedding
        assert self.has_head
        if cache is not None and position_ids is None:
            position_ids = positions_of(cache.length, tokens.shape[1], tokens.device)
        hidden = self.embedding(tokens, position_ids=position_ids)
        shared = self.shared(tokens.shape[1], position_ids, hidden, present=present, cache=cache)
        hidden = self.encoder(hidden, shared=shared)
        if cache is not None:
            cache.advance(tokens.shape[1])
        if last is not None:
            assert not self.encoder.sequence_parallel, "every rank has other positions"
            hidden = hidden[:, -last:]
        return gather_from_tensor_parallel_region(self._local_logits(hidden), self.tp)

    def run(
        self,
        inputs: ModelInput | None,
        hidden: Tensor | None = None,
        *,
        dropout_seed: int | None = None,
    ) -> Tensor | Losses:
        """Return activations [b, s, h], or the loss of each label [b, s] if the chunk has the head.

        With sequence parallelism activations are [b, s/t, h]. Losses are fp32; the logits are not
        gathered for them.
        """
        positions = None if inputs is None else inputs.position_ids
        if self.has_embedding:
            assert inputs is not None
            local = self._local_positions(inputs)
            hidden = self.embedding(inputs.tokens, dropout_seed, position_ids=local, cp=self.cp)
        assert hidden is not None
        documents = None if inputs is None else inputs.documents
        length = hidden.shape[1] * (self.tp.size if self.sequence_parallel else 1)
        shared = self.shared_in_training(length * self.cp.size, positions, hidden, documents)
        hidden = self.encoder(hidden, dropout_seed, shared=shared)
        if not self.has_head:
            return hidden
        assert inputs is not None
        return {LM_LOSS: self._label_losses(hidden, inputs)}

    def _local_positions(self, inputs: ModelInput) -> Tensor | None:
        """Return the positions [b or 1, s/cp] of this rank's tokens; None counts from 0."""
        if inputs.position_ids is not None:
            return part_of_rank(inputs.position_ids, self.cp)
        if self.cp.size == 1:
            return None
        length = inputs.tokens.shape[1] * self.cp.size
        return positions_of_rank(length, self.cp, inputs.tokens.device)[None]

    def shared_in_training(
        self, length: int, position_ids: Tensor | None, like: Tensor, documents: Tensor | None
    ) -> Shared:
        """Return the values that all layers share in training, see `_divided`."""
        if self.cp.size > 1:
            return self._divided(length, position_ids, like, documents)
        return self.shared(length, position_ids, like, documents=documents)

    def _divided(
        self, length: int, position_ids: Tensor | None, like: Tensor, documents: Tensor | None
    ) -> Shared:
        """Return the values that all layers share, for this rank's part of every sequence.

        Every rank attends to the keys of whole sequences, in order.

        Args:
            length: tokens of a whole sequence (s).
            position_ids: positions [b, s] of whole sequences; None means 0 … s-1.
            like: tensor with the type and device of the hidden states.
            documents: document numbers [b, s] of whole sequences.
        """
        model, device = self.model, like.device
        queries, rotary = positions_of_rank(length, self.cp, device), None
        form = self._mask_form()
        if self._rotary is not None:
            whole = positions_of(0, length, device) if position_ids is None else position_ids
            rotary = self._rotary.tables(whole, like.dtype, queries)

        def mask(window: int | None) -> tuple[Tensor | None, Spans | None]:
            """Return the spans, or the bias that all layers share; every token sees itself."""
            spans = Spans.of(
                length, length, causal=True, device=device, documents=documents, window=window
            ).at(queries)
            if form == "dense":
                return spans.bias(length, like.dtype), None
            return None, spans.blocked(len(queries), length) if form == "blocks" else spans

        return self._by_window(mask, model.sliding_window, rotary=rotary, cp=self.cp)

    def shared(
        self,
        queries: int,
        position_ids: Tensor | None,
        like: Tensor,
        *,
        documents: Tensor | None = None,
        present: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Shared:
        """Return the values that all layers share for `queries` new tokens.

        Args:
            queries: number of tokens of the whole sequence after those in the cache.
            position_ids: see `forward`.
            like: tensor with the type and device of the hidden states.
            documents: document numbers [b, s].
            present: see `forward`.
            cache: see `forward`.
        """
        model, device = self.model, like.device
        keys = queries + (0 if cache is None else cache.length)
        same = same_up_to(model.rope_scaling)
        assert cache is None or same is None or keys <= same, "keys are rotated for fewer tokens"
        rotary = None
        if self._rotary is not None:
            if position_ids is None:
                position_ids = positions_of(0, queries, device)
            rotary = self._rotary.tables(position_ids, like.dtype)
        mask = partial(
            attention_mask,
            form=self._mask_form(cache),
            softcapped=model.attn_logit_softcapping is not None,
            queries=queries,
            keys=keys,
            causal=True,
            dtype=like.dtype,
            device=device,
            documents=documents,
            present=present,
            slopes=self._slopes_on(device) if model.position_embedding_type == "alibi" else None,
        )
        window = model.sliding_window
        if window is not None and window >= keys:
            window = None
        return self._by_window(mask, window, rotary=rotary, cache=cache)

    def _slopes_on(self, device: torch.device) -> Tensor:
        """Return ALiBi's slopes of this rank's heads, fp32 [n/t].

        They are made in the first forward pass, not with the model, whose tensors ZeRO-3 rounds to
        the type of the weights, and kept: copies to a GPU would wait for it in every micro batch.
        """
        if self._slopes is None or self._slopes.device != device:
            with torch.inference_mode(False):
                whole = alibi_slopes(self.model.num_attention_heads).to(device)
                self._slopes = whole.chunk(self.tp.size)[self.tp.rank]
        return self._slopes

    def _by_window(
        self,
        mask: Callable[..., tuple[Tensor | None, Spans | None]],
        window: int | None,
        **values: Any,
    ) -> Shared:
        """Return the shared `values` with masks, in `windowed` those of layers with the window."""
        masked = Shared(*mask(window=window), **values)
        if self.model.window_attn_skip_freq is None:
            return masked
        full = masked if window is None else Shared(*mask(window=None), **values)
        return replace(full, windowed=masked)

    def _local_logits(self, hidden: Tensor) -> Tensor:
        """Map [b, s, h] to [b, s, v/t]."""
        logits = column_parallel(
            hidden, [(self._output_weight(), None)], self.tp, self.sequence_parallel
        )[0]
        cap = self.model.final_logit_softcapping
        return logits if cap is None else (logits / cap).tanh() * cap
