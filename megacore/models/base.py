"""What a pipeline stage, an engine and a conversion ask of a model, whatever its family.

A model returns the losses that it is trained on by name.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megacore.config.model import ModelConfig
from megacore.config.train import Recompute
from megacore.kernels.choice import Kernels, plain_kernels
from megacore.models.inputs import ModelInput
from megacore.models.layers.embedding import Embedding, OutputLayer
from megacore.models.layers.transformer import Transformer
from megacore.parallel.mesh import ALONE, ParallelGroup
from megacore.pipeline_parallel.partition import ModelChunk
from megacore.tensor_parallel import linear_cross_entropy

LM_LOSS = "lm_loss"
"""Of the predicted tokens; its exponential is the perplexity."""
SENTENCE_LOSSES = {"sop": "sop_loss", "nsp": "nsp_loss"}
"""Of BERT's binary head, by its task."""


class LossTerm(NamedTuple):
    """One loss of a micro batch; what is minimised is the sum of the means of all terms."""

    losses: Tensor
    """[b, s] of each label or [b] of each sample, fp32, in nats."""
    counts: Tensor | None = None
    """Bool, of the same shape: which of them count; None: all do."""

    def mean(self) -> Tensor:
        """Mean of those that count, 0-dimensional; 0 if none does."""
        if self.counts is None:
            return self.losses.mean()
        return (self.losses * self.counts).sum() / self.counts.sum().clamp(min=1)

    def total(self) -> Tensor:
        """Sum of those that count, and their number: fp64 [2]."""
        exact = self.losses.double()
        if self.counts is None:
            return torch.stack([exact.sum(), exact.new_tensor(exact.numel())])
        return torch.stack([(exact * self.counts).sum(), self.counts.sum().double()])


Losses = dict[str, LossTerm]
"""By name, in the order in which they are reported; the first is `lm_loss`."""


class Model(nn.Module, ABC):
    """One chunk of a pipeline, or all of a model.

    Parameters are fp32 and uninitialised; `models.build.build_model` builds one with its initial
    weights. They have the names of the whole model, whatever the chunk. `embedding` is where a
    stack begins, and a copy of its table of tokens where the head is, unless that has an
    `output_layer` of its own.
    """

    has_decoder: bool = False
    """Whether the family has a decoder beside an encoder."""
    tokentypes: int = 0
    """Rows of the embedding's table of segments."""
    loss_names: tuple[str, ...] = (LM_LOSS,)
    """Names of the losses, in the order in which a chunk with the head returns them."""
    embedding: Embedding

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
        kernels: Kernels | None = None,
        tp: ParallelGroup = ALONE,
        sequence_parallel: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate the parameters.

        Args:
            model: the architecture.
            padded_vocab_size: rows of the embedding (v); the padding's rows are ordinary rows that
                no text ever names.
            max_position_embeddings: the longest sequence it takes, in tokens.
            chunk: the part of the model; None is all of it.
            recompute: what the backward pass computes once more, see `TransformerLayer`.
            recompute_num_layers: in how many of the chunk's layers, the first ones; None is all.
            label_smoothing: see `linear_cross_entropy`; of the predicted tokens, in training alone.
            z_loss: likewise.
            kernels: what computes; None is plain torch.
            tp: the ranks that share each layer.
            sequence_parallel: whether activations between layers are divided along the sequence.
            device: where the parameters are; "meta" allocates nothing.

        Raises:
            ParallelLayoutError: heads, widths or vocabulary cannot be divided over the ranks.
        """
        super().__init__()
        decoder = range(model.decoder_layers if self.has_decoder else 0)
        self.model = model
        self.chunk = chunk or ModelChunk(range(model.num_layers), True, True, decoder)
        self.padded_vocab_size = padded_vocab_size
        self.max_position_embeddings = max_position_embeddings
        self._recompute = recompute
        self.recompute_num_layers = recompute_num_layers
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.kernels = kernels or plain_kernels()
        self.tp = tp
        self.sequence_parallel = sequence_parallel and tp.size > 1
        untied = model.untie_embeddings_and_output_weights
        if self._embeds or (self.has_head and not untied):
            self.embedding = self._embedding(device)
        self._build(device)
        own = self.has_head and untied
        self.output_layer = (
            OutputLayer(padded_vocab_size, model.hidden_size, tp=tp, device=device) if own else None
        )

    @property
    def has_embedding(self) -> bool:
        """Whether the chunk takes tokens, and no other chunk's output."""
        return self.chunk.has_embedding

    @property
    def has_head(self) -> bool:
        """Whether it computes the losses."""
        return self.chunk.has_head

    @abstractmethod
    def run(
        self,
        given: ModelInput | None,
        hidden: Tensor | None = None,
        *,
        dropout_seed: int | None = None,
    ) -> Tensor | Losses:
        """What this chunk makes of one micro batch.

        Args:
            given: the micro batch; None for a chunk between the others that needs nothing of it.
            hidden: what the chunk before returned, for a chunk without the embedding.
            dropout_seed: of the micro batch (`megacore.parallel.rng.micro_batch_seed`), for
                training with dropout.

        Returns:
            What the next chunk takes, or from a chunk with the head the losses.
        """

    @abstractmethod
    def _build(self, device: torch.device | str) -> None:
        """Add what stands between the embedding and the output layer."""

    @property
    def _embeds(self) -> bool:
        """Whether a stack begins here."""
        return self.chunk.has_embedding or self.chunk.has_decoder_embedding

    def _embedding(self, device: torch.device | str) -> Embedding:
        return Embedding(
            self.model,
            self.padded_vocab_size,
            self.max_position_embeddings,
            tokentypes=self.tokentypes,
            table_only=not self._embeds,
            kernels=self.kernels,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            device=device,
        )

    def _stack(
        self,
        layers: range,
        device: torch.device | str,
        *,
        final_layernorm: bool,
        recomputed: int | None,
        **kind: Any,
    ) -> Transformer:
        """Layers of the chunk, of which the first `recomputed` (None: all) recompute.

        `kind` is for `Transformer`.
        """
        return Transformer(
            self.model,
            layers,
            final_layernorm=final_layernorm,
            recompute=self._recompute,
            recompute_num_layers=recomputed,
            kernels=self.kernels,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            device=device,
            **kind,
        )

    def _output_weight(self) -> Tensor:
        """The rows [v/t, h] that turn hidden states into logits.

        The embedding's unless the output layer has some.
        """
        return (
            self.embedding.word_embeddings.weight
            if self.output_layer is None
            else self.output_layer.weight
        )

    def _label_losses(
        self, hidden: Tensor, given: ModelInput, bias: Tensor | None = None
    ) -> LossTerm:
        """The loss of each label, in fp32, from what the output layer takes, [b, s(/t), h]."""
        losses = linear_cross_entropy(
            hidden,
            self._output_weight(),
            given.labels,
            bias=bias,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            kernel=self.kernels.cross_entropy,
            label_smoothing=self.label_smoothing if self.training else 0.0,
            z_loss=self.z_loss if self.training else 0.0,
        )
        return LossTerm(losses, given.loss_mask)
