"""The executor with stages that compute by hand."""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.pipeline_parallel.executor import Executor
from megacore.pipeline_parallel.schedules import Pipeline, Schedule, build_schedule, forward_only
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
        executor.run(schedule[stage], work, lambda _: SHAPE)
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
