"""The executor with stages that compute by hand."""

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megacore.parallel.mesh import ParallelGroup, ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.pipeline_parallel.executor import AHEAD, Executor, Mailbox, _tag
from megacore.pipeline_parallel.schedules import (
    Direction,
    Pipeline,
    Schedule,
    build_schedule,
    delay_weight_gradients,
    forward_only,
    passes_of_stage,
)
from tests._dist import run_distributed, still_alive

SHAPE = torch.Size((2, 3))
CASES: dict[str, Any] = {
    "1f1b": ("1f1b", 5, 1),
    "gpipe": ("gpipe", 5, 1),
    "interleaved": ("1f1b", 8, 2),
    "interleaved, 3 chunks": ("1f1b", 4, 3),
    "delayed": ("1f1b", 5, 1, True),
    "interleaved, delayed": ("1f1b", 8, 2, True),
}
"""Kind of schedule, micro batches, chunks, and True for delayed weight gradients."""


def schedule_of(
    kind: Literal["gpipe", "1f1b"], micro_batches: int, chunks: int, delayed: bool = False
) -> Schedule:
    return build_schedule(kind, 2, micro_batches, chunks, delayed=delayed)


class Multiply:
    """Stage work: chunk c multiplies by its weight c + 2, and the last one sums to a loss.

    Micro batch m is a tensor of m + 1.
    """

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        self.numbers = [pipeline.model_chunk(stage, chunk) for chunk in range(pipeline.chunks)]
        self.last = pipeline.model_chunks - 1
        self.weights = [
            torch.tensor(number + 2.0, dtype=torch.float64, requires_grad=True)
            for number in self.numbers
        ]
        self.losses: dict[int, float] = {}
        self.order: list[tuple[str, int, int]] = []

    def forward(self, micro_batch: int, chunk: int, hidden: Tensor | None) -> Tensor:
        self.order.append(("forward", micro_batch, chunk))
        assert (hidden is None) == (self.numbers[chunk] == 0)
        source = (
            torch.full(SHAPE, micro_batch + 1.0, dtype=torch.float64) if hidden is None else hidden
        )
        output = source * self.weights[chunk]
        if self.numbers[chunk] < self.last:
            return output
        self.losses[micro_batch] = float(output.detach().sum())
        return output.sum()

    def backward(
        self, micro_batch: int, chunk: int, output: GradientEdge, grad: Tensor | None
    ) -> None:
        self.order.append(("backward", micro_batch, chunk))
        assert (grad is None) == (self.numbers[chunk] == self.last)
        torch.autograd.backward(output, grad)

    def weight_gradients(self, micro_batch: int, chunk: int) -> None:
        self.order.append(("weight gradients", micro_batch, chunk))


def run_case(mesh: ProcessMesh, schedule: Schedule, *, training: bool) -> dict[str, Any]:
    pipeline, stage = Pipeline.of(schedule), mesh.pipeline_parallel.rank
    work = Multiply(pipeline, stage)
    executor = Executor(mesh, pipeline, torch.float64, torch.device("cpu"))
    with torch.set_grad_enabled(training):
        # As in training: first without receives ahead, then with them.
        executor.run(passes_of_stage(schedule, stage), work, lambda _: SHAPE, ahead=0)
        work = Multiply(pipeline, stage)
        executor.run(passes_of_stage(schedule, stage), work, lambda _: SHAPE)
    gradients = {
        number: None if weight.grad is None else float(weight.grad)
        for number, weight in zip(work.numbers, work.weights, strict=True)
    }
    return {"losses": work.losses, "gradients": gradients, "order": work.order}


def run() -> dict[str, Any]:
    mesh = ProcessMesh.build(RankLayout(pipeline=2))
    assert mesh.messages is not None
    return {"memory": run_cases(mesh), "messages": run_cases(replace(mesh, messages=None))}


def run_cases(mesh: ProcessMesh) -> dict[str, Any]:
    results = {}
    for name, case in CASES.items():
        still_alive()
        results[name] = run_case(mesh, schedule_of(*case), training=True)
    # Far more than may be in flight at a time, and no multiple of the stages.
    results["forward only"] = run_case(mesh, forward_only(2, 25, 2), training=False)
    return results


@pytest.fixture(scope="module")
def transports() -> list[dict[str, Any]]:
    return run_distributed(2, run)


@pytest.fixture(params=["memory", "messages"])
def ranks(transports: list[dict[str, Any]], request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return [results[request.param] for results in transports]


def expected(micro_batches: int, chunks: int) -> tuple[dict[int, float], dict[int, float]]:
    """Return losses by micro batch and gradients by chunk, from the closed form 6 (m + 1) · Π w."""
    weights = [number + 2.0 for number in range(chunks)]
    product = float(torch.tensor(weights, dtype=torch.float64).prod())
    losses = {m: 6 * (m + 1) * product for m in range(micro_batches)}
    return losses, {number: sum(losses.values()) / weight for number, weight in enumerate(weights)}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_the_closed_form(name: str, ranks: list[dict[str, Any]]) -> None:
    _, micro_batches, chunks, *_ = CASES[name]
    losses, gradients = expected(micro_batches, 2 * chunks)
    assert ranks[1][name]["losses"] == losses
    stage_gradients = ranks[0][name]["gradients"] | ranks[1][name]["gradients"]
    assert stage_gradients == pytest.approx(gradients, rel=1e-12)
    schedule = schedule_of(*CASES[name])
    for stage in (0, 1):
        assert ranks[stage][name]["order"] == [
            (p.direction.value, p.micro_batch, p.chunk) for p in schedule[stage]
        ]


def test_forward_only_leaves_no_gradient(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["forward only"]["losses"] == expected(25, 4)[0]
    assert set(
        (ranks[0]["forward only"]["gradients"] | ranks[1]["forward only"]["gradients"]).values()
    ) == {None}


def test_one_stage_needs_no_process_group() -> None:
    result = run_case(ProcessMesh.serial(), build_schedule("1f1b", 1, 3, 1), training=True)
    losses, gradients = expected(3, 1)
    assert (result["losses"], result["gradients"]) == (losses, gradients)


SCHEDULES: dict[str, Schedule] = {
    **{
        f"{kind}, {stages} stages, {micro_batches} micro batches": build_schedule(
            kind, stages, micro_batches
        )
        for kind in ("1f1b", "gpipe")
        for stages in (2, 3, 4)
        for micro_batches in (1, 2, 3, 4, 6)
    },
    **{
        f"{stages} stages of {chunks} chunks, {groups} groups": build_schedule(
            "1f1b", stages, groups * stages, chunks
        )
        for stages in (2, 3, 4)
        for chunks in (2, 3)
        for groups in (1, 2)
    },
    **{
        f"forward only, {stages} stages of {chunks} chunks": forward_only(stages, 7, chunks)
        for stages in (2, 3)
        for chunks in (1, 2)
    },
}


class Recorded(Multiply):
    """Records in `calls` when each pass starts, with the number of the earlier ones of its kind."""

    def __init__(self, pipeline: Pipeline, stage: int, calls: list[tuple[str, int]]) -> None:
        super().__init__(pipeline, stage)
        self.calls = calls
        self.kinds: Counter[tuple[str, int]] = Counter()

    def start(self, direction: str, chunk: int) -> None:
        self.calls.append(("start", self.kinds[direction, chunk]))
        self.kinds[direction, chunk] += 1

    def forward(self, micro_batch: int, chunk: int, hidden: Tensor | None) -> Tensor:
        self.start("forward", chunk)
        return super().forward(micro_batch, chunk, hidden)

    def backward(
        self, micro_batch: int, chunk: int, output: GradientEdge, grad: Tensor | None
    ) -> None:
        self.start("backward", chunk)
        super().backward(micro_batch, chunk, output, grad)

    def weight_gradients(self, micro_batch: int, chunk: int) -> None:
        self.start("weight gradients", chunk)


def calls_of(
    schedule: Schedule, stage: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, int]]:
    """Return a stage's starts of passes, and its sends, receives and waits by tag, in order."""
    pipeline = Pipeline.of(schedule)
    calls: list[tuple[str, int]] = []

    def posted(kind: str) -> Any:
        def post(tensor: Tensor, *, tag: int, **_: Any) -> Any:
            calls.append((kind, tag))
            return SimpleNamespace(
                wait=lambda: calls.append((f"wait for {kind}", tag)), is_completed=lambda: False
            )

        return post

    monkeypatch.setattr(dist, "isend", posted("send"))
    monkeypatch.setattr(dist, "irecv", posted("receive"))
    mesh = ProcessMesh(
        pipeline_parallel=ParallelGroup(None, stage, pipeline.stages, "pipeline"),
        channels=(None,) * 4,  # type: ignore[arg-type]
    )
    training = any(each.direction is Direction.BACKWARD for each in schedule[0])
    with torch.set_grad_enabled(training):
        Executor(mesh, pipeline, torch.float64, torch.device("cpu")).run(
            passes_of_stage(schedule, stage),
            Recorded(pipeline, stage, calls),
            lambda _: SHAPE,
            ahead=ahead,
        )
    return calls


def unfinished(calls: list[list[tuple[str, int]]], waits: Callable[[int, int], bool]) -> list[int]:
    """Return the stages that wait forever on GPUs.

    If `waits(stage, number)`, the start of a pass, the `number`-th of its kind, waits until all
    messages posted before it have been transferred, which takes both sides. A stage also waits for
    each message that a pass needs.
    """
    positions = [0] * len(calls)
    posted: list[set[int]] = [set() for _ in calls]
    progress = True
    while progress:
        progress = False
        for stage, own in enumerate(calls):
            others = [tags for other, tags in enumerate(posted) if other != stage]
            while positions[stage] < len(own):
                kind, number = own[positions[stage]]
                sent = set().union(*others)
                blocked = False
                if kind in ("send", "receive"):
                    posted[stage].add(number)
                elif kind == "wait for receive":
                    blocked = number not in sent
                elif kind == "start":
                    blocked = waits(stage, number) and not posted[stage] <= sent
                if blocked:
                    break
                positions[stage] += 1
                progress = True
    return [stage for stage, own in enumerate(calls) if positions[stage] < len(own)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_that_load_code_do_not_wait_forever(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A posted receive is a kernel on a GPU, and a call that loads code waits for all kernels."""
    stages = range(len(SCHEDULES[name]))
    calls = [calls_of(SCHEDULES[name], stage, 0, monkeypatch) for stage in stages]
    assert unfinished(calls, lambda _, number: number == 0) == []


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_receive_is_posted_before_the_passes_that_it_depends_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedules = [SCHEDULES[name]]
    if not name.startswith("forward"):
        schedules.append(delay_weight_gradients(SCHEDULES[name]))
    for schedule in schedules:
        stages = range(len(schedule))
        calls = [calls_of(schedule, stage, AHEAD, monkeypatch) for stage in stages]
        for stage in stages:
            assert unfinished(calls, lambda each, _, stage=stage: each == stage) == []  # type: ignore[misc]


def test_receives_are_posted_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of 1F1B, messages are transferred during the passes before they are needed."""
    calls = calls_of(build_schedule("1f1b", 3, 8), 1, AHEAD, monkeypatch)
    assert posted_ahead(calls)[2:10] == [AHEAD] * 8
    calls = calls_of(forward_only(2, 8), 1, AHEAD, monkeypatch)
    assert posted_ahead(calls) == [AHEAD] * 6 + [1, 0]


def posted_ahead(calls: list[tuple[str, int]]) -> list[int]:
    """Return the number of receives that are posted for later passes at the start of each one."""
    posted = started = 0
    ahead = []
    for kind, _ in calls:
        posted += kind == "receive"
        started += kind == "start"
        if kind == "start":
            ahead.append(posted - started)
    return ahead


def test_addresses_and_whole_messages_have_different_tags() -> None:
    """gloo matches them by their tags: one that is taken for another has the wrong contents."""
    schedule = build_schedule("1f1b", 2, 4, 2)
    pipeline = Pipeline.of(schedule)
    messages = [pipeline.send(stage, each) for stage in (0, 1) for each in schedule[stage]]
    tags = [_tag(each, whole=whole) for each in messages if each for whole in (False, True)]
    assert len(set(tags)) == len(tags) == 2 * 2 * 4 * 3


def test_messages_in_transit_are_limited_and_all_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without backward passes a stage may run ahead of the next, and its messages take memory."""
    in_transit: list[Tensor] = []
    counts = []

    def send(tensor: Tensor, **_: Any) -> Any:
        in_transit.append(tensor)
        counts.append(len(in_transit))
        return SimpleNamespace(wait=lambda: in_transit.pop(0), is_completed=lambda: False)

    monkeypatch.setattr(dist, "isend", send)
    schedule = forward_only(2, 25)
    pipeline = Pipeline.of(schedule)
    mesh = ProcessMesh(
        pipeline_parallel=ParallelGroup(None, 0, pipeline.stages, "pipeline"),
        channels=(None,) * 4,  # type: ignore[arg-type]
    )
    with torch.no_grad():
        Executor(mesh, pipeline, torch.float64, torch.device("cpu")).run(
            passes_of_stage(schedule, 0), Multiply(pipeline, 0), lambda _: SHAPE
        )
    assert counts == [1, 2, 3] + [4] * 22
    assert not in_transit


def test_sent_messages_are_contiguous_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that waits for gradients has only the messages that are still in transit."""
    messages: list[weakref.ref[Tensor]] = []

    def send(tensor: Tensor, **_: Any) -> Any:
        assert tensor.is_contiguous()
        messages.append(weakref.ref(tensor))
        number = len(messages)
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: number < 4)

    monkeypatch.setattr(dist, "isend", send)
    mesh = ProcessMesh(channels=(None,) * 4)  # type: ignore[arg-type]
    device = torch.device("cpu")
    mailbox = Mailbox(mesh, (), lambda _: SHAPE, torch.float64, device)
    pipeline, stage = Pipeline(2, 1), forward_only(2, 6)[0]
    for each in stage:
        message = pipeline.send(0, each)
        assert message is not None
        mailbox.send(message, torch.ones(SHAPE[::-1], dtype=torch.float64).T)
    assert [message() is None for message in messages] == [True] * 3 + [False] * 3
    mailbox.close()
    assert [message() is None for message in messages] == [True] * 6
