"""Where a fine-tuning stands, beside what model and optimizer hold."""

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from megacore.errors import CheckpointError

PROGRESS_NAME = "progress.json"
_VERSION = 1


@dataclass
class Progress:
    """Position and account of a run; the samples that come next follow from it."""

    iteration: int = 0
    """Optimizer steps taken."""
    epoch: int = 0
    """Passes over the training split that are complete."""
    batches: int = 0
    """Forward passes of each rank in the pass that is under way."""
    consumed_samples: int = 0
    """Read by all ranks together."""
    consumed_tokens: int = 0
    """Read by all ranks together, padding left out."""
    evaluation_due: bool = True
    """Whether the model as it is now is to be evaluated, which was not done yet."""
    start_metrics: dict[str, float] | None = None
    """Of the model before the first step."""
    metrics: dict[str, float] | None = None
    """Of the last evaluation."""
    evaluated: int | None = None
    """Step after which that was."""
    epoch_seconds: float = 0.0
    """Training time in the pass that is under way."""
    train_seconds: list[float] = field(default_factory=list)
    """Training time of each complete pass."""
    evaluation_seconds: float = 0.0
    """Of the last evaluation."""
    skipped: int = 0
    """Steps in a row that fp16 has skipped since a gradient overflowed."""

    @property
    def own_metrics(self) -> dict[str, float] | None:
        """Of the model as it is now; None where it was not evaluated."""
        return self.metrics if self.evaluated == self.iteration else None

    def to_json(self) -> dict[str, Any]:
        """Values for a checkpoint."""
        return {"version": _VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Read them back. Raises CheckpointError."""
        kept = dict(values)
        version = kept.pop("version", None)
        if version != _VERSION:
            raise CheckpointError(
                f"a checkpoint's {PROGRESS_NAME} has version {version}, this version reads {_VERSION}: install the "
                "version of megacore that wrote it"
            )
        try:
            return cls(**kept)
        except TypeError as error:
            raise CheckpointError(f"a checkpoint's {PROGRESS_NAME} cannot be read: {error}") from error
