"""Where a run stands: everything the loop needs to go on, apart from the engine's own state."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from megacore.errors import CheckpointError

STATE_VERSION = 4
_READABLE = (3, STATE_VERSION)
"""Version 3 had no `passed_over`."""


@dataclass
class LogInterval:
    """What was gathered since the last log line."""

    losses: dict[str, list[float]] = field(default_factory=dict)
    """By name, each loss of each applied iteration: kept apart, so that a run resumed within an
    interval adds them up alike."""
    skipped_iterations: int = 0
    nan_iterations: int = 0

    def add(self, losses: Mapping[str, float]) -> None:
        """Take note of an applied iteration's losses, by name."""
        for name, loss in losses.items():
            self.losses.setdefault(name, []).append(loss)

    def mean(self, name: str) -> float:
        """Mean of a loss over the interval's applied iterations, NaN without any."""
        losses = self.losses.get(name, [])
        return sum(losses) / len(losses) if losses else float("nan")

    def clear(self) -> None:
        """Begin a new interval."""
        self.losses, self.skipped_iterations, self.nan_iterations = {}, 0, 0


@dataclass
class TrainState:
    """Position of a run; the data that comes next is a pure function of `consumed_samples`."""

    iteration: int = 0
    """Iterations done, skipped ones included."""
    consumed_samples: int = 0
    """Samples read by all ranks together."""
    applied_iterations: int = 0
    """Optimizer steps made: what the learning rate schedule counts."""
    recent_loss: float | None = None
    """Moving average of the losses of applied iterations, which a loss spike is measured by; None
    before the first."""
    interval: LogInterval = field(default_factory=LogInterval)
    """Since the last log line."""
    passed_over: list[tuple[int, int]] = field(default_factory=list)
    """First and last sample of each global batch that `train.skip_samples` kept from training."""

    def to_json(self) -> dict[str, Any]:
        """Values for a checkpoint."""
        return {"version": STATE_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Read a checkpoint's values. Raises CheckpointError."""
        try:
            values = dict(values)
            version = values.pop("version")
            if version not in _READABLE:
                raise CheckpointError(
                    f"the checkpoint's training state has version {version}, this version reads "
                    f"{STATE_VERSION}: install the version of megacore that wrote it"
                )
            interval = LogInterval(**values.pop("interval"))
            passed_over = [(int(first), int(last)) for first, last in values.pop("passed_over", ())]
            return cls(interval=interval, passed_over=passed_over, **values)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint's training state is damaged ({error}): use another one"
            ) from error
