"""Learning rate and weight decay as pure functions of the number of optimizer steps.

The formulas are Megatron-LM's (`OptimizerParamScheduler`).
"""

import math
from dataclasses import dataclass
from typing import Literal, Self

from megacore.config.optim import LrDecayStyle, LrWarmupStyle, LrWsdDecayStyle, OptimConfig
from megacore.config.run import RunConfig


@dataclass(frozen=True)
class LrSchedule:
    """Learning rate schedule: warm-up, then a decay to a floor."""

    lr: float
    """Peak value, reached at `warmup_steps`."""
    min_lr: float
    """Value after `decay_steps` for every style but constant."""
    warmup_steps: int
    """Optimizer steps of warm-up."""
    decay_steps: int
    """Optimizer step at which the decay ends."""
    style: LrDecayStyle
    """Shape of the decay."""
    init_lr: float = 0.0
    """Value at which the warm-up starts."""
    wsd_style: LrWsdDecayStyle = "exponential"
    """Shape of the last part of WSD."""
    wsd_steps: int = 0
    """Optimizer steps of the last part of WSD, which ends at `decay_steps`."""
    warmup_style: LrWarmupStyle = "linear"
    """Shape of the warm-up."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the schedule that a configuration describes."""
        optim = config.optim
        return cls(
            lr=optim.lr,
            min_lr=optim.min_lr,
            warmup_steps=config.lr_warmup_iters,
            decay_steps=config.lr_decay_iters,
            style=optim.lr_decay_style,
            init_lr=optim.lr_warmup_init,
            wsd_style=optim.lr_wsd_decay_style,
            wsd_steps=optim.lr_wsd_decay_iters or 0,
            warmup_style=optim.lr_warmup_style,
        )

    def at(self, step: int) -> float:
        """Return the learning rate of optimizer step number `step`, counted from 1.

        Skipped iterations do not count as steps.
        """
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self._warm_up(step)
        if self.style == "constant":
            return self.lr
        if step > self.decay_steps:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(self.warmup_steps, 1) / max(step, 1)))
        return self.min_lr + self._share(step) * (self.lr - self.min_lr)

    def _warm_up(self, step: int) -> float:
        """Return the learning rate of a step up to `warmup_steps`."""
        rise = self.lr - self.init_lr
        if self.warmup_style == "linear":
            return self.init_lr + rise * step / self.warmup_steps
        # As in DeepSpeed's WarmupLR, the peak is reached one step early, and the warm-up takes at
        # least two steps.
        return self.init_lr + rise * min(
            1.0, math.log(step + 1) / math.log(max(2, self.warmup_steps))
        )

    def _share(self, step: int) -> float:
        """Return the remaining share of `lr - min_lr` at a step after the warm-up."""
        if self.style == "WSD":
            start = self.decay_steps - self.wsd_steps
            return (
                1.0
                if step <= start
                else _wsd_share(self.wsd_style, (step - start) / self.wsd_steps)
            )
        ratio = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return 1.0 - ratio if self.style == "linear" else _half_wave(ratio)


def _wsd_share(style: LrWsdDecayStyle, ratio: float) -> float:
    """Return the share for a ratio: 1 at ratio 0, 0 at ratio 1."""
    match style:
        case "linear":
            return 1.0 - ratio
        case "cosine":
            return _half_wave(ratio)
        case "exponential":
            return 2.0 * math.pow(0.5, ratio) - 1.0
        case "minus_sqrt":
            return 1.0 - math.sqrt(ratio)


@dataclass(frozen=True)
class WeightDecaySchedule:
    """Weight decay schedule: a change from one value to another, most often an increase."""

    start: float
    """Value before the first step."""
    end: float
    """Value at `steps` and after it."""
    steps: int
    """Optimizer steps that the change takes."""
    style: Literal["constant", "linear", "cosine"]
    """Shape of the change; constant is always `end`."""

    @classmethod
    def of(cls, optim: OptimConfig, steps: int) -> Self:
        """Return the schedule that a configuration describes.

        Args:
            optim: section of the configuration.
            steps: optimizer steps that the change takes, as many as the learning rate's decay.
        """
        first, last = optim.start_weight_decay, optim.end_weight_decay
        return cls(
            start=optim.weight_decay if first is None else first,
            end=optim.weight_decay if last is None else last,
            steps=steps,
            style=optim.weight_decay_incr_style,
        )

    def at(self, step: int) -> float:
        """Return the weight decay of optimizer step number `step`, counted from 1.

        Skipped iterations do not count as steps.
        """
        if self.style == "constant" or step > self.steps:
            return self.end
        ratio = step / self.steps
        share = ratio if self.style == "linear" else _half_wave(1.0 - ratio)
        return self.start + share * (self.end - self.start)


def _half_wave(ratio: float) -> float:
    return 0.5 * (math.cos(math.pi * ratio) + 1.0)
