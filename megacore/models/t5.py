"""T5 (Raffel et al. 2019, arXiv:1910.10683) with Megatron-LM's parameter names.

Version 1.1 differs by its gated MLP and a separate output layer.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from megacore.models.base import LM_LOSS, Losses, Model
from megacore.models.inputs import ModelInput
from megacore.models.layers.attention_bias import attention_mask
from megacore.models.layers.shared import KeyValueCache, LayerSetup, Shared
from megacore.models.layers.transformer import Transformer
from megacore.parallel.rng import seed_dropout, tensor_parallel_region
from megacore.tensor_parallel import column_parallel
from megacore.tensor_parallel.mappings import SEQUENCE, gather_from_tensor_parallel_region

_UNSCALED = 1.0
"""Scale of attention scores. T5 does not divide them by sqrt(d); the initial weights of its queries
are smaller instead."""


class T5Model(Model):
    """T5, or a chunk of its encoder or decoder.

    The decoder is causal and attends to the encoder's output. Chunks with the embedding of either
    stack, or with a tied head, have copies of the token table. Every chunk of a stack has a copy of
    the stack's relative bias.
    """

    has_decoder = True

    def _build(self, setup: LayerSetup) -> None:
        layers, decoder_layers = self.chunk.layers, self.chunk.decoder_layers
        limit = self.recompute_num_layers
        self.encoder = self._side(setup, layers, limit, decoder=False) if layers else None
        remaining = None if limit is None else max(0, limit - len(layers))
        self.decoder = (
            self._side(setup, decoder_layers, remaining, decoder=True) if decoder_layers else None
        )

    def _side(
        self, setup: LayerSetup, layers: range, recomputed: int | None, *, decoder: bool
    ) -> Transformer:
        """Build layers of one of the stacks; the part with the last layer has the final norm."""
        model = self.model
        return self._stack(
            setup,
            layers,
            final_layernorm=layers.stop == (model.decoder_layers if decoder else model.num_layers),
            recomputed=recomputed,
            causal=decoder,
            cross_attention=decoder,
            relative_bias=True,
            scale=_UNSCALED,
            inner_dropout=model.hidden_dropout,
            first_number=model.num_layers if decoder else 0,
        )

    def encode(self, inputs: ModelInput) -> Tensor:
        """Return the encoder's output of the whole model: [b, s, h]."""
        return self._encode(inputs, None, None)

    def forward(
        self,
        inputs: ModelInput,
        *,
        memory: Tensor | None = None,
        cache: KeyValueCache | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Return the whole model's logits of the labels, gathered over the ranks.

        Args:
            inputs: tokens of the encoder and the decoder; with a cache, `decoder_tokens` follow the
                cached ones.
            memory: result of `encode` for the same tokens; None computes it.
            cache: keys and values of the decoder's previous tokens and of `memory`; those of
                `decoder_tokens` are added.
            last_only: compute only the logits of the last token.

        Returns:
            Logits [b, s_d, v], or [b, 1, v] of the last token.
        """
        memory = self.encode(inputs) if memory is None else memory
        hidden = self._decode(inputs, memory, None, None, cache)
        if cache is not None:
            cache.advance(hidden.shape[1])
        if last_only:
            assert self.decoder is not None
            assert not self.decoder.sequence_parallel, "every rank has other positions"
            hidden = hidden[:, -1:]
        return gather_from_tensor_parallel_region(self._local_logits(hidden), self.tp)

    def run(
        self,
        inputs: ModelInput | None,
        hidden: Tensor | None = None,
        *,
        dropout_seed: int | None = None,
    ) -> Tensor | Losses:
        """Run the chunk's forward pass; every chunk needs `inputs`, for the positions of padding.

        A chunk of the encoder returns activations [b, s, h]. A chunk of the decoder returns the
        encoder's output and its own activations, concatenated to [b, s + s_d, h], with sequence
        parallelism this rank's part of each. A chunk with the head returns the loss of each label,
        [b, s_d] in fp32; it does not gather the logits for it.
        """
        assert inputs is not None
        if self.encoder is not None:
            hidden = self._encode(inputs, hidden, dropout_seed)
        assert hidden is not None
        if self.decoder is None:
            return hidden
        memory, decoded = self._parts(inputs, hidden)
        decoded = self._decode(inputs, memory, decoded, dropout_seed)
        if not self.has_head:
            return torch.cat([memory, decoded], SEQUENCE)
        return {LM_LOSS: self._label_losses(self._scaled(decoded), inputs)}

    def _parts(self, inputs: ModelInput, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split the input into the encoder's output and the decoder's hidden states, if any."""
        if self.chunk.has_decoder_embedding:
            return hidden, None
        length = inputs.tokens.shape[1] // (self.tp.size if self.sequence_parallel else 1)
        memory, decoded = hidden.tensor_split((length,), SEQUENCE)
        return memory, decoded

    def _encode(
        self, inputs: ModelInput, hidden: Tensor | None, dropout_seed: int | None
    ) -> Tensor:
        """Run the encoder's layers of this chunk; return [b, s(/t), h]."""
        assert self.encoder is not None
        if self.has_embedding:
            hidden = self.embedding(inputs.tokens, dropout_seed)
        assert hidden is not None
        length = inputs.tokens.shape[1]
        bias = self._bias(
            self.encoder, length, hidden, keys=length, causal=False, present=inputs.present
        )
        hidden = self.encoder(hidden, dropout_seed, shared=Shared(bias))
        return self._drop_output(self.encoder, hidden, dropout_seed, self.chunk.layers[-1])

    def _decode(
        self,
        inputs: ModelInput,
        memory: Tensor,
        hidden: Tensor | None,
        dropout_seed: int | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Run the decoder's layers of this chunk; return [b, s_d(/t), h]."""
        assert self.decoder is not None
        assert inputs.decoder_tokens is not None
        if self.chunk.has_decoder_embedding:
            hidden = self.embedding(inputs.decoder_tokens, dropout_seed, part="decoder")
        assert hidden is not None
        length = inputs.decoder_tokens.shape[1]
        memory_mask = attention_mask(
            form=self._mask_form(cache),
            queries=length,
            keys=inputs.tokens.shape[1],
            causal=False,
            dtype=memory.dtype,
            device=memory.device,
            present=inputs.present,
        )
        keys = length if cache is None else cache.length + length
        bias = self._bias(self.decoder, length, hidden, keys=keys, causal=True)
        shared = Shared(bias, memory=memory, memory_masks=Shared(*memory_mask), cache=cache)
        hidden = self.decoder(hidden, dropout_seed, shared=shared)
        return self._drop_output(
            self.decoder,
            hidden,
            dropout_seed,
            self.model.num_layers + self.chunk.decoder_layers[-1],
        )

    def _bias(
        self,
        stack: Transformer,
        length: int,
        hidden: Tensor,
        *,
        keys: int,
        causal: bool,
        present: Tensor | None = None,
    ) -> Tensor | None:
        """Return the bias that is added to the scores of a stack's self-attention."""
        assert stack.relative_attention_bias is not None
        bias, _ = attention_mask(
            queries=length,
            keys=keys,
            causal=causal,
            dtype=hidden.dtype,
            device=hidden.device,
            present=present,
            learned=stack.relative_attention_bias(length, keys),
        )
        return bias

    def _drop_output(
        self, stack: Transformer, hidden: Tensor, dropout_seed: int | None, number: int
    ) -> Tensor:
        """Apply dropout after the last layer's norm; `number` is that layer's index."""
        if stack.final_layernorm is None or not (self.training and self.model.hidden_dropout):
            return hidden
        seed_dropout(dropout_seed, number, "output")
        with tensor_parallel_region(self.tp, hidden) if self.sequence_parallel else nullcontext():
            return self.kernels.dropout(hidden, self.model.hidden_dropout)

    def _scaled(self, hidden: Tensor) -> Tensor:
        """Return the input of the output layer.

        It is scaled down for the embedding's weights, which are larger than an output layer's.
        """
        scales = self.model.scales_decoder_outputs
        return hidden * self.model.hidden_size**-0.5 if scales else hidden

    def _local_logits(self, hidden: Tensor) -> Tensor:
        """Map [b, s_d, h] to [b, s_d, v/t]."""
        output = (self._output_weight(), None)
        return column_parallel(self._scaled(hidden), [output], self.tp, self.sequence_parallel)[0]
