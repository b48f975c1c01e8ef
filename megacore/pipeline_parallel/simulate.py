"""Simulation of a schedule with given durations: start and end of each pass, and the bubble."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megacore.errors import MegacoreError
from megacore.pipeline_parallel.schedules import Direction, Message, Pass, Pipeline, Schedule


class ScheduleError(MegacoreError):
    """Error of a schedule in which a stage waits forever."""


class Span(NamedTuple):
    """Pass with its start and end."""

    work: Pass
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Times of a schedule, starting at 0, in the unit of the passes' durations."""

    spans: tuple[tuple[Span, ...], ...]
    """Passes of every stage, in order."""
    chunks: int
    """Number of chunks on each stage (v)."""

    @cached_property
    def makespan(self) -> float:
        """Time at which the last stage ends."""
        return max(spans[-1].end for spans in self.spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Compute time of each stage."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """Idle time over compute time, summed over all stages.

        With equal chunks and no latency this is (pp - 1) / (m v) (Narayanan et al. 2021, section
        2.2). Stages of unequal load wait for the largest one, which counts as idle time too.
        """
        return len(self.spans) * self.makespan / sum(self.busy) - 1


def simulate(
    schedule: Schedule,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    *,
    latency: float = 0.0,
) -> Timeline:
    """Simulate a schedule with given durations.

    Every pass starts as soon as its stage is free and its message has arrived. A stage sends
    without waiting, and messages in transit block no stage.

    Args:
        schedule: passes of every stage.
        forward: time of a forward pass through each of the model's chunks; None means 1 for all.
        backward: time of a backward pass; None means twice the forward pass.
        latency: time between the end of a pass and the arrival of its message.

    Raises:
        ScheduleError: the stages wait for each other, or a backward pass precedes its forward pass.
    """
    pipeline = Pipeline.of(schedule)
    forward = (1.0,) * pipeline.model_chunks if forward is None else forward
    backward = [2 * duration for duration in forward] if backward is None else backward
    world = _World(pipeline, {Direction.FORWARD: forward, Direction.BACKWARD: backward}, latency)
    spans: list[list[Span]] = [[] for _ in schedule]
    remaining = sum(map(len, schedule))
    while remaining:
        completed = sum(
            world.advance(stage, schedule[stage], spans[stage]) for stage in range(pipeline.stages)
        )
        if not completed:
            raise ScheduleError(_deadlock(schedule, spans))
        remaining -= completed
    return Timeline(tuple(map(tuple, spans)), pipeline.chunks)


@dataclass
class _World:
    """State shared by the stages."""

    pipeline: Pipeline
    durations: dict[Direction, Sequence[float]]
    """Duration of a pass through each of the model's chunks."""
    latency: float
    arrivals: dict[Message, float] = field(default_factory=dict)
    """Arrival time of every message sent so far."""
    forwards: set[tuple[int, int]] = field(default_factory=set)
    """Micro batch and model chunk of every completed forward pass."""

    def advance(self, stage: int, passes: Sequence[Pass], spans: list[Span]) -> int:
        """Run the passes of a stage after `spans` until one has to wait; return their number."""
        before = len(spans)
        for each in passes[before:]:
            chunk = self.pipeline.model_chunk(stage, each.chunk)
            message = self.pipeline.receive(stage, each)
            if message is not None and message not in self.arrivals:
                break
            if each.direction is Direction.FORWARD:
                self.forwards.add((each.micro_batch, chunk))
            elif (each.micro_batch, chunk) not in self.forwards:
                break
            free = spans[-1].end if spans else 0.0
            start = max(free, self.arrivals[message]) if message is not None else free
            end = start + self.durations[each.direction][chunk]
            spans.append(Span(each, start, end))
            sent = self.pipeline.send(stage, each)
            if sent is not None:
                self.arrivals[sent] = end + self.latency
        return len(spans) - before


def _deadlock(schedule: Schedule, spans: Sequence[Sequence[Span]]) -> str:
    stuck = [
        (
            f"stage {stage} waits with {each.direction.value} of micro batch {each.micro_batch} in "
            f"chunk {each.chunk}"
        )
        for stage, (passes, completed) in enumerate(zip(schedule, spans, strict=True))
        for each in passes[len(completed) : len(completed) + 1]
    ]
    return (
        f"the schedule of {len(schedule)} stages ends in a deadlock: {', '.join(stuck)}: correct "
        "their order"
    )
