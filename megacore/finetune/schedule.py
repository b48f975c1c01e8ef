"""How many batches and optimizer steps a fine-tuning has; imports no torch."""

import math
from dataclasses import dataclass

from megacore.config.finetune import FinetuneTrainConfig


@dataclass(frozen=True)
class Schedule:
    """The run's length."""

    batches_per_epoch: int
    """Forward passes of each rank; the last ones of an epoch are filled up with its first samples."""
    steps_per_epoch: int
    """Optimizer steps; the last one may be of fewer forward passes than the others."""
    total_steps: int
    """Optimizer steps of the whole run."""

    @classmethod
    def of(cls, train: FinetuneTrainConfig, samples: int, ranks: int) -> "Schedule":
        """The course of a training split of `samples` (at least one) on `ranks`."""
        batches = math.ceil(math.ceil(samples / train.micro_batch_size) / ranks)
        steps = math.ceil(batches / train.gradient_accumulation_steps)
        return cls(batches, steps, train.max_steps or steps * train.num_epochs)

    @property
    def epochs(self) -> int:
        """Passes over the training split, a last one that is cut short included."""
        return math.ceil(self.total_steps / self.steps_per_epoch)
