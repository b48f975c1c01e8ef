"""What a batch of token ids says by itself: inputs, labels, and where documents end.

The rules are Megatron-LM's (https://github.com/NVIDIA/Megatron-LM, core/datasets/gpt_dataset.py): a document goes on
until its <|endoftext|>, that token included; -1 is padding.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from megacore.config.data import DataConfig


@dataclass(frozen=True)
class ModelInput:
    """One micro batch, as the model takes it."""

    tokens: Tensor
    """[b, s] ids; 0 where there is padding."""
    labels: Tensor
    """[b, s] ids of the next tokens; 0 where there is padding."""
    loss_mask: Tensor | None = None
    """[b, s] bool: whether a label counts; None: all do."""
    position_ids: Tensor | None = None
    """[b, s]; None: 0 … s-1."""
    documents: Tensor | None = None
    """[b, s] numbers of the documents that tokens must not look beyond; None: a token sees all before it."""


@dataclass(frozen=True)
class MaskRules:
    """Which of a batch's properties count in a run."""

    eod_id: int
    """Id of the token that ends a document."""
    reset_position_ids: bool
    reset_attention_mask: bool
    eod_mask_loss: bool
    padded: bool
    """Whether batches may have padding."""

    @classmethod
    def of(cls, config: DataConfig, eod_id: int) -> Self:
        """The rules of a run; without padding, and with the masks off, batches are taken as they are."""
        whole = config.packing == "packed" and config.add_extra_token and config.drop_last_partial and not config.fim
        return cls(
            eod_id=eod_id,
            reset_position_ids=config.reset_position_ids,
            reset_attention_mask=config.reset_attention_mask,
            eod_mask_loss=config.eod_mask_loss,
            padded=not whole,
        )

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
        inside = tokens != self.eod_id
        return inside if counts is None else inside & counts


def attention_bias(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, s] numbers of documents -> [b, 1, s, s], 0 where a token sees another, -inf elsewhere.

    Attention kernels add it to their scores as it is; of a bool mask each layer would make one of its own.
    """
    sees = (documents[:, :, None] == documents[:, None, :]).tril_()
    bias = torch.full(sees.shape, -torch.inf, dtype=dtype, device=documents.device)
    return bias.masked_fill_(sees, 0.0).unsqueeze(1)


def _positions(begins: Tensor) -> Tensor:
    """[b, s] whether a document begins at a token -> [b, s] how far each token is from its document's first."""
    place = torch.arange(begins.shape[1], device=begins.device)
    return place - torch.where(begins, place, 0).cummax(1).values
