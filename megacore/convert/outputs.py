"""What our models and those of transformers compute of the same input, in one form."""

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
    """[b, s, v] of each label."""
    answers: Tensor | None
    """[b, 2] of BERT's binary head."""


@dataclass(frozen=True)
class ModelPair:
    """Two models that should be the same."""

    spec: ModelSpec
    """Of both."""
    form: HfForm
    """Of theirs."""
    ours: nn.Module
    """In fp32."""
    theirs: Any
    """As transformers loaded it, in fp32."""

    def our_outputs(self, given: ModelInput) -> Outputs:
        """Ours, with the padding of the vocabulary."""
        return our_outputs(self.spec.family, self.ours, given)

    def their_outputs(self, given: ModelInput) -> Outputs:
        """Those of the model of transformers."""
        return their_outputs(self.theirs, given)


def our_outputs(family: Family, model: nn.Module, given: ModelInput) -> Outputs:
    """Those of a model of ours, with the padding of the vocabulary.

    A causal model reads each row as one text.
    """
    found = model(given.tokens if family == "gpt" else given)
    logits, answers = found if isinstance(found, tuple) else (found, None)
    return Outputs(logits.float(), None if answers is None else answers.float())


def their_outputs(model: Any, given: ModelInput) -> Outputs:
    """Those of a model of transformers."""
    found = model(**their_arguments(given))
    if hasattr(found, "prediction_logits"):
        return Outputs(found.prediction_logits.float(), found.seq_relationship_logits.float())
    return Outputs(found.logits.float(), None)


def their_arguments(given: ModelInput) -> dict[str, Tensor]:
    """A micro batch as transformers' models take it.

    Positions and documents are those of one text.
    """
    values = {
        "input_ids": given.tokens,
        "attention_mask": None if given.present is None else given.present.long(),
        "token_type_ids": given.tokentypes,
        "decoder_input_ids": given.decoder_tokens,
    }
    return {name: value for name, value in values.items() if value is not None}


def meaningful(given: ModelInput) -> Tensor:
    """Bool [b, s]: the places whose logits mean something.

    These are T5's labels, BERT's tokens, all of a causal model's.
    """
    if given.decoder_tokens is not None:
        assert given.loss_mask is not None
        return given.loss_mask
    return (
        torch.ones_like(given.tokens, dtype=torch.bool) if given.present is None else given.present
    )


def one_sample(given: ModelInput, number: int) -> ModelInput:
    """One sample of a micro batch, as a micro batch."""
    return _each(given, lambda value: value[number : number + 1])


def without_padding(given: ModelInput) -> ModelInput:
    """A micro batch of one sample, cut where its padding begins."""
    assert len(given.tokens) == 1
    tokens = given.tokens.shape[1] if given.present is None else max(1, int(given.present.sum()))
    labels = given.labels.shape[1]
    if given.decoder_tokens is None:
        return _each(given, lambda value: value if value.dim() == 1 else value[:, :tokens])
    if given.loss_mask is not None:
        labels = max(1, int(given.loss_mask.sum()))
    return ModelInput(
        given.tokens[:, :tokens],
        given.labels[:, :labels],
        present=None if given.present is None else given.present[:, :tokens],
        decoder_tokens=given.decoder_tokens[:, :labels],
    )


def to_device(given: ModelInput, device: torch.device | str) -> ModelInput:
    """A micro batch on a device."""
    return _each(given, lambda value: value.to(device))


def _each(given: ModelInput, change: Callable[[Tensor], Tensor]) -> ModelInput:
    values: dict[str, Any] = {
        name: None if value is None else change(value) for name, value in vars(given).items()
    }
    return ModelInput(**values)
