"""Perplexities of several models on the same samples."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.models.inputs import ModelInput

Score = Callable[[ModelInput], Mapping[str, Tensor]]
"""Logits [b, s, v] of a micro batch's labels, by the name under which they count: one forward pass can count twice."""


@dataclass
class Perplexities:
    """exp of the mean loss of all labels that count, by the name of the model."""

    samples: int = 0
    labels: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    """Of the losses, in nats."""

    def __getitem__(self, name: str) -> float:
        return math.exp(min(self.sums[name] / max(self.labels, 1), 700.0))


def perplexities(models: Sequence[Score], batches: Iterable[ModelInput]) -> Perplexities:
    """Score all batches, which are on the models' device, by all models."""
    found = Perplexities()
    with torch.inference_mode():
        for given in batches:
            counts = torch.ones_like(given.labels, dtype=torch.bool) if given.loss_mask is None else given.loss_mask
            labels = given.labels[counts]
            for model in models:
                for name, logits in model(given).items():
                    loss = F.cross_entropy(logits[counts], labels, reduction="sum")
                    found.sums[name] = found.sums.get(name, 0.0) + float(loss)
            found.samples += len(given.tokens)
            found.labels += labels.numel()
    return found
