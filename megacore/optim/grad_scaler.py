"""Loss scaling for fp16 (Micikevicius et al. 2018).

The hysteresis is that of Megatron-LM's DynamicGradScaler.
"""

from typing import NotRequired, TypedDict

from megacore.config.optim import LossScaleConfig

GROWTH_FACTOR = 2.0
BACKOFF_FACTOR = 0.5


class LossScaleState(TypedDict):
    """State of a scaler in a checkpoint."""

    scale: float
    growth_tracker: int
    hysteresis_tracker: int
    skipped_at_minimum: NotRequired[int]
    """Missing in checkpoints of older versions."""


class DynamicLossScaler:
    """Dynamic loss scale with hysteresis.

    The scale doubles after `window` steps without overflow and is halved after `hysteresis`
    overflows. The count of overflows is reset only when the scale grows, as in Megatron-LM: after
    the first backoff each further overflow halves the scale. The scale never falls below its
    minimum. If `patience` iterations in a row overflow there, the scale is not the cause.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self._config = config
        self._scale = config.initial
        self._growth_tracker = 0
        self._hysteresis_tracker = config.hysteresis
        self._skipped_at_minimum = 0

    @property
    def scale(self) -> float:
        """Factor on the loss before backward."""
        return self._scale

    @property
    def exhausted(self) -> bool:
        """True if a lower scale cannot help.

        The last `patience` iterations in a row overflowed at the minimum.
        """
        return self._skipped_at_minimum >= self._config.patience

    def update(self, *, overflow: bool) -> None:
        """Update the scale after an iteration; `overflow` must be the same on every rank."""
        if overflow:
            self._skipped_at_minimum += self._scale <= self._config.minimum
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self._scale = max(self._scale * BACKOFF_FACTOR, self._config.minimum)
            return
        self._skipped_at_minimum = 0
        self._growth_tracker += 1
        if self._growth_tracker >= self._config.window:
            self._growth_tracker = 0
            self._hysteresis_tracker = self._config.hysteresis
            self._scale *= GROWTH_FACTOR

    def state(self) -> LossScaleState:
        """Return the values for a checkpoint."""
        return {
            "scale": self._scale,
            "growth_tracker": self._growth_tracker,
            "hysteresis_tracker": self._hysteresis_tracker,
            "skipped_at_minimum": self._skipped_at_minimum,
        }

    def load_state(self, state: LossScaleState) -> None:
        """Restore a checkpoint's values."""
        self._scale = float(state["scale"])
        self._growth_tracker = int(state["growth_tracker"])
        self._hysteresis_tracker = int(state["hysteresis_tracker"])
        self._skipped_at_minimum = int(state.get("skipped_at_minimum", 0))
