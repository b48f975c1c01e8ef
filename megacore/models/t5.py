"""T5 (Raffel et al. 2019, arXiv:1910.10683) with Megatron-LM's parameter names.

Version 1.1 differs by its gated MLP and by the weights of its own that the output layer has.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.config.model import ModelConfig
from megacore.config.train import Recompute
from megacore.models.base import Model
from megacore.models.inputs import ModelInput
from megacore.models.layers.attention_bias import attention_bias
from megacore.models.layers.embedding import Embedding, OutputLayer
from megacore.models.layers.shared import Shared
from megacore.models.layers.transformer import Transformer
from megacore.models.losses import LM_LOSS, Losses, LossTerm
from megacore.parallel.mesh import ALONE, ParallelGroup
from megacore.parallel.rng import seed_dropout, tensor_parallel_region
from megacore.pipeline_parallel.copies import DECODER_BIAS, ENCODER_BIAS, WORD_EMBEDDINGS
from megacore.pipeline_parallel.partition import ModelChunk
from megacore.tensor_parallel import column_parallel, vocab_parallel_cross_entropy
from megacore.tensor_parallel.mappings import gather_from_tensor_parallel_region
from megacore.tensor_parallel.sequence_parallel import SEQUENCE

_UNSCALED = 1.0
"""T5 does not divide attention's scores by sqrt(d): the initial weights of its queries are smaller instead."""


class T5Model(Model):
    """An encoder, and a causal decoder that looks at its output; or a chunk of one of them.

    Parameters are fp32 and uninitialised; `megacore.models.build_model` builds one with its initial weights. Names
    are those of the whole model, whatever the chunk. Chunks with the embedding of either stack, or with a tied head,
    hold copies of the table of tokens; every chunk of a stack holds a copy of its relative bias.

    Args:
        model: the architecture.
        padded_vocab_size: rows of the embedding (v).
        max_position_embeddings: the longest sequence it is meant for, in tokens.
        chunk: the part of the model, with layers of one stack; None is all of it.
        recompute: what the backward pass computes once more, see `TransformerLayer`.
        recompute_num_layers: in how many of the chunk's layers, the first ones; None is all.
        label_smoothing: see `vocab_parallel_cross_entropy`; in training alone.
        z_loss: likewise.
        tp: the ranks that share each layer.
        sequence_parallel: whether activations between layers are divided along the sequence.
        device: where the parameters are; "meta" allocates nothing.

    Raises:
        ParallelLayoutError: heads, widths or vocabulary cannot be divided over the ranks.
    """

    loss_names = (LM_LOSS,)

    def __init__(
        self,
        model: ModelConfig,
        *,
        padded_vocab_size: int,
        max_position_embeddings: int,
        chunk: ModelChunk | None = None,
        recompute: Recompute = "none",
        recompute_num_layers: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        tp: ParallelGroup = ALONE,
        sequence_parallel: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if chunk is None:
            chunk = ModelChunk(range(model.num_layers), True, True, range(model.decoder_layers))
        self.model = model
        self.chunk = chunk
        self.tp = tp
        self.sequence_parallel = sequence_parallel and tp.size > 1
        self.padded_vocab_size = padded_vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.has_embedding = chunk.has_embedding
        self.has_head = chunk.has_head
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        untied = model.untie_embeddings_and_output_weights
        embeds = chunk.has_embedding or chunk.has_decoder_embedding
        self.embedding = (
            Embedding(
                model,
                padded_vocab_size,
                max_position_embeddings,
                table_only=not embeds,
                tp=tp,
                sequence_parallel=self.sequence_parallel,
                device=device,
            )
            if embeds or (chunk.has_head and not untied)
            else None
        )
        recomputed = (recompute, recompute_num_layers)
        self.encoder = self._stack(chunk.layers, recomputed, device, decoder=False) if chunk.layers else None
        if recompute_num_layers is not None:
            recomputed = (recompute, max(0, recompute_num_layers - len(chunk.layers)))
        self.decoder = (
            self._stack(chunk.decoder_layers, recomputed, device, decoder=True) if chunk.decoder_layers else None
        )
        self.output_layer = (
            OutputLayer(padded_vocab_size, model.hidden_size, tp=tp, device=device)
            if chunk.has_head and untied
            else None
        )

    def _stack(
        self, layers: range, recompute: tuple[Recompute, int | None], device: torch.device | str, *, decoder: bool
    ) -> Transformer:
        model = self.model
        return Transformer(
            model,
            layers,
            final_layernorm=layers.stop == (model.decoder_layers if decoder else model.num_layers),
            recompute=recompute[0],
            recompute_num_layers=recompute[1],
            causal=decoder,
            cross_attention=decoder,
            relative_bias=True,
            scale=_UNSCALED,
            inner_dropout=model.hidden_dropout,
            first_number=model.num_layers if decoder else 0,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            device=device,
        )

    @property
    def shared_parameters(self) -> frozenset[str]:
        """Parameters that another chunk holds too; the gradients of all are summed."""
        if self.encoder is not None and self.decoder is not None:
            return frozenset()
        found = set() if self.embedding is None else {WORD_EMBEDDINGS}
        if 0 < len(self.chunk.layers) < self.model.num_layers:
            found.add(ENCODER_BIAS)
        if 0 < len(self.chunk.decoder_layers) < self.model.decoder_layers:
            found.add(DECODER_BIAS)
        return frozenset(found)

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
        self, given: ModelInput | None, hidden: Tensor | None = None, *, dropout_seed: int | None = None
    ) -> Tensor | Losses:
        """What this chunk makes of one micro batch.

        Args:
            given: the micro batch; every chunk needs to know where padding is.
            hidden: what the chunk before returned; None for a chunk with the encoder's embedding.
            dropout_seed: of the micro batch (`megacore.parallel.rng.micro_batch_seed`), for training with dropout.

        Returns:
            From a chunk of the encoder activations [b, s, h]; from one of the decoder the encoder's output and the
            decoder's activations, one after the other in [b, s + s_d, h], with sequence parallelism this rank's part
            of each; from a chunk with the head the loss of each label, [b, s_d] in fp32, for which the logits are
            not gathered.
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
        losses = vocab_parallel_cross_entropy(
            self._local_logits(decoded),
            given.labels,
            self.tp,
            label_smoothing=self.label_smoothing if self.training else 0.0,
            z_loss=self.z_loss if self.training else 0.0,
        )
        return {LM_LOSS: LossTerm(losses, given.loss_mask)}

    def _parts(self, given: ModelInput, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """The encoder's output, and the hidden states of the chunk before where that is the decoder's too."""
        if self.chunk.has_decoder_embedding:
            return hidden, None
        length = given.tokens.shape[1] // (self.tp.size if self.sequence_parallel else 1)
        memory, decoded = hidden.split((length, hidden.shape[1] - length), SEQUENCE)
        return memory, decoded

    def _encode(self, given: ModelInput, hidden: Tensor | None, dropout_seed: int | None) -> Tensor:
        """The encoder's layers of this chunk, [b, s(/t), h]."""
        assert self.encoder is not None
        if self.has_embedding:
            assert self.embedding is not None
            hidden = self.embedding(given.tokens, dropout_seed)
        assert hidden is not None
        bias = self._bias(self.encoder, given.tokens.shape[1], hidden, causal=False, present=given.present)
        hidden = self.encoder(hidden, dropout_seed, shared=Shared(bias))
        return self._drop_output(self.encoder, hidden, dropout_seed, self.chunk.layers[-1])

    def _decode(self, given: ModelInput, memory: Tensor, hidden: Tensor | None, dropout_seed: int | None) -> Tensor:
        """The decoder's layers of this chunk, [b, s_d(/t), h]."""
        assert self.decoder is not None
        assert given.decoder_tokens is not None
        if self.chunk.has_decoder_embedding:
            assert self.embedding is not None
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
            self.decoder, hidden, dropout_seed, self.model.num_layers + self.chunk.decoder_layers[-1]
        )

    def _bias(
        self, stack: Transformer, length: int, hidden: Tensor, *, causal: bool, present: Tensor | None = None
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

    def _drop_output(self, stack: Transformer, hidden: Tensor, dropout_seed: int | None, number: int) -> Tensor:
        """Dropout after the last layer's norm, `number` being that layer's among all."""
        if stack.final_layernorm is None or not (self.training and self.model.hidden_dropout):
            return hidden
        seed_dropout(dropout_seed, number, "output")
        with tensor_parallel_region(self.tp, hidden) if self.sequence_parallel else nullcontext():
            return F.dropout(hidden, self.model.hidden_dropout)

    def _local_logits(self, hidden: Tensor) -> Tensor:
        """[b, s_d, h] -> [b, s_d, v/t]; tied weights are the embedding's, which are larger than an output layer's."""
        if self.output_layer is not None:
            return column_parallel(hidden, [(self.output_layer.weight, None)], self.tp, self.sequence_parallel)[0]
        assert self.embedding is not None
        scaled = hidden * self.model.hidden_size**-0.5
        table = self.embedding.word_embeddings.weight
        return column_parallel(scaled, [(table, None)], self.tp, self.sequence_parallel)[0]
