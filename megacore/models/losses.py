"""What the head of a model returns: the losses that it is trained on, by name."""

from typing import NamedTuple

import torch
from torch import Tensor

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
