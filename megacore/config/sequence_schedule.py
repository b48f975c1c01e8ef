"""Sequence length of a training as a function of the consumed samples, and its checks."""

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Self

from megacore.config.batch_schedule import BatchSchedule
from megacore.config.data import DataConfig

if TYPE_CHECKING:
    from megacore.config.run import RunConfig


@dataclass(frozen=True)
class SequenceSchedule:
    """Sequence length of each global batch (Li et al. 2022, arXiv:2108.06084).

    A sample always has data.seq_length tokens (s) and is cut into s / l sequences of l tokens, so
    the data position, the tokens of a batch and their order do not depend on the schedule.
    """

    longest: int
    """Tokens of a sample (s)."""
    phases: tuple[tuple[int, int], ...]
    """Consumed samples from which a length applies, ascending from 0, and the length in tokens."""

    @classmethod
    def of(cls, data: DataConfig) -> Self:
        """Return the schedule of a configuration; without one, the length is data.seq_length."""
        phases = data.seq_length_schedule
        if phases is None:
            return cls(data.seq_length, ((0, data.seq_length),))
        return cls(data.seq_length, tuple((phase.samples, phase.seq_length) for phase in phases))

    def at(self, consumed_samples: int) -> int:
        """Return the length of the sequences of the global batch at `consumed_samples`."""
        return next(length for first, length in reversed(self.phases) if first <= consumed_samples)

    def samples_by_length(self, batch: BatchSchedule, start: int, stop: int) -> dict[int, int]:
        """Return the samples of each length in the global batches from `start` up to `stop`.

        The length of the last global batch comes last.
        """
        samples: dict[int, int] = {}
        while start < stop:
            size, length = batch.at(start), self.at(start)
            samples[length] = samples.pop(length, 0) + size
            start += size
        return samples


def check_sequence_schedule(config: "RunConfig") -> None:
    """Raise ValueError for a schedule that the family, the engine or data.seq_length excludes."""
    phases, name = config.data.seq_length_schedule, "data.seq_length_schedule"
    if phases is None:
        return
    if config.family != "gpt":
        raise ValueError(
            f"{name} is given but family is {config.family}, whose samples are whole sentences "
            "that cannot be cut: remove it"
        )
    if config.data.packing != "packed":
        raise ValueError(
            f"{name} is given but data.packing is {config.data.packing}, which keeps documents "
            "whole that shorter sequences would cut: set the latter to packed, or remove the former"
        )
    if config.train.cuda_graphs:
        raise ValueError(
            f"{name} is given but train.cuda_graphs is true, whose graph has one shape: set the "
            "latter to false, or remove the former"
        )
    if phases[0].samples != 0:
        raise ValueError(
            f"{name}[0].samples is {phases[0].samples}, so that the first batches have no length: "
            "set it to 0"
        )
    for number, (before, phase) in enumerate(pairwise(phases), 1):
        if phase.samples <= before.samples:
            raise ValueError(
                f"{name}[{number}].samples {phase.samples} does not exceed {before.samples}, where "
                "the part before it begins: sort the parts by samples"
            )
    longest = config.data.seq_length
    for number, phase in enumerate(phases):
        if longest % phase.seq_length:
            raise ValueError(
                f"{name}[{number}].seq_length {phase.seq_length} does not divide data.seq_length "
                f"{longest}, so that tokens of a sample would be lost: choose a divisor of "
                f"{longest}"
            )
