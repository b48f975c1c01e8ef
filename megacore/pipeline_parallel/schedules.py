"""Pipeline schedules as data: the passes of each stage in order, and their messages.

A stage owns `chunks` chunks of consecutive layers (v). The model's chunks are numbered in the order
of its layers. Chunk c belongs to stage c mod pp, so that with v > 1 a micro batch passes through
the stages v times.

A simulation with given durations returns start and end of each pass, and the bubble.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import accumulate, chain
from typing import Literal, NamedTuple

from megacore.errors import MegacoreError, ParallelLayoutError


class Direction(Enum):
    """Direction of a pass through the model."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHTS = "weight gradients"
    """The part of a backward pass that its neighbour does not wait for, if it is delayed."""


class Pass(NamedTuple):
    """Pass of one micro batch through one of a stage's chunks."""

    direction: Direction
    micro_batch: int
    chunk: int
    """Number of the chunk on the stage: 0 to v - 1."""


Schedule = tuple[tuple[Pass, ...], ...]
"""Passes of every stage, in the order in which the stage runs them."""


class StagePasses(NamedTuple):
    """Passes of one stage, with what their messages depend on."""

    passes: tuple[Pass, ...]
    """Passes in the order in which the stage runs them."""
    dependencies: tuple[int, ...]
    """Number of the stage's own first passes without which another stage cannot send the message
    that a pass waits for; 0 for a pass without a message."""


class Message(NamedTuple):
    """Tensor sent from one pass to another: hidden states (forward) or gradient (backward)."""

    direction: Direction
    micro_batch: int
    chunk: int
    """The receiving chunk of the model."""
    source: int
    """The sending stage."""
    destination: int
    """The receiving stage."""
    number: int
    """Number that is unique among the messages of a schedule."""

    @property
    def channel(self) -> int:
        """Channel of the message, 0 to 3: two for each direction, by the parity of the sender.

        NCCL processes the messages between two ranks of a process group in order, whichever rank
        sends. Two stages therefore use a channel in one direction only: forward and backward
        messages are separate, and if both stages send forward (pp 2 with v > 1: 0 to 1, and 1 to 0
        at the wrap), one of them is even. The messages of a channel are sent and received in the
        same order, because all stages process micro batches and chunks in the same order.
        """
        return (2 if self.direction is Direction.BACKWARD else 0) + self.source % 2


@dataclass(frozen=True)
class Pipeline:
    """Numbers of stages and of chunks on each stage."""

    stages: int
    """Number of ranks with consecutive layers (pp)."""
    chunks: int = 1
    """Number of chunks on each stage (v)."""

    @classmethod
    def of(cls, schedule: Sequence[Sequence[Pass]]) -> "Pipeline":
        """Return the pipeline of a schedule."""
        return cls(
            len(schedule),
            1 + max((each.chunk for passes in schedule for each in passes), default=0),
        )

    @property
    def model_chunks(self) -> int:
        """Number of chunks of the whole model (pp x v)."""
        return self.stages * self.chunks

    def model_chunk(self, stage: int, chunk: int) -> int:
        """Return the number in the model of a stage's chunk."""
        return chunk * self.stages + stage

    def receive(self, stage: int, each: Pass) -> Message | None:
        """Return the message that a pass of `stage` waits for.

        Returns None for a forward pass of the first chunk, a backward pass of the last chunk, and
        delayed weight gradients.
        """
        return self._to(each.direction, each.micro_batch, self.model_chunk(stage, each.chunk))

    def send(self, stage: int, each: Pass) -> Message | None:
        """Return the message that a pass of `stage` sends.

        Returns None for a forward pass of the last chunk, a backward pass of the first chunk, and
        delayed weight gradients.
        """
        step = 1 if each.direction is Direction.FORWARD else -1
        return self._to(
            each.direction, each.micro_batch, self.model_chunk(stage, each.chunk) + step
        )

    def _to(self, direction: Direction, micro_batch: int, chunk: int) -> Message | None:
        """Return the message to one of the model's chunks; None if chunk or sender do not exist."""
        backward = direction is Direction.BACKWARD
        origin = chunk + 1 if backward else chunk - 1
        exist = 0 <= chunk < self.model_chunks and 0 <= origin < self.model_chunks
        if not exist or direction is Direction.WEIGHTS:
            return None
        number = 2 * (micro_batch * self.model_chunks + chunk) + backward
        return Message(
            direction, micro_batch, chunk, origin % self.stages, chunk % self.stages, number
        )


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """Return all forward passes, then all backward passes (Huang et al. 2019, arXiv:1811.06965).

    A stage keeps the activations of all m micro batches; the bubble is (pp - 1) / m of the compute
    time. Backward passes are in the order of the forward passes, so that gradients add up in the
    same order as in 1F1B.
    """
    _check_counts(stages, micro_batches, 1)
    forwards = _in_order(Direction.FORWARD, stages, micro_batches)
    return (forwards + _in_order(Direction.BACKWARD, stages, micro_batches),) * stages


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """Return forward and backward passes in turn (PipeDream-flush).

    See Narayanan et al. 2021 (arXiv:2104.04473). The bubble is that of GPipe, but a stage keeps the
    activations of at most min(m, pp - stage) micro batches.
    """
    _check_counts(stages, micro_batches, 1)
    return tuple(
        _in_turn(stages, micro_batches, 1, warm_up=stages - stage - 1) for stage in range(stages)
    )


def interleaved(stages: int, micro_batches: int, chunks: int) -> Schedule:
    """Return 1F1B over v chunks per stage (Narayanan et al. 2021, section 2.2).

    The order is Megatron-LM's. Micro batches are processed in groups of pp: a stage takes a group
    through its first chunk, then through the next. Stage i starts with 2 (pp - i - 1) + (v - 1) pp
    forward passes and keeps the activations of at most one more pass. The bubble is
    (pp - 1) / (m v) of the compute time: v times smaller, for v times as many messages.

    Raises:
        ParallelLayoutError: m is not a multiple of pp, or there is one stage.
    """
    _check_counts(stages, micro_batches, chunks)
    name = "parallel.pipeline_model_parallel_size"
    if stages == 1:
        raise ParallelLayoutError(
            f"parallel.virtual_pipeline_model_parallel_size is {chunks} and {name} is 1: with one "
            "stage there is nothing to interleave, set the former to 1"
        )
    if micro_batches % stages:
        below = micro_batches // stages * stages
        raise ParallelLayoutError(
            f"{micro_batches} micro batches per step are not a multiple of {name} {stages}, which "
            f"parallel.virtual_pipeline_model_parallel_size {chunks} needs: change "
            "train.global_batch_size or train.micro_batch_size so that they are "
            f"{f'{below} or ' if below else ''}{below + stages}, or set the latter to 1"
        )
    return tuple(
        _in_turn(
            stages, micro_batches, chunks, warm_up=2 * (stages - stage - 1) + (chunks - 1) * stages
        )
        for stage in range(stages)
    )


def forward_only(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Return only the forward passes, for evaluation.

    Any number of micro batches is allowed: the last group may be smaller.
    """
    _check_counts(stages, micro_batches, chunks)
    return (_in_order(Direction.FORWARD, stages, micro_batches, chunks),) * stages


def delay_weight_gradients(schedule: Schedule) -> Schedule:
    """Return a schedule whose backward passes leave the gradients of the weights to later passes.

    A stage sends the gradient of its input before it computes those of its weights. Stage i leaves
    up to i of these passes for later, so that they fill the time in which it would wait: with 1F1B
    this is ZB-H1 (Qi et al. 2023, arXiv:2401.10241). With equal chunks and at least pp micro
    batches, a stage is then idle for (pp - 1) (F + B - W) instead of (pp - 1) (F + B + W), where F,
    B and W are the times of forward pass, input gradient and weight gradients; the interleaved
    schedule is idle for 1 / v of both. The backward pass of the model's first chunk, which sends
    nothing, stays whole. The gradients of a chunk's weights are added in the order of the micro
    batches, as without delay.
    """
    return tuple(_with_weight_gradients(passes, stage) for stage, passes in enumerate(schedule))


def build_schedule(
    kind: Literal["gpipe", "1f1b"],
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    *,
    delayed: bool = False,
) -> Schedule:
    """Return the schedule named by `parallel.pipeline_schedule`.

    With more than one chunk per stage it is interleaved 1F1B.

    Args:
        kind: gpipe or 1f1b.
        stages: number of stages (pp).
        micro_batches: micro batches of one step on each data-parallel rank (m).
        chunks: chunks per stage (v).
        delayed: True to delay the weight gradients (`parallel.delay_weight_gradients`).

    Raises:
        ParallelLayoutError: a count is below 1, gpipe has several chunks, or `interleaved` refuses
            the counts.
    """
    if chunks > 1 and kind == "gpipe":
        raise ParallelLayoutError(
            "parallel.pipeline_schedule is gpipe and parallel.virtual_pipeline_model_parallel_size "
            f"is {chunks}: only 1f1b can be interleaved, set the former to 1f1b or the latter to 1"
        )
    _check_counts(stages, micro_batches, chunks)
    if chunks > 1:
        schedule = interleaved(stages, micro_batches, chunks)
    else:
        schedule = (gpipe if kind == "gpipe" else one_f_one_b)(stages, micro_batches)
    return delay_weight_gradients(schedule) if delayed else schedule


def passes_of_stage(schedule: Schedule, stage: int) -> StagePasses:
    """Return the passes of one stage of a schedule without a deadlock.

    A message depends on the passes that precede its pass at the sender, and on what the messages of
    these depend on: for example that of a gradient on the receiver's forward pass.
    """
    pipeline = Pipeline.of(schedule)
    dependencies: list[int] = []
    sent: dict[Message, int] = {}  # a message's number of dependencies
    latest = [0] * len(schedule)
    waiting = [deque(passes) for passes in schedule]
    while remaining := sum(map(len, waiting)):
        for number, passes in enumerate(waiting):
            while passes:
                message = pipeline.receive(number, passes[0])
                if message is not None and message not in sent:
                    break
                needed = 0 if message is None else sent[message]
                if number == stage:
                    dependencies.append(needed)
                    latest[number] = len(dependencies)
                else:
                    latest[number] = max(latest[number], needed)
                result = pipeline.send(number, passes.popleft())
                if result is not None:
                    sent[result] = latest[number]
        assert sum(map(len, waiting)) < remaining, "the schedule ends in a deadlock"
    return StagePasses(schedule[stage], tuple(dependencies))


def max_in_flight(passes: Sequence[Pass]) -> int:
    """Return the maximum number of a stage's forward passes that await their backward pass."""
    steps = {Direction.FORWARD: 1, Direction.BACKWARD: -1, Direction.WEIGHTS: 0}
    return max(accumulate(steps[each.direction] for each in passes), default=0)


def _in_order(
    direction: Direction, stages: int, micro_batches: int, chunks: int = 1
) -> tuple[Pass, ...]:
    """Return the passes of one direction, the same on every stage.

    A group of pp micro batches passes through one chunk after another.
    """
    backward = direction is Direction.BACKWARD
    return tuple(
        Pass(direction, micro_batch, chunk)
        for group in range(0, micro_batches, stages)
        for chunk in (reversed(range(chunks)) if backward else range(chunks))
        for micro_batch in range(group, min(group + stages, micro_batches))
    )


def _in_turn(stages: int, micro_batches: int, chunks: int, *, warm_up: int) -> tuple[Pass, ...]:
    """Return `warm_up` forward passes, then forward and backward in turn, then backward passes."""
    forwards = _in_order(Direction.FORWARD, stages, micro_batches, chunks)
    backwards = _in_order(Direction.BACKWARD, stages, micro_batches, chunks)
    steady = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    return (*forwards[:warm_up], *steady, *backwards[max(0, len(forwards) - warm_up) :])


def _with_weight_gradients(passes: Sequence[Pass], stage: int) -> tuple[Pass, ...]:
    """Return a stage's passes with weight gradients `stage` backward passes after their own."""
    order: list[Pass] = []
    waiting: deque[Pass] = deque()
    for each in passes:
        order.append(each)
        if each.direction is Direction.BACKWARD and (stage, each.chunk) != (0, 0):
            waiting.append(each._replace(direction=Direction.WEIGHTS))
            if len(waiting) > stage:
                order.append(waiting.popleft())
    return (*order, *waiting)


def _check_counts(stages: int, micro_batches: int, chunks: int) -> None:
    if min(stages, micro_batches, chunks) < 1:
        raise ParallelLayoutError(
            f"a schedule of {micro_batches} micro batches on {stages} pipeline stages with "
            f"{chunks} chunks each: every count must be at least 1"
        )


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

    @property
    def delayed(self) -> bool:
        """True if weight gradients are separate passes."""
        return any(span.work.direction is Direction.WEIGHTS for span in self.spans[-1])

    @cached_property
    def equal_bubble(self) -> float:
        """Bubble fraction if all chunks cost the same and messages take no time.

        A backward pass takes twice as long as a forward pass, and weight gradients are half of it.
        The fraction is then (pp - 1) / (m v), and with delayed weight gradients a third of it (two
        thirds with GPipe), if there are at least pp micro batches.
        """
        passes = tuple(tuple(span.work for span in spans) for spans in self.spans)
        return simulate(passes).bubble_fraction


def simulate(
    schedule: Schedule,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
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
        weights: time of the weight gradients in it, which counts where the schedule delays them;
            None means half of the backward pass.
        latency: time between the end of a pass and the arrival of its message.

    Raises:
        ScheduleError: the stages wait for each other, or a backward pass precedes its forward pass,
            or weight gradients their backward pass.
    """
    pipeline = Pipeline.of(schedule)
    forward = (1.0,) * pipeline.model_chunks if forward is None else forward
    backward = [2 * duration for duration in forward] if backward is None else backward
    weights = [duration / 2 for duration in backward] if weights is None else weights
    delayed = {
        pipeline.model_chunk(stage, each.chunk)
        for stage, passes in enumerate(schedule)
        for each in passes
        if each.direction is Direction.WEIGHTS
    }
    backward = [
        whole - part if chunk in delayed else whole
        for chunk, (whole, part) in enumerate(zip(backward, weights, strict=True))
    ]
    durations: dict[Direction, Sequence[float]] = {
        Direction.FORWARD: forward,
        Direction.BACKWARD: backward,
        Direction.WEIGHTS: weights,
    }
    world = _World(pipeline, durations, latency)
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


_NEEDED = {Direction.BACKWARD: Direction.FORWARD, Direction.WEIGHTS: Direction.BACKWARD}
"""The pass of the same micro batch and chunk that another one needs."""


@dataclass
class _World:
    """State shared by the stages."""

    pipeline: Pipeline
    durations: dict[Direction, Sequence[float]]
    """Duration of a pass through each of the model's chunks."""
    latency: float
    arrivals: dict[Message, float] = field(default_factory=dict)
    """Arrival time of every message sent so far."""
    completed: set[tuple[Direction, int, int]] = field(default_factory=set)
    """Direction, micro batch and model chunk of every completed pass."""

    def advance(self, stage: int, passes: Sequence[Pass], spans: list[Span]) -> int:
        """Run the passes of a stage after `spans` until one has to wait; return their number."""
        before = len(spans)
        for each in passes[before:]:
            chunk = self.pipeline.model_chunk(stage, each.chunk)
            message = self.pipeline.receive(stage, each)
            if message is not None and message not in self.arrivals:
                break
            needed = _NEEDED.get(each.direction)
            if needed and (needed, each.micro_batch, chunk) not in self.completed:
                break
            self.completed.add((each.direction, each.micro_batch, chunk))
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
