"""Global batch size as a function of the consumed samples, with Megatron-LM's ramp-up."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from megacore.config.train import TrainConfig


class _Level(NamedTuple):
    """Part of a run with a constant batch size."""

    size: int
    """Samples per batch."""
    end: int | None
    """Consumed samples at which the batch size grows; None for the last level."""


@dataclass(frozen=True)
class BatchSchedule:
    """Global batch size, which grows by `increment` at equal intervals within `rampup_samples`.

    The batches equal those of Megatron-LM's `--rampup-batch-size START INCREMENT SAMPLES`: there
    are (global_batch_size - start) / increment steps, each of which lasts samples / steps consumed
    samples.
    """

    global_batch_size: int
    """Samples per batch after the ramp-up."""
    start: int
    """Samples per batch at the beginning; global_batch_size without ramp-up."""
    increment: int = 1
    """Samples by which the batch grows at each step."""
    rampup_samples: int = 0
    """Consumed samples at which global_batch_size is reached."""

    @classmethod
    def of(cls, train: TrainConfig) -> Self:
        """Return the schedule of a training configuration."""
        total, rampup = train.global_batch_size, train.rampup_batch_size
        if rampup is None:
            return cls(total, total)
        return cls(total, rampup.start, rampup.increment, rampup.samples)

    @classmethod
    def of_json(cls, train: Mapping[str, Any]) -> Self:
        """Return the schedule of the section `train` of a stored configuration.

        Only the fields of the batch are read, because others may be of an earlier version. Raises
        ValueError if they are damaged.
        """
        names = ("micro_batch_size", "global_batch_size", "rampup_batch_size")
        return cls.of(
            TrainConfig.model_validate({name: train[name] for name in names if name in train})
        )

    def at(self, consumed_samples: int) -> int:
        """Return the size of the global batch that begins at `consumed_samples`."""
        if self._steps == 0 or self.rampup_samples == 0 or consumed_samples > self.rampup_samples:
            return self.global_batch_size
        # Megatron-LM divides twice in double precision, which may round a whole number of steps
        # down: the step then begins one sample later.
        step = int(consumed_samples / (self.rampup_samples / self._steps))
        return self.start + step * self.increment

    def consumed_after(self, iterations: int, consumed: int = 0) -> int:
        """Return the consumed samples after `iterations` more global batches.

        The first of these batches begins at `consumed`.
        """
        for level in self._levels():
            batches = (
                iterations
                if level.end is None
                else min(iterations, _batches(level, consumed, level.end))
            )
            consumed += batches * level.size
            iterations -= batches
        return consumed

    def iterations_for(self, samples: int) -> int:
        """Return the smallest number of global batches with at least `samples` samples in total."""
        consumed = iterations = 0
        for level in self._levels():
            until = samples if level.end is None else min(samples, level.end)
            batches = _batches(level, consumed, until)
            consumed += batches * level.size
            iterations += batches
        return iterations

    @property
    def _steps(self) -> int:
        """Number of times that the batch grows."""
        return (self.global_batch_size - self.start) // self.increment

    def _levels(self) -> Iterator[_Level]:
        """Yield the levels in order of increasing batch size."""
        for step in range(self._steps):
            size = self.start + step * self.increment
            end = -(-(step + 1) * self.rampup_samples // self._steps)
            yield _Level(size, end if self.at(end) > size else end + 1)
        yield _Level(self.global_batch_size, None)


def _batches(level: _Level, consumed: int, until: int) -> int:
    """Return the number of the level's batches that begin in [consumed, until)."""
    return max(0, -(-(until - consumed) // level.size))
