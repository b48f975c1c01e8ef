"""T5 (Raffel et al. 2019, arXiv:1910.10683) with Megatron-LM's parameter names.

Version 1.1 differs by its gated MLP and by the weights of its own that the output layer has.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from megacore.models.base import LM_LOSS, Losses, Model
from megacore.models.inputs import ModelInput
from megacore.models.layers.attention_bias import attention_bias
from megacore.models.layers.shared import Shared
from megacore.models.layers.transformer import Transformer
from megacore.parallel.rng import seed_dropout, tensor_parallel_region
from megacore.tensor_parallel import column_parallel
from megacore.tensor_parallel.mappings import SEQUENCE, gather_from_tensor_parallel_region

_UNSCALED = 1.0
"""T5 does not divide attention's scores by sqrt(d): the initial weights of its queries are smaller
instead."""


class T5Model(Model):
    """An encoder, and a causal decoder that looks at its output; or a chunk of one of them.

    Chunks with the embedding of either stack, or with a tied head, hold copies of the table of
    tokens; every chunk of a stack holds a copy of its relative bias.
    """

    has_decoder = True

    def _build(self, device: torch.device | str) -> None:
        layers, decoder_layers = self.chunk.layers, self.chunk.decoder_layers
        limit = self.recompute_num_layers
        self.encoder = self._side(layers, device, limit, decoder=False) if layers else None
        left = None if limit is None else max(0, limit - len(layers))
        self.decoder = (
            self._side(decoder_layers, device, left, decoder=True) if decoder_layers else None
        )

    def _side(
        self, layers: range, device: torch.device | str, recomputed: int | None, *, decoder: bool
    ) -> Transformer:
        """Layers of one of the stacks, with its final norm where the last of them is."""
        model = self.model
        return self._stack(
            layers,
            device,
            final_layernorm=layers.stop == (model.decoder_layers if decoder else model.num_layers),
            recomputed=recomputed,
            causal=decoder,
            cross_attention=decoder,
            relative_bias=True,
            scale=_UNSCALED,
            inner_dropout=model.hidden_dropout,
            first_number=model.num_layers if decoder else 0,
        )

    def encode(self, given: ModelInput) -> Tensor:
        """The encoder's output, by the whole model: [b, s, h]."""
        return self._encode(given, None, None)

    def forward(self, given: ModelInput, *, memory: Tensor | None = None) -> Tensor:
        """Logits of the labels, by the whole model: [b, s_d, v], gathered over the ranks.

        `memory` is what `encode` has returned for the same tokens; None computes it.
        """
        hidden = self._decode(given, self.encode(given) if memory is None else memory, None, None)
        return gather_from_tensor_parallel_region(self._local_logits(hidden), self.tp)

    def run(
        self,
        given: ModelInput | None,
        hidden: Tensor | None = None,
        *,
        dropout_seed: int | None = None,
    ) -> Tensor | Losses:
        """What this chunk makes of one micro batch.

        Args:
            given: the micro batch; every chunk needs to know where padding is.
            hidden: what the chunk before returned; None for a chunk with the encoder's embedding.
            dropout_seed: of the micro batch (`megacore.parallel.rng.micro_batch_seed`), for
                training with dropout.

        Returns:
            From a chunk of the encoder activations [b, s, h]; from one of the decoder the encoder's
            output and the decoder's activations, one after the other in [b, s + s_d, h], with
            sequence parallelism this rank's part of each; from a chunk with the head the loss of
            each label, [b, s_d] in fp32, for which the logits are not gathered.
        """
        assert given is not None
        if self.encoder is not None:
            hidden = self._encode(given, hidden, dropout_seed)
        assert hidden is not None
        if self.decoder is None:
            return hidden
        memory, decoded = self._parts(given, hidden)
        decoded = self._decode(given, memory, decoded, dropout_seed)
        if not self.has_head:
            return torch.cat([memory, decoded], SEQUENCE)
        return {LM_LOSS: self._label_losses(self._scaled(decoded), given)}

    def _parts(self, given: ModelInput, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """The encoder's output, and the previous chunk's hidden states where the decoder's too."""
        if self.chunk.has_decoder_embedding:
            return hidden, None
        length = given.tokens.shape[1] // (self.tp.size if self.sequence_parallel else 1)
        memory, decoded = hidden.tensor_split((length,), SEQUENCE)
        return memory, decoded

    def _encode(self, given: ModelInput, hidden: Tensor | None, dropout_seed: int | None) -> Tensor:
        """The encoder's layers of this chunk, [b, s(/t), h]."""
        assert self.encoder is not None
        if self.has_embedding:
            hidden = self.embedding(given.tokens, dropout_seed)
        assert hidden is not None
        bias = self._bias(
            self.encoder, given.tokens.shape[1], hidden, causal=False, present=given.present
        )
        hidden = self.encoder(hidden, dropout_seed, shared=Shared(bias))
        return self._drop_output(self.encoder, hidden, dropout_seed, self.chunk.layers[-1])

    def _decode(
        self, given: ModelInput, memory: Tensor, hidden: Tensor | None, dropout_seed: int | None
    ) -> Tensor:
        """The decoder's layers of this chunk, [b, s_d(/t), h]."""
        assert self.decoder is not None
        assert given.decoder_tokens is not None
        if self.chunk.has_decoder_embedding:
            hidden = self.embedding(given.decoder_tokens, dropout_seed, part="decoder")
        assert hidden is not None
        length = given.decoder_tokens.shape[1]
        memory_bias = attention_bias(
            queries=length,
            keys=given.tokens.shape[1],
            causal=False,
            dtype=memory.dtype,
            device=memory.device,
            present=given.present,
        )
        bias = self._bias(self.decoder, length, hidden, causal=True)
        shared = Shared(bias, memory=memory, memory_bias=memory_bias)
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
        causal: bool,
        present: Tensor | None = None,
    ) -> Tensor | None:
        """What is added to the scores of a stack's self-attention."""
        assert stack.relative_attention_bias is not None
        return attention_bias(
            queries=length,
            keys=length,
            causal=causal,
            dtype=hidden.dtype,
            device=hidden.device,
            present=present,
            learned=stack.relative_attention_bias(length, length),
        )

    def _drop_output(
        self, stack: Transformer, hidden: Tensor, dropout_seed: int | None, number: int
    ) -> Tensor:
        """Dropout after the last layer's norm, `number` being that layer's among all."""
        if stack.final_layernorm is None or not (self.training and self.model.hidden_dropout):
            return hidden
        seed_dropout(dropout_seed, number, "output")
        with tensor_parallel_region(self.tp, hidden) if self.sequence_parallel else nullcontext():
            return self.kernels.dropout(hidden, self.model.hidden_dropout)

    def _scaled(self, hidden: Tensor) -> Tensor:
        """What the output layer takes.

        Tied weights are the embedding's, which are larger than an output layer's.
        """
        return hidden if self.output_layer is not None else hidden * self.model.hidden_size**-0.5

    def _local_logits(self, hidden: Tensor) -> Tensor:
        """[b, s_d, h] -> [b, s_d, v/t]."""
        output = (self._output_weight(), None)
        return column_parallel(self._scaled(hidden), [output], self.tp, self.sequence_parallel)[0]
