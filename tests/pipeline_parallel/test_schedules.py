"""Schedules without processes: passes, messages in the order sent, and simulated times."""

from collections import defaultdict
from collections.abc import Iterator

import pytest

from megacore.errors import ParallelLayoutError
from megacore.parallel.mesh import CHANNELS
from megacore.pipeline_parallel.schedules import (
    Direction,
    Message,
    Pass,
    Pipeline,
    Schedule,
    ScheduleError,
    Timeline,
    build_schedule,
    forward_only,
    gpipe,
    interleaved,
    max_in_flight,
    one_f_one_b,
    simulate,
)
from tests.pipeline_parallel._grid import CASES, FLAT, INTERLEAVED

LETTERS = {Direction.FORWARD: "F", Direction.BACKWARD: "B", Direction.WEIGHTS: "W"}


def written(passes: tuple[Pass, ...]) -> str:
    """Format passes such as `F0.1 B0.1`: direction, micro batch and chunk."""
    return " ".join(f"{LETTERS[each.direction]}{each.micro_batch}.{each.chunk}" for each in passes)


def messages(schedule: Schedule) -> tuple[list[Message], list[Message]]:
    """Return the messages sent and received, stage after stage in the order of the passes."""
    pipeline = Pipeline.of(schedule)
    sent_and_received: tuple[list[Message], list[Message]] = ([], [])
    for stage, passes in enumerate(schedule):
        for each in passes:
            for kind, message in zip(
                sent_and_received,
                (pipeline.send(stage, each), pipeline.receive(stage, each)),
                strict=True,
            ):
                if message is not None:
                    kind.append(message)
    return sent_and_received


def by_route(items: list[Message]) -> dict[tuple[int, int, int], list[Message]]:
    routes = defaultdict(list)
    for message in items:
        routes[message.source, message.destination, message.channel].append(message)
    return dict(routes)


def warm_ups() -> Iterator[tuple[tuple[Pass, ...], int, int]]:
    """Yield a stage's passes and its numbers of warm-up and of forward passes."""
    for case in INTERLEAVED:
        for stage, passes in enumerate(case.schedule):
            total = case.micro_batches * case.chunks
            yield (
                passes,
                min(total, 2 * (case.stages - stage - 1) + (case.chunks - 1) * case.stages),
                total,
            )


def test_the_grid_contains_its_corners() -> None:
    sizes = {case[1:] for case in CASES}
    assert {
        (1, 1, 1),
        (1, 64, 1),
        (16, 64, 1),
        (2, 2, 2),
        (16, 16, 4),
        (16, 64, 4),
        (15, 60, 3),
        (3, 63, 3),
        (2, 64, 2),
    } <= sizes


def test_every_micro_batch_passes_every_chunk_once_forward_first() -> None:
    for case in CASES:
        everything = {
            Pass(direction, micro_batch, chunk)
            for direction in (Direction.FORWARD, Direction.BACKWARD)
            for micro_batch in range(case.micro_batches)
            for chunk in range(case.chunks)
        }
        assert len(case.schedule) == case.stages
        for passes in case.schedule:
            place = {each: index for index, each in enumerate(passes)}
            assert (set(passes), len(passes)) == (everything, len(everything)), case
            for each in passes:
                if each.direction is Direction.BACKWARD:
                    assert place[each._replace(direction=Direction.FORWARD)] < place[each], case


def test_gradients_add_up_in_the_same_order_in_every_schedule() -> None:
    for case in FLAT:
        for passes in case.schedule:
            backward = [each.micro_batch for each in passes if each.direction is Direction.BACKWARD]
            assert backward == sorted(backward)


def test_micro_batches_in_flight_stay_within_the_limit_of_the_schedule() -> None:
    for case in FLAT:
        for stage, passes in enumerate(case.schedule):
            limit = (
                case.micro_batches
                if case.kind == "gpipe"
                else min(case.micro_batches, case.stages - stage)
            )
            assert max_in_flight(passes) == limit, (case, stage)
    for passes, warm_up, total in warm_ups():
        assert max_in_flight(passes) == min(total, warm_up + 1)


def test_interleaved_warm_up_equals_megatron() -> None:
    for passes, warm_up, total in warm_ups():
        letters = "".join(LETTERS[each.direction] for each in passes)
        assert letters == "F" * warm_up + "FB" * (total - warm_up) + "B" * warm_up


def test_every_send_has_its_receive_at_the_neighbour_in_the_ring() -> None:
    for case in CASES:
        sent, received = messages(case.schedule)
        assert (
            len(sent) == len(received) == 2 * case.micro_batches * (case.stages * case.chunks - 1)
        ), case
        assert len({message.number for message in sent}) == len(sent), case
        assert set(sent) == set(received), case
        for message in sent:
            step = 1 if message.direction is Direction.FORWARD else -1
            assert (
                message.destination
                == (message.source + step) % case.stages
                == message.chunk % case.stages
            ), case


def test_channels_keep_the_order_and_have_one_direction() -> None:
    for case in CASES:
        sent, received = map(by_route, messages(case.schedule))
        assert sent == received, case
        assert {channel for _, _, channel in sent} <= set(range(CHANNELS))
        assert not sent.keys() & {
            (destination, source, channel) for source, destination, channel in sent
        }, case


def test_one_f_one_b_equals_a_schedule_by_hand() -> None:
    first, last = one_f_one_b(2, 3)
    assert written(first) == "F0.0 F1.0 B0.0 F2.0 B1.0 B2.0"
    assert written(last) == "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0"


def test_gpipe_equals_a_schedule_by_hand() -> None:
    assert list(map(written, gpipe(2, 2))) == ["F0.0 F1.0 B0.0 B1.0"] * 2


def test_interleaved_equals_the_figure_of_the_paper() -> None:
    # Narayanan et al. 2021, figure 4 (bottom): 4 devices, 8 micro batches, 2 chunks.
    first, *_, last = interleaved(4, 8, 2)
    assert written(first) == (
        "F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 F4.0 F5.0 F6.0 "
        "B0.1 F7.0 B1.1 F4.1 B2.1 F5.1 B3.1 F6.1 B0.0 F7.1 "
        "B1.0 B2.0 B3.0 B4.1 B5.1 B6.1 B7.1 B4.0 B5.0 B6.0 B7.0"
    )
    assert written(last) == (
        "F0.0 F1.0 F2.0 F3.0 F0.1 "
        "B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 F4.0 B0.0 F5.0 B1.0 F6.0 B2.0 F7.0 B3.0 F4.1 B4.1 F5.1 "
        "B5.1 F6.1 B6.1 F7.1 B7.1 B4.0 B5.0 B6.0 B7.0"
    )


def test_delayed_weight_gradients_equal_a_schedule_by_hand() -> None:
    first, last = build_schedule("1f1b", 2, 3, delayed=True)
    assert written(first) == "F0.0 F1.0 B0.0 F2.0 B1.0 B2.0"  # it has nothing to send
    assert written(last) == "F0.0 B0.0 F1.0 B1.0 W0.0 F2.0 B2.0 W1.0 W2.0"


def test_delayed_weight_gradients_only_add_passes_and_keep_their_order() -> None:
    for case in CASES:
        for stage, passes in enumerate(case.delayed):
            others = tuple(each for each in passes if each.direction is not Direction.WEIGHTS)
            assert others == case.schedule[stage], case
            backward, weights = (
                [each[1:] for each in passes if each.direction is direction]
                for direction in (Direction.BACKWARD, Direction.WEIGHTS)
            )
            # The model's first chunk sends nothing backward.
            assert weights == [each for each in backward if (stage, each[1]) != (0, 0)], case
            place = {each: index for index, each in enumerate(passes)}
            waiting = 0
            for each in passes:
                if each.direction is Direction.WEIGHTS:
                    assert place[each._replace(direction=Direction.BACKWARD)] < place[each]
                    waiting -= 1
                elif each.direction is Direction.BACKWARD and each[1:] in weights:
                    waiting += 1
                # One is between its own backward pass and the next place for weight gradients.
                assert 0 <= waiting <= stage + 1, case
            assert waiting == 0
            assert max_in_flight(passes) == max_in_flight(case.schedule[stage])
        assert messages(case.delayed) == messages(case.schedule)


def test_messages_of_two_stages_equal_those_by_hand() -> None:
    pipeline = Pipeline(stages=2, chunks=2)
    forward, backward = Pass(Direction.FORWARD, 3, 1), Pass(Direction.BACKWARD, 3, 1)
    arriving = pipeline.receive(0, forward)
    assert arriving is not None
    # chunk 2 of the model, from stage 1 at the wrap
    assert arriving[:5] == (Direction.FORWARD, 3, 2, 1, 0)
    leaving = pipeline.send(0, backward)
    assert leaving is not None
    assert leaving[:5] == (Direction.BACKWARD, 3, 1, 0, 1)
    assert (arriving.channel, leaving.channel) == (1, 2)
    assert pipeline.receive(0, Pass(Direction.FORWARD, 3, 0)) is None
    assert pipeline.send(1, forward) is None
    assert pipeline.receive(1, backward) is None
    assert pipeline.send(0, Pass(Direction.BACKWARD, 3, 0)) is None


@pytest.mark.parametrize(
    ("stages", "micro_batches", "chunks"), [(1, 3, 1), (4, 3, 1), (4, 6, 2), (2, 5, 3), (3, 1, 4)]
)
def test_forward_only_takes_any_number_of_micro_batches(
    stages: int, micro_batches: int, chunks: int
) -> None:
    schedule = forward_only(stages, micro_batches, chunks)
    everything = {
        Pass(Direction.FORWARD, each, chunk)
        for each in range(micro_batches)
        for chunk in range(chunks)
    }
    assert len(schedule) == stages
    for passes in schedule:
        assert (set(passes), len(passes)) == (everything, len(everything))
    sent, received = map(by_route, messages(schedule))
    assert sent == received
    assert not sent.keys() & {
        (destination, source, channel) for source, destination, channel in sent
    }


def test_build_schedule_picks_by_kind_and_chunks() -> None:
    assert build_schedule("gpipe", 3, 4) == gpipe(3, 4)
    assert build_schedule("1f1b", 3, 4) == one_f_one_b(3, 4)
    assert build_schedule("1f1b", 3, 6, 2) == interleaved(3, 6, 2)
    assert Pipeline.of(interleaved(3, 6, 2)) == Pipeline(3, 2)


def test_micro_batches_that_cannot_be_interleaved_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        ParallelLayoutError, match=r"^6 micro batches .*pipeline_model_parallel_size 4.* 4 or 8, or"
    ):
        build_schedule("1f1b", 4, 6, 2)
    with pytest.raises(ParallelLayoutError, match=r"^3 micro batches .*so that they are 4, or set"):
        build_schedule("1f1b", 4, 3, 2)
    for stages in range(2, 17):
        for micro_batches in range(1, 65):
            if micro_batches % stages:
                with pytest.raises(ParallelLayoutError):
                    interleaved(stages, micro_batches, 2)


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(
        ParallelLayoutError, match=r"gpipe.*virtual_pipeline_model_parallel_size is 2"
    ):
        build_schedule("gpipe", 4, 8, 2)
    with pytest.raises(
        ParallelLayoutError,
        match=r"virtual_pipeline_model_parallel_size is 2 .* is 1: with one stage",
    ):
        build_schedule("1f1b", 1, 8, 2)
    for counts in ((0, 1, 1), (1, 0, 1), (1, 1, 0), (2, 0, 2)):
        with pytest.raises(ParallelLayoutError, match="every count must be at least 1"):
            build_schedule("1f1b", *counts)


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


def test_delayed_weight_gradients_leave_a_third_of_the_bubble() -> None:
    # Qi et al. 2023, table 1: ZB-H1 with equal forward, input-gradient and weight-gradient passes.
    for case in CASES:
        whole = (case.stages - 1) / (case.micro_batches * case.chunks)
        timeline = simulate(case.delayed)
        if case.kind == "1f1b" and case.micro_batches >= case.stages:
            assert timeline.bubble_fraction == pytest.approx(whole / 3), case
        elif case.kind == "1f1b":
            assert timeline.bubble_fraction <= whole * 2 / 3 + 1e-9, case
        else:
            assert timeline.bubble_fraction == pytest.approx(whole * 2 / 3), case
        assert timeline.equal_bubble == timeline.bubble_fraction


@pytest.mark.parametrize(("forward", "inputs", "weights"), [(2, 3, 2), (1, 1, 0.5), (3, 2, 1)])
def test_the_bubble_with_delayed_weight_gradients_is_that_of_the_paper(
    forward: float, inputs: float, weights: float
) -> None:
    for stages, micro_batches in ((2, 4), (4, 8), (4, 9), (8, 32)):
        timeline = simulate(
            build_schedule("1f1b", stages, micro_batches, delayed=True),
            [forward] * stages,
            [inputs + weights] * stages,
            [weights] * stages,
        )
        idle = (stages - 1) * (forward + inputs - weights)
        whole = micro_batches * (forward + inputs + weights)
        assert timeline.makespan == pytest.approx(whole + idle)


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
