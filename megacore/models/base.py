"""Base class of the models, with the interface that pipeline stages, engines and conversion use.

A model returns its training losses by name.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megacore.config.model import ModelConfig
from megacore.config.train import Recompute
from megacore.kernels.choice import Kernels, plain_kernels
from megacore.kernels.cross_entropy import softcapped
from megacore.kernels.implementation import MaskForm
from megacore.models.inputs import ModelInput
from megacore.models.layers.embedding import Embedding, OutputLayer
from megacore.models.layers.shared import KeyValueCache, LayerSetup
from megacore.models.layers.transformer import Transformer
from megacore.parallel.context import positions_of_rank
from megacore.parallel.mesh import SINGLE_RANK, ParallelGroup
from megacore.pipeline_parallel.partition import ModelChunk
from megacore.tensor_parallel import linear_cross_entropy
from megacore.tensor_parallel.linear import add_rows_

LM_LOSS = "lm_loss"
"""Name of the loss of the predicted tokens; its exponential is the perplexity."""
SENTENCE_LOSSES = {"sop": "sop_loss", "nsp": "nsp_loss"}
"""Names of the loss of BERT's binary head, by its task."""


POSITION_BUCKETS = 16
"""Number of ranges of positions by which validation reports the loss; a sequence shorter than this
has one range for each position."""


class LossTerm(NamedTuple):
    """One loss of a micro batch. Training minimizes the sum of the means of all terms."""

    losses: Tensor
    """Loss of each label [b, s] or of each sample [b], fp32, in nats."""
    counts: Tensor | None = None
    """Bool mask of the same shape: True for losses that count; None: all count."""
    everywhere: Tensor | None = None
    """Number of losses that count on all ranks that divide the sequences; None if none does."""
    cp: ParallelGroup = SINGLE_RANK
    """Ranks that divide the sequences."""

    def mean(self) -> Tensor:
        """Return the mean of the losses that count, 0-dimensional; 0 if none counts.

        Of divided sequences it is this rank's contribution, and the sum over the ranks is the mean.
        """
        if self.everywhere is not None:
            losses = self.losses if self.counts is None else self.losses * self.counts
            return losses.sum() / self.everywhere.clamp(min=1)
        if self.counts is None:
            return self.losses.mean()
        return (self.losses * self.counts).sum() / self.counts.sum().clamp(min=1)

    def total(self) -> Tensor:
        """Return the sum of the losses that count, and their number: fp64 [2]."""
        exact = self.losses.double()
        if self.counts is None:
            # new_tensor would copy from the host, and wait for the GPU
            return torch.stack([exact.sum(), exact.new_full((), exact.numel())])
        return torch.stack([(exact * self.counts).sum(), self.counts.sum().double()])

    def by_sample(self) -> Tensor:
        """Return the sum and the number of the losses [b, s/cp] that count, by sample: fp64 [b, 2].

        Of divided sequences it is this rank's contribution.
        """
        exact = self.losses.double()
        counts = torch.ones_like(exact) if self.counts is None else self.counts.double()
        return torch.stack([(exact * counts).sum(1), counts.sum(1)], 1)

    def by_position(self) -> Tensor:
        """Return the sum and the number of the losses [b, s/cp] that count, by position.

        fp64 [POSITION_BUCKETS, 2]: one row for each range of `bucket_width` positions of whole
        sequences; of divided ones it is this rank's contribution.
        """
        exact, length = self.losses.double(), self.losses.shape[1] * self.cp.size
        counts = torch.ones_like(exact) if self.counts is None else self.counts.double()
        columns = torch.stack([(exact * counts).sum(0), counts.sum(0)])
        if self.cp.size > 1:
            positions = positions_of_rank(length, self.cp, exact.device)
            columns = columns.new_zeros(2, length).index_copy_(1, positions, columns)
        missing = POSITION_BUCKETS * bucket_width(length) - length
        columns = nn.functional.pad(columns, (0, missing))
        return columns.view(2, POSITION_BUCKETS, -1).sum(2).T


def bucket_width(length: int) -> int:
    """Return the number of positions of each range for sequences of `length` labels."""
    return -(-length // POSITION_BUCKETS)


Losses = dict[str, LossTerm]
"""Losses by name, in the order in which they are reported; the first is `lm_loss`."""


def loss_sums(losses: Losses) -> Tensor:
    """Return the sum and the number of the values of each loss, and of `lm_loss` by position.

    Then come the sums of `lm_loss` by sample: fp64 [terms + POSITION_BUCKETS + b, 2].
    """
    totals = [term.total() for term in losses.values()]
    term = losses[LM_LOSS]
    return torch.cat([torch.stack(totals), term.by_position(), term.by_sample()])


@dataclass(frozen=True)
class SampleSources:
    """Sources of the samples of a rank's micro batches."""

    numbers: Tensor
    """Number of the source of each sample, i64, on any device."""
    count: int
    """Number of sources."""


class LossTotals:
    """Sums of the losses of several micro batches, which may come from several calls.

    The order of the additions does not depend on the number of calls, and neither do the bits.

    Attributes:
        total: fp64 [terms + POSITION_BUCKETS + sources, 2]: sum and number of the values of each
            loss, of `lm_loss` by position, and of `lm_loss` by source.
    """

    def __init__(self, terms: int, sources: SampleSources | None, device: torch.device) -> None:
        self._rows = terms + POSITION_BUCKETS
        rows = self._rows + (0 if sources is None else sources.count)
        self.total = torch.zeros(rows, 2, dtype=torch.float64, device=device)
        self._numbers = (
            None if sources is None else self._rows + sources.numbers.to(device, non_blocking=True)
        )
        self._samples = 0

    def add(self, sums: Tensor) -> None:
        """Add the result of `loss_sums` of the next micro batch."""
        rows, stop = self._rows, self._samples + len(sums) - self._rows
        self.total[:rows] += sums[:rows]
        if self._numbers is not None:
            add_rows_(self.total, self._numbers[self._samples : stop], sums[rows:])
        self._samples = stop


class Model(nn.Module, ABC):
    """A whole model, or one chunk of it.

    Parameters are fp32 and uninitialized; `models.build.build_model` also initializes them. Their
    names are those of the whole model, whatever the chunk. A chunk in which a stack begins has the
    `embedding`. A chunk with the head has a copy of the token table, or its own `output_layer`.
    """

    has_decoder: bool = False
    """True if the family has a decoder in addition to an encoder."""
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
        tp: ParallelGroup = SINGLE_RANK,
        sequence_parallel: bool = False,
        cp: ParallelGroup = SINGLE_RANK,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate the parameters.

        Args:
            model: model configuration.
            padded_vocab_size: number of rows of the embedding (v); the rows of the padding are
                ordinary rows that no token uses.
            max_position_embeddings: maximum sequence length, in tokens.
            chunk: part of the model to build; None means the whole model.
            recompute: part that the backward pass recomputes, see `TransformerLayer`.
            recompute_num_layers: number of the chunk's layers that recompute, from the first; None
                means all.
            label_smoothing: see `linear_cross_entropy`; only for predicted tokens in training.
            z_loss: see `linear_cross_entropy`; only for predicted tokens in training.
            kernels: kernels to compute with; None means plain torch.
            tp: ranks that share each layer.
            sequence_parallel: divide the activations between layers along the sequence.
            cp: ranks that divide every sequence (context parallelism); only for causal models.
            device: device of the parameters; "meta" allocates nothing.

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
        cap = model.final_logit_softcapping
        self._cross_entropy = (
            self.kernels.cross_entropy
            if cap is None
            else softcapped(self.kernels.cross_entropy, cap)
        )
        self.tp = tp
        self.sequence_parallel = sequence_parallel and tp.size > 1
        self.cp = cp
        setup = LayerSetup(self.kernels, tp, self.sequence_parallel, device)
        untied = model.untie_embeddings_and_output_weights
        if self._embeds or (self.has_head and not untied):
            self.embedding = self._embedding(setup)
        self._build(setup)
        self.output_layer = (
            OutputLayer(padded_vocab_size, model.hidden_size, setup)
            if self.has_head and untied
            else None
        )

    @property
    def has_embedding(self) -> bool:
        """True if the chunk takes tokens instead of another chunk's output."""
        return self.chunk.has_embedding

    @property
    def has_head(self) -> bool:
        """True if the chunk computes the losses."""
        return self.chunk.has_head

    @abstractmethod
    def run(
        self,
        inputs: ModelInput | None,
        hidden: Tensor | None = None,
        *,
        dropout_seed: int | None = None,
    ) -> Tensor | Losses:
        """Run the chunk's forward pass on one micro batch.

        Args:
            inputs: the micro batch; None for a middle chunk that does not need it.
            hidden: output of the previous chunk, for a chunk without the embedding.
            dropout_seed: seed of the micro batch (`megacore.parallel.rng.micro_batch_seed`), for
                training with dropout.

        Returns:
            The input of the next chunk, or the losses if the chunk has the head.
        """

    @abstractmethod
    def _build(self, setup: LayerSetup) -> None:
        """Add the modules between the embedding and the output layer."""

    def _mask_form(self, cache: KeyValueCache | None = None) -> MaskForm:
        """Return the form of attention's masks; that of queries after cached keys has no blocks."""
        if self.training and self.model.attention_dropout:
            return "dense"
        form = self.kernels.masks
        return "spans" if form == "blocks" and cache is not None else form

    @property
    def _embeds(self) -> bool:
        """True if a stack begins in this chunk."""
        return self.chunk.has_embedding or self.chunk.has_decoder_embedding

    def _embedding(self, setup: LayerSetup) -> Embedding:
        return Embedding(
            self.model,
            setup,
            self.padded_vocab_size,
            self.max_position_embeddings,
            tokentypes=self.tokentypes,
            table_only=not self._embeds,
        )

    def _stack(
        self,
        setup: LayerSetup,
        layers: range,
        *,
        final_layernorm: bool,
        recomputed: int | None,
        **kind: Any,
    ) -> Transformer:
        """Build the chunk's layers; the first `recomputed` of them (None: all) recompute.

        `kind` holds further arguments of `Transformer`.
        """
        return Transformer(
            self.model,
            setup,
            layers,
            final_layernorm=final_layernorm,
            recompute=self._recompute,
            recompute_num_layers=recomputed,
            **kind,
        )

    def _output_weight(self) -> Tensor:
        """Return the rows [v/t, h] that turn hidden states into logits.

        They belong to the output layer if there is one, else to the embedding.
        """
        return (
            self.embedding.word_embeddings.weight
            if self.output_layer is None
            else self.output_layer.weight
        )

    def _label_losses(
        self, hidden: Tensor, inputs: ModelInput, bias: Tensor | None = None
    ) -> LossTerm:
        """Return the loss of each label in fp32, from the output layer's input [b, s(/t), h]."""
        losses = linear_cross_entropy(
            hidden,
            self._output_weight(),
            inputs.labels,
            bias=bias,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
            kernel=self._cross_entropy,
            label_smoothing=self.label_smoothing if self.training else 0.0,
            z_loss=self.z_loss if self.training else 0.0,
        )
        return LossTerm(losses, inputs.loss_mask, inputs.count, self.cp)
