"""Training state of a run: all that the loop needs to resume, apart from the engine's state."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from megacore.artifact.workspace import CONFIG_KEY
from megacore.config.batch_schedule import BatchSchedule
from megacore.errors import CheckpointError

PLANNED_KEY = "planned_samples"
"""Key of the samples for which the order of the train split was planned, in the state of a
checkpoint; earlier versions did not store them."""
STATE_VERSION = 4
_READABLE = (3, STATE_VERSION)
"""Versions that can be read; version 3 has no `passed_over`."""


@dataclass
class LogInterval:
    """Losses and counters since the last log line."""

    losses: dict[str, list[float]] = field(default_factory=dict)
    """Losses of each applied iteration, by name. They are not summed up, so that a run resumed
    within an interval adds them in the same order."""
    skipped_iterations: int = 0
    nan_iterations: int = 0

    @property
    def iterations(self) -> int:
        """Number of iterations, applied and skipped."""
        return max(map(len, self.losses.values()), default=0) + self.skipped_iterations

    def add(self, losses: Mapping[str, float]) -> None:
        """Append an applied iteration's losses, by name."""
        for name, loss in losses.items():
            self.losses.setdefault(name, []).append(loss)

    def mean(self, name: str) -> float:
        """Return the mean of a loss over the interval's applied iterations; NaN without any."""
        losses = self.losses.get(name, [])
        return sum(losses) / len(losses) if losses else float("nan")

    def clear(self) -> None:
        """Start a new interval."""
        self.losses, self.skipped_iterations, self.nan_iterations = {}, 0, 0


@dataclass
class TrainState:
    """Position of a run; the next data is a pure function of `consumed_samples`."""

    iteration: int = 0
    """Number of completed iterations, including skipped ones."""
    consumed_samples: int = 0
    """Number of samples read by all ranks together."""
    applied_iterations: int = 0
    """Number of optimizer steps, which the learning rate schedule counts."""
    recent_loss: float | None = None
    """Moving average of the losses of applied iterations, the reference for loss spikes; None
    before the first."""
    interval: LogInterval = field(default_factory=LogInterval)
    """Losses and counters since the last log line."""
    passed_over: list[tuple[int, int]] = field(default_factory=list)
    """First and last sample of each global batch skipped because of `train.skip_samples`, or
    because it was bad."""

    def to_json(self) -> dict[str, Any]:
        """Return the values for a checkpoint."""
        return {"version": STATE_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Read a checkpoint's values. Raises CheckpointError if they are damaged.

        A recent loss that is not finite, as earlier versions stored it, becomes None.
        """
        try:
            values = dict(values)
            version = values.pop("version")
            if version not in _READABLE:
                raise CheckpointError(
                    f"the checkpoint's training state has version {version}, this version reads "
                    f"{' and '.join(map(str, _READABLE))}: install the version of megacore that "
                    "wrote it"
                )
            interval = LogInterval(**values.pop("interval"))
            passed_over = [(int(first), int(last)) for first, last in values.pop("passed_over", ())]
            state = cls(interval=interval, passed_over=passed_over, **values)
            if state.recent_loss is not None and not math.isfinite(state.recent_loss):
                state.recent_loss = None
            return state
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint's training state is damaged ({error}): use another one"
            ) from error


def planned_samples(saved: Mapping[str, Any]) -> int:
    """Return the samples of the train split for which the run of a checkpoint planned its order.

    `saved` is the checkpoint's state. Samples beyond this number may come from further epochs.

    Raises CheckpointError if the training state or its configuration is missing or damaged.
    """
    try:
        if PLANNED_KEY in saved:
            return int(saved[PLANNED_KEY])
        train = saved[CONFIG_KEY]["train"]
        schedule, iterations = BatchSchedule.of_json(train), int(train["train_iters"])
        state = TrainState.from_json(saved["train"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint does not show how many samples its run planned ({error}): use another "
            "one"
        ) from error
    # Earlier versions planned a resumed run also as if its batch size had held from the start.
    return max(
        schedule.consumed_after(iterations),
        schedule.consumed_after(max(0, iterations - state.iteration), state.consumed_samples),
    )
