"""Weight decay as a pure function of the optimizer steps made so far, with Megatron-LM's formulas."""

import math
from dataclasses import dataclass
from typing import Literal, Self

from megacore.config.run import RunConfig


@dataclass(frozen=True)
class WeightDecaySchedule:
    """A change from one weight decay to another, most often an increase (Megatron-LM `OptimizerParamScheduler`)."""

    start: float
    """Value before the first step."""
    end: float
    """Value at `steps` and after it."""
    steps: int
    """Optimizer steps that the change takes."""
    style: Literal["constant", "linear", "cosine"]
    """Shape of the change; constant is `end` all along."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """The schedule that a configuration describes."""
        optim = config.optim
        first, last = optim.start_weight_decay, optim.end_weight_decay
        return cls(
            start=optim.weight_decay if first is None else first,
            end=optim.weight_decay if last is None else last,
            steps=config.lr_decay_iters,
            style=optim.weight_decay_incr_style,
        )

    def at(self, step: int) -> float:
        """Weight decay of optimizer step number `step`, counted from 1; skipped iterations are no steps."""
        if self.style == "constant" or step > self.steps:
            return self.end
        ratio = step / self.steps
        share = ratio if self.style == "linear" else 0.5 * (math.cos(math.pi * (1.0 - ratio)) + 1.0)
        return self.start + share * (self.end - self.start)
