"""Outputs of our models and those of transformers on the same input, in one format."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megacore.config.model import Family
from megacore.config.spec import ModelSpec
from megacore.convert.hf.forms import HfForm
from megacore.models.inputs import ModelInput


class Outputs(NamedTuple):
    """Logits of one micro batch, in fp32."""

    logits: Tensor
    """[b, s, v] logits of each label."""
    answers: Tensor | None
    """[b, 2] logits of BERT's binary head."""


@dataclass(frozen=True)
class ModelPair:
    """Our model and its export, which must be equal."""

    spec: ModelSpec
    """Spec of both models."""
    form: HfForm
    """Format of the exported model."""
    ours: nn.Module
    """Our model, in fp32."""
    theirs: Any
    """Exported model as loaded by transformers, in fp32."""

    def our_outputs(self, batch: ModelInput) -> Outputs:
        """Compute the outputs of our model, with the vocabulary's padding."""
        return our_outputs(self.spec.family, self.ours, batch)

    def their_outputs(self, batch: ModelInput) -> Outputs:
        """Compute the outputs of the transformers model."""
        return their_outputs(self.theirs, batch)


def our_outputs(family: Family, model: nn.Module, batch: ModelInput) -> Outputs:
    """Compute the outputs of one of our models, with the vocabulary's padding.

    A causal model reads each row as one text.
    """
    result = model(batch.tokens if family == "gpt" else batch)
    logits, answers = result if isinstance(result, tuple) else (result, None)
    return Outputs(logits.float(), None if answers is None else answers.float())


def their_outputs(model: Any, batch: ModelInput) -> Outputs:
    """Compute the outputs of a transformers model.

    Position ids and document boundaries are left out: each row is one text.
    """
    values = {
        "input_ids": batch.tokens,
        "attention_mask": None if batch.present is None else batch.present.long(),
        "token_type_ids": batch.tokentypes,
        "decoder_input_ids": batch.decoder_tokens,
    }
    result = model(**{name: value for name, value in values.items() if value is not None})
    if hasattr(result, "prediction_logits"):
        return Outputs(result.prediction_logits.float(), result.seq_relationship_logits.float())
    return Outputs(result.logits.float(), None)


def meaningful(batch: ModelInput) -> Tensor:
    """Return the mask, bool [b, s], of the positions whose logits are compared.

    These are T5's labels, BERT's tokens, and all positions of a causal model.
    """
    if batch.decoder_tokens is not None:
        assert batch.loss_mask is not None
        return batch.loss_mask
    return (
        torch.ones_like(batch.tokens, dtype=torch.bool) if batch.present is None else batch.present
    )


def one_sample(batch: ModelInput, number: int) -> ModelInput:
    """Return one sample of a micro batch, as a micro batch."""
    return _each(batch, lambda value: value[number : number + 1])


def without_padding(batch: ModelInput) -> ModelInput:
    """Return a micro batch of one sample without its padding."""
    assert len(batch.tokens) == 1
    tokens = batch.tokens.shape[1] if batch.present is None else max(1, int(batch.present.sum()))
    labels = batch.labels.shape[1]
    if batch.decoder_tokens is None:
        return _each(batch, lambda value: value if value.dim() == 1 else value[:, :tokens])
    if batch.loss_mask is not None:
        labels = max(1, int(batch.loss_mask.sum()))
    return ModelInput(
        batch.tokens[:, :tokens],
        batch.labels[:, :labels],
        present=None if batch.present is None else batch.present[:, :tokens],
        decoder_tokens=batch.decoder_tokens[:, :labels],
    )


def to_device(batch: ModelInput, device: torch.device | str) -> ModelInput:
    """Move a micro batch to `device`."""
    return _each(batch, lambda value: value.to(device))


def _each(batch: ModelInput, change: Callable[[Tensor], Tensor]) -> ModelInput:
    values: dict[str, Any] = {
        name: None if value is None else change(value) for name, value in vars(batch).items()
    }
    return ModelInput(**values)
