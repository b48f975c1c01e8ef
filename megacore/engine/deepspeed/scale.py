"""DeepSpeed's dynamic loss scale, in the words of a checkpoint, which the native engine reads and writes too."""

from typing import Any

from megacore.config.optim import LossScaleConfig
from megacore.optim.grad_scaler import LossScaleState


class DeepSpeedLossScale:
    """Moves DeepSpeed's scaler, which counts otherwise than the native engine's and to the same end."""

    def __init__(self, scaler: Any, config: LossScaleConfig) -> None:
        """Take hold of DeepSpeed's `DynamicLossScaler`, which is not to raise at its minimum but to wait, as ours.

        Nor is it to move by itself: DeepSpeed has it grow between backward and the division by the scale, which halves
        that iteration's gradients, and in ZeRO-3 the norm that it tells.
        """
        self._scaler, self._config = scaler, config
        self._move, scaler.update_scale = scaler.update_scale, lambda overflow: None
        self._skipped_at_minimum = 0
        scaler.raise_error_at_min_scale = False

    @property
    def scale(self) -> float:
        """Factor on the loss before backward."""
        return float(self._scaler.cur_scale)

    @property
    def exhausted(self) -> bool:
        """Whether the last `patience` iterations in a row overflowed at the minimum."""
        return self._skipped_at_minimum >= self._config.patience

    def update(self, *, overflow: bool) -> None:
        """Count an iteration, and choose the scale of the next."""
        at_minimum = self.scale <= self._config.minimum
        self._skipped_at_minimum = self._skipped_at_minimum + at_minimum if overflow else 0
        self._move(overflow)

    def state(self) -> LossScaleState:
        """Values for a checkpoint."""
        scaler, window = self._scaler, self._config.window
        # Only its place within the window matters; at the end of one the scale grows in the next good iteration.
        good = scaler.cur_iter - scaler.last_overflow_iter - 1
        return {
            "scale": self.scale,
            "growth_tracker": (good - 1) % window + 1 if good else 0,
            "hysteresis_tracker": scaler.cur_hysteresis,
            "skipped_at_minimum": self._skipped_at_minimum,
        }

    def load_state(self, state: LossScaleState) -> None:
        """Continue from a checkpoint's values."""
        self._scaler.cur_scale = float(state["scale"])
        self._scaler.cur_iter, self._scaler.last_overflow_iter = int(state["growth_tracker"]), -1
        self._scaler.cur_hysteresis = max(1, int(state["hysteresis_tracker"]))
        self._skipped_at_minimum = int(state.get("skipped_at_minimum", 0))
