"""Learning rate as a pure function of the optimizer steps made so far, with Megatron-LM's formulas."""

import math
from dataclasses import dataclass
from typing import Literal, Self

from megacore.config.run import RunConfig


@dataclass(frozen=True)
class LrSchedule:
    """Linear warm-up from 0, then a decay to a floor (Megatron-LM `OptimizerParamScheduler`)."""

    lr: float
    """Peak, reached at `warmup_steps`."""
    min_lr: float
    """Value at `decay_steps` and after it."""
    warmup_steps: int
    """Optimizer steps of warm-up."""
    decay_steps: int
    """Optimizer step at which the decay ends."""
    style: Literal["cosine", "linear", "constant"]
    """Shape of the decay."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """The schedule that a configuration describes."""
        optim = config.optim
        return cls(optim.lr, optim.min_lr, config.lr_warmup_iters, config.lr_decay_iters, optim.lr_decay_style)

    def at(self, step: int) -> float:
        """Learning rate of optimizer step number `step`, counted from 1; skipped iterations are no steps."""
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.lr * step / self.warmup_steps
        if self.style == "constant":
            return self.lr
        if step > self.decay_steps:
            return self.min_lr
        ratio = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        share = 1.0 - ratio if self.style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)
        return self.min_lr + share * (self.lr - self.min_lr)
