"""What a batch of ids says by itself.

What a model reads, what it is to predict, and what may see what.

The rules for documents are Megatron-LM's (https://github.com/NVIDIA/Megatron-LM,
core/datasets/gpt_dataset.py): a document goes on until its <|endoftext|>, that token included; -1
is padding.
"""

from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from megacore.config.data import DataConfig
from megacore.config.run import RunConfig
from megacore.config.spec import SpecialTokens
from megacore.errors import ConfigError


@dataclass(frozen=True)
class ModelInput:
    """One micro batch, as the model takes it."""

    tokens: Tensor
    """[b, s] ids; 0 where there is padding. Of T5, the encoder's."""
    labels: Tensor
    """[b, s] ids to be predicted, of T5 [b, s_d]; 0 where there is nothing to predict."""
    loss_mask: Tensor | None = None
    """Bool of the labels' shape: whether a label counts; None: all do."""
    position_ids: Tensor | None = None
    """[b, s]; None: 0 … s-1."""
    documents: Tensor | None = None
    """[b, s] numbers of the documents that tokens must not look beyond; None: a token sees all
    before it."""
    present: Tensor | None = None
    """[b, s] bool: whether there is a token instead of padding; None: everywhere. BERT's, and of T5
    the encoder's."""
    tokentypes: Tensor | None = None
    """[b, s] number of the segment of each of BERT's tokens."""
    sentence_labels: Tensor | None = None
    """[b] what BERT's binary head is to predict: 0 for segments in their order, 1 for others."""
    decoder_tokens: Tensor | None = None
    """[b, s_d] what T5's decoder reads: its labels, one place later."""


class InputRules(Protocol):
    """How a model's family reads batches."""

    @property
    def for_every_stage(self) -> bool:
        """Whether pipeline stages without embedding and head need the batch too."""
        ...

    def read(self, batch: Tensor) -> ModelInput:
        """[b, width] ids -> what the model takes, on the same device and without waiting for it."""
        ...


def input_rules(config: RunConfig, special_tokens: SpecialTokens) -> InputRules:
    """How the batches of a run are read.

    Raises ConfigError where the vocabulary lacks a token that this takes.
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
    """Of a causal model's rows: s + 1 ids, inputs and labels, shifted by one."""

    eod_id: int | None
    """Id of the token that ends a document; None where no rule asks for it."""
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool
    padded: bool
    """Whether batches may have padding."""
    rotary: bool = False
    """Whether every layer asks for positions."""

    @classmethod
    def of(cls, config: DataConfig, eod_id: int | None, *, rotary: bool = False) -> Self:
        """The rules of a run.

        Without padding, and with the masks off, batches are taken as they are.
        """
        whole = (
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
            padded=not whole,
            rotary=rotary,
        )

    @property
    def for_every_stage(self) -> bool:
        """Stages in between may need to know where documents end."""
        return self.reset_attention_mask or (self.rotary and self.reset_position_ids)

    def read(self, batch: Tensor) -> ModelInput:
        """[b, s + 1] ids -> what the model takes, on the same device and without waiting for it."""
        tokens, labels = batch[:, :-1], batch[:, 1:]
        loss_mask = self._loss_mask(tokens, labels)
        positions = documents = None
        if self.reset_position_ids or self.reset_attention_mask:
            begins = torch.zeros_like(tokens, dtype=torch.bool)
            begins[:, 1:] = tokens[:, :-1] == self.eod_id
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
    """Of BERT's rows, 3 s + 1 ids.

    Tokens, labels (-1 where nothing is predicted), segments, and the sentence label.
    """

    for_every_stage: bool = True
    """Every stage needs to know where padding is."""

    def read(self, batch: Tensor) -> ModelInput:
        """[b, 3 s + 1] ids -> what the model takes, on the same device, without waiting."""
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
    """Of T5's rows, s + s_d ids: what the encoder reads, and what the decoder writes.

    -1 is padding.
    """

    seq_length: int
    """Of the encoder (s)."""
    start: int
    """Id with which the decoder begins."""
    for_every_stage: bool = True
    """Every stage needs to know where padding is."""

    def read(self, batch: Tensor) -> ModelInput:
        """[b, s + s_d] ids -> what the model takes, on the same device, without waiting."""
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
    """[b, s] whether a document begins -> [b, s] each token's distance from its beginning."""
    place = torch.arange(begins.shape[1], device=begins.device)
    return place - torch.where(begins, place, 0).cummax(1).values
