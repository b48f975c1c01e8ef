"""Simulated time of a schedule: the bubble of the literature, and deadlocks."""

import pytest

from megacore.pipeline_parallel.schedules import (
    Direction,
    Pass,
    Pipeline,
    Schedule,
    build_schedule,
    forward_only,
)
from megacore.pipeline_parallel.simulate import ScheduleError, Timeline, simulate
from tests.pipeline_parallel._grid import CASES

F, B = Direction.FORWARD, Direction.BACKWARD


def spans(timeline: Timeline) -> list[list[tuple[str, int, float, float]]]:
    return [
        [(span.work.direction.value[0], span.work.micro_batch, *span[1:]) for span in row]
        for row in timeline.spans
    ]


def test_the_bubble_of_equal_chunks_equals_the_literature() -> None:
    for case in CASES:
        expected = (case.stages - 1) / (case.micro_batches * case.chunks)
        assert simulate(case.schedule).bubble_fraction == pytest.approx(expected, abs=1e-9), case


@pytest.mark.parametrize(("forward", "backward"), [(1.0, 1.0), (3.0, 1.0), (1.0, 7.0), (0.7, 1.9)])
def test_the_bubble_does_not_depend_on_the_ratio_of_forward_and_backward(
    forward: float, backward: float
) -> None:
    for case in CASES[::7]:
        chunks = case.stages * case.chunks
        timeline = simulate(case.schedule, [forward] * chunks, [backward] * chunks)
        assert timeline.bubble_fraction == pytest.approx(
            (case.stages - 1) / (case.micro_batches * case.chunks)
        ), case


def test_two_stages_equal_a_timeline_by_hand() -> None:
    timeline = simulate(build_schedule("1f1b", 2, 2))
    assert spans(timeline) == [
        [("f", 0, 0, 1), ("f", 1, 1, 2), ("b", 0, 4, 6), ("b", 1, 7, 9)],
        [("f", 0, 1, 2), ("b", 0, 2, 4), ("f", 1, 4, 5), ("b", 1, 5, 7)],
    ]
    assert (timeline.makespan, timeline.busy, timeline.bubble_fraction) == (9, (6, 6), 0.5)


def test_latency_delays_messages_but_is_not_busy_time() -> None:
    timeline = simulate(build_schedule("1f1b", 2, 2), latency=0.5)
    assert spans(timeline)[1][0] == ("f", 0, 1.5, 2.5)
    assert timeline.busy == (6, 6)
    assert timeline.makespan == 10


def test_a_slow_stage_sets_the_pace() -> None:
    timeline = simulate(build_schedule("1f1b", 2, 8), [1, 3])
    assert timeline.busy == (24, 72)
    # plus the first forward and last backward pass of the other stage
    assert timeline.makespan == 72 + 1 + 2
    assert timeline.bubble_fraction == pytest.approx(2 * 75 / 96 - 1)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks"), [(4, 8, 1), (4, 8, 2), (3, 9, 3), (2, 2, 4)]
)
def test_a_pass_starts_when_its_stage_is_free_and_its_message_has_arrived(
    stages: int, micro_batches: int, chunks: int
) -> None:
    schedule, pipeline, latency = (
        build_schedule("1f1b", stages, micro_batches, chunks),
        Pipeline(stages, chunks),
        0.25,
    )
    forward = [1 + 0.3 * chunk for chunk in range(stages * chunks)]
    timeline = simulate(schedule, forward, latency=latency)
    ends = {
        pipeline.send(stage, span.work): span.end + latency
        for stage, row in enumerate(timeline.spans)
        for span in row
    }
    for stage, row in enumerate(timeline.spans):
        assert tuple(span.work for span in row) == schedule[stage]
        free = 0.0
        for span in row:
            message = pipeline.receive(stage, span.work)
            assert span.start == max(free, 0.0 if message is None else ends[message])
            cost = forward[pipeline.model_chunk(stage, span.work.chunk)]
            assert span.end - span.start == pytest.approx(
                cost * (1 if span.work.direction is F else 2)
            )
            free = span.end


def test_forward_only_has_no_deadlock() -> None:
    for stages in range(1, 9):
        for micro_batches in (1, stages, 2 * stages + 1):
            for chunks in (1, 2, 3):
                assert simulate(forward_only(stages, micro_batches, chunks)).bubble_fraction >= 0


@pytest.mark.parametrize(
    "schedule",
    [
        # Stage 0 waits for a gradient before it sends the hidden states that it is the gradient of.
        (
            (Pass(F, 0, 0), Pass(B, 0, 0), Pass(B, 1, 0), Pass(F, 1, 0)),
            (Pass(F, 0, 0), Pass(F, 1, 0), Pass(B, 0, 0)),
        ),
        # The last stage goes backward before it went forward.
        ((Pass(F, 0, 0), Pass(B, 0, 0)), (Pass(B, 0, 0), Pass(F, 0, 0))),
        # A message that nobody sends.
        ((), (Pass(F, 0, 0), Pass(B, 0, 0))),
    ],
)
def test_a_deadlock_is_refused_with_the_waiting_stages(schedule: Schedule) -> None:
    with pytest.raises(
        ScheduleError, match=r"2 stages ends in a deadlock: .*stage 1 waits with .* of micro batch"
    ):
        simulate(schedule)
