"""Conversion of batches of ids to model inputs: tokens, labels, positions and masks.

The rules for documents are Megatron-LM's (https://github.com/NVIDIA/Megatron-LM,
core/datasets/gpt_dataset.py): a document ends with its <|endoftext|>, inclusive; -1 is padding,
which is a document of its own.
"""

from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from megacore.config.data import DataConfig
from megacore.config.run import RunConfig
from megacore.config.spec import SpecialTokens
from megacore.errors import ConfigError
from megacore.parallel.context import part_of_rank
from megacore.parallel.mesh import ParallelGroup


@dataclass(frozen=True)
class ModelInput:
    """One micro batch in the form that the models take."""

    tokens: Tensor
    """Ids [b, s], 0 at padding; for T5, of the encoder."""
    labels: Tensor
    """Ids to predict, [b, s] or for T5 [b, s_d]; 0 where there is nothing to predict."""
    loss_mask: Tensor | None = None
    """Bool mask of the labels' shape, True for labels that count; None means that all count."""
    position_ids: Tensor | None = None
    """Positions [b, s]; None means 0 … s-1. They are those of whole sequences, like `documents`,
    also if ranks divide the sequences."""
    documents: Tensor | None = None
    """Document numbers [b, s], which restrict attention to the token's document; None means that a
    token sees all previous ones."""
    present: Tensor | None = None
    """Bool mask [b, s], True for tokens and False for padding; None means no padding. Used by BERT
    and T5's encoder."""
    tokentypes: Tensor | None = None
    """Segment number of each token [b, s], for BERT."""
    sentence_labels: Tensor | None = None
    """Labels [b] of BERT's binary head: 0 for segments in order, 1 otherwise."""
    decoder_tokens: Tensor | None = None
    """Input ids [b, s_d] of T5's decoder: its labels, shifted right by one."""
    count: Tensor | None = None
    """Number of labels that count in all parts of divided sequences; None if ranks do not divide
    them."""

    def part(self, cp: ParallelGroup) -> "ModelInput":
        """Return this rank's part of a causal model's inputs: tokens, labels, loss mask [b, s/cp].

        Layers need the positions and documents of all keys, so these stay whole.
        """
        if cp.size == 1:
            return self
        tokens, labels = part_of_rank(self.tokens, cp), part_of_rank(self.labels, cp)
        if self.loss_mask is None:
            count = self.labels.new_full((), self.labels.numel())
            return replace(self, tokens=tokens, labels=labels, count=count)
        return replace(
            self,
            tokens=tokens,
            labels=labels,
            loss_mask=part_of_rank(self.loss_mask, cp),
            count=self.loss_mask.sum(),
        )


class InputRules(Protocol):
    """Interface that converts the batches of a model family."""

    @property
    def for_every_stage(self) -> bool:
        """True if pipeline stages without embedding and head need the batch too."""
        ...

    def read(self, batch: Tensor) -> ModelInput:
        """Convert ids [b, width] to model inputs on the same device, without synchronization."""
        ...


def input_rules(config: RunConfig, special_tokens: SpecialTokens) -> InputRules:
    """Return the rules that read the batches of a run.

    Raises ConfigError if the vocabulary lacks a token that they need.
    """
    match config.family:
        case "gpt":
            rotary = config.model.position_embedding_type == "rope"
            return MaskRules.of(config.data, special_tokens.eod, rotary=rotary)
        case "bert":
            return BertRules()
        case "t5":
            if special_tokens.pad is None:
                raise ConfigError(
                    "family t5 begins what its decoder reads with the padding token, which the "
                    "vocabulary lacks: give data.tokenizer one that has [PAD] or <pad>"
                )
            return T5Rules(config.data.seq_length, special_tokens.pad)


@dataclass(frozen=True)
class MaskRules:
    """Rules for a causal model's rows: s + 1 ids, inputs and labels shifted by one."""

    eod_id: int | None
    """Id of the token that ends a document; None if no rule needs it."""
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool
    padded: bool
    """True if batches may contain padding."""
    rotary: bool = False
    """True if every layer needs positions."""

    @classmethod
    def of(cls, config: DataConfig, eod_id: int | None, *, rotary: bool = False) -> Self:
        """Return the rules of a run.

        Without padding and document masks, batches are used unchanged.
        """
        never_padded = (
            config.packing == "packed"
            and config.add_extra_token
            and config.drop_last_partial
            and not config.fim
        )
        return cls(
            eod_id=eod_id,
            reset_position_ids=config.reset_position_ids,
            reset_attention_mask=config.reset_attention_mask,
            eod_mask_loss=config.eod_mask_loss,
            padded=not never_padded,
            rotary=rotary,
        )

    @property
    def for_every_stage(self) -> bool:
        """True if middle stages need the boundaries of documents."""
        return self.reset_attention_mask or (self.rotary and self.reset_position_ids)

    def read(self, batch: Tensor) -> ModelInput:
        """Convert ids [b, s + 1] to model inputs on the same device, without synchronization."""
        tokens, labels = batch[:, :-1], batch[:, 1:]
        loss_mask = self._loss_mask(tokens, labels)
        positions = documents = None
        if self.reset_position_ids or self.reset_attention_mask:
            begins = torch.zeros_like(tokens, dtype=torch.bool)
            begins[:, 1:] = tokens[:, :-1] == self.eod_id
            if self.padded:
                begins[:, 1:] |= (tokens[:, 1:] < 0) & (tokens[:, :-1] >= 0)
            if self.reset_position_ids:
                positions = _positions(begins)
            if self.reset_attention_mask:
                documents = begins.cumsum(1)
        if self.padded:
            tokens, labels = tokens.clamp(min=0), labels.clamp(min=0)
        return ModelInput(tokens, labels, loss_mask, positions, documents)

    def _loss_mask(self, tokens: Tensor, labels: Tensor) -> Tensor | None:
        counts = labels >= 0 if self.padded else None
        if not self.eod_mask_loss:
            return counts
        assert self.eod_id is not None
        inside = tokens != self.eod_id
        return inside if counts is None else inside & counts


@dataclass(frozen=True)
class BertRules:
    """Rules for BERT's rows of 3 s + 1 ids.

    A row has tokens, labels (-1 where nothing is predicted), segments and the sentence label.
    """

    for_every_stage: bool = True
    """True: every stage needs the positions of padding."""

    def read(self, batch: Tensor) -> ModelInput:
        """Convert ids [b, 3 s + 1] to model inputs on the same device, without synchronization."""
        tokens, labels, segments = batch[:, :-1].chunk(3, dim=1)
        return ModelInput(
            tokens.clamp(min=0),
            labels.clamp(min=0),
            loss_mask=labels >= 0,
            present=tokens >= 0,
            tokentypes=segments.clamp(min=0),
            sentence_labels=batch[:, -1],
        )


@dataclass(frozen=True)
class T5Rules:
    """Rules for T5's rows of s + s_d ids: the encoder's input, then the decoder's labels.

    -1 is padding.
    """

    seq_length: int
    """Sequence length of the encoder (s)."""
    start: int
    """Id of the decoder's first input token."""
    for_every_stage: bool = True
    """True: every stage needs the positions of padding."""

    def read(self, batch: Tensor) -> ModelInput:
        """Convert ids [b, s + s_d] to model inputs on the same device, without synchronization."""
        tokens, labels = batch[:, : self.seq_length], batch[:, self.seq_length :]
        counts, labels = labels >= 0, labels.clamp(min=0)
        decoder = torch.cat([labels.new_full((len(labels), 1), self.start), labels[:, :-1]], 1)
        return ModelInput(
            tokens.clamp(min=0),
            labels,
            loss_mask=counts,
            present=tokens >= 0,
            decoder_tokens=decoder,
        )


def _positions(begins: Tensor) -> Tensor:
    """Return each token's distance [b, s] from its document's beginning, marked in `begins`."""
    place = torch.arange(begins.shape[1], device=begins.device)
    return place - torch.where(begins, place, 0).cummax(1).values
