"""Global batch size as a pure function of consumed samples, with Megatron-LM's ramp-up."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

from megacore.config.train import TrainConfig


class _Level(NamedTuple):
    """A part of a run with one batch size."""

    size: int
    """Samples of each batch."""
    end: int | None
    """Consumed samples from which on batches are larger; None for the last level."""


@dataclass(frozen=True)
class BatchSchedule:
    """The batch grows by `increment` each time an equal share of `rampup_samples` is consumed.

    These are the batches of Megatron-LM's `--rampup-batch-size START INCREMENT SAMPLES`:
    (global_batch_size - start) / increment steps, each of which lasts samples / steps consumed
    samples.
    """

    global_batch_size: int
    """Samples of a batch after the ramp-up."""
    start: int
    """Samples of the first batches; global_batch_size where there is no ramp-up."""
    increment: int = 1
    """Samples by which a batch grows."""
    rampup_samples: int = 0
    """Consumed samples at which global_batch_size is reached."""

    @classmethod
    def of(cls, train: TrainConfig) -> Self:
        """The schedule that a training loop's configuration describes."""
        total, rampup = train.global_batch_size, train.rampup_batch_size
        if rampup is None:
            return cls(total, total)
        return cls(total, rampup.start, rampup.increment, rampup.samples)

    def at(self, consumed_samples: int) -> int:
        """Samples of the global batch that begins at `consumed_samples`."""
        if self._steps == 0 or consumed_samples >= self.rampup_samples:
            return self.global_batch_size
        return self.start + consumed_samples * self._steps // self.rampup_samples * self.increment

    def consumed_after(self, iterations: int) -> int:
        """Samples consumed by the first `iterations` global batches."""
        consumed = 0
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
        """The fewest global batches that together have at least `samples` samples."""
        consumed = iterations = 0
        for level in self._levels():
            until = samples if level.end is None else min(samples, level.end)
            batches = _batches(level, consumed, until)
            consumed += batches * level.size
            iterations += batches
        return iterations

    @property
    def _steps(self) -> int:
        """How often the batch grows."""
        return (self.global_batch_size - self.start) // self.increment

    def _levels(self) -> Iterator[_Level]:
        """All batch sizes, the smallest first."""
        for step in range(self._steps):
            end = -(-(step + 1) * self.rampup_samples // self._steps)
            yield _Level(self.start + step * self.increment, end)
        yield _Level(self.global_batch_size, None)


def _batches(level: _Level, consumed: int, until: int) -> int:
    """Batches of this level that begin at or after `consumed` and before `until`."""
    return max(0, -(-(until - consumed) // level.size))
