"""Losses and in-place gradients by every implementation that runs here, compared with float64."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from megacore.kernels import cross_entropy
from megacore.kernels.cross_entropy import (
    IMPLEMENTATIONS,
    CrossEntropy,
    compiled,
    softcapped,
    whole_gradient_,
    whole_loss_,
    whole_statistics,
)
from megacore.kernels.implementation import Implementation, Setting, everywhere

ROWS, WIDTH = 7, 67
TERMS = [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.1, 0.01)]
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def running() -> Iterator[tuple[Implementation[CrossEntropy], torch.dtype]]:
    for dtype in DTYPES:
        for each in IMPLEMENTATIONS:
            if each.usable(Setting(torch.device("cpu"), dtype)):
                yield each, dtype
    # A GPU uses these functions through torch.compile: here uncompiled, and compiled for the CPU.
    pieces = CrossEntropy(whole_statistics, whole_gradient_, whole_loss_)
    yield Implementation("plain", "torch in one piece", lambda: pieces, everywhere), torch.float32
    yield Implementation("plain", "torch in one piece", lambda: pieces, everywhere), torch.bfloat16
    yield (
        Implementation(
            "compiled", "torch.compile without inductor", lambda: compiled("aot_eager"), everywhere
        ),
        torch.bfloat16,
    )


@pytest.fixture(params=running(), ids=lambda pair: f"{pair[0].name} {pair[1]}")
def kernel(request: pytest.FixtureRequest) -> tuple[CrossEntropy, torch.dtype]:
    implementation, dtype = request.param
    return implementation.load(), dtype


@pytest.fixture(autouse=True)
def graphs_of_this_test() -> Iterator[None]:
    """Forget the graphs of other tests, whose number torch limits."""
    yield
    torch._dynamo.reset()


def logits_and_labels(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = (20 * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)).to(dtype)
    return logits, torch.randint(WIDTH, (ROWS,), generator=generator)


def exact(logits: Tensor, labels: Tensor, smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
    leaf = logits.double().requires_grad_()
    loss = F.cross_entropy(leaf, labels, reduction="none", label_smoothing=smoothing)
    loss = loss + z_loss * leaf.logsumexp(-1).square()
    loss.sum().backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize(("smoothing", "z_loss"), TERMS)
def test_fused_losses_and_gradients_equal_float64(
    kernel: tuple[CrossEntropy, torch.dtype], smoothing: float, z_loss: float
) -> None:
    logits, labels = logits_and_labels(kernel[1])
    expected, gradient = exact(logits, labels, smoothing, z_loss)
    losses = kernel[0].loss_(logits, labels, smoothing, z_loss, 1.0)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    tolerance = TOLERANCES[kernel[1]]
    torch.testing.assert_close(logits.double(), gradient, rtol=tolerance, atol=tolerance * 1e-2)


@pytest.mark.parametrize("two_parts", [False, True])
@pytest.mark.parametrize(("smoothing", "z_loss"), TERMS)
def test_capped_losses_and_gradients_equal_float64(
    kernel: tuple[CrossEntropy, torch.dtype],
    smoothing: float,
    z_loss: float,
    two_parts: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A soft cap of 5, by blocks of several rows, with the vocabulary on one rank or on two."""
    monkeypatch.setattr(cross_entropy, "_blocks", lambda rows: (slice(0, 3), slice(3, ROWS)))
    functions, dtype = softcapped(kernel[0], 5.0), kernel[1]
    logits, labels = logits_and_labels(dtype)
    leaf = logits.double().requires_grad_()
    capped = 5 * (leaf / 5).tanh()
    normaliser = capped.logsumexp(1)
    expected = (
        F.cross_entropy(capped, labels, reduction="none", label_smoothing=smoothing)
        + z_loss * normaliser.square()
    )
    expected.sum().backward()
    assert leaf.grad is not None
    uncapped = F.cross_entropy(logits.double(), labels, reduction="none")
    assert float((uncapped - expected).abs().max()) > 1
    if not two_parts:
        losses = functions.loss_(logits, labels, smoothing, z_loss, 1.0)
        torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    else:
        factor = 1 + 2 * z_loss * normaliser.detach().float()
        for first, end in ((0, 30), (30, WIDTH)):
            part, columns = logits[:, first:end].contiguous(), labels - first
            columns = columns.masked_fill((columns < 0) | (columns >= end - first), -1)
            statistics = functions.statistics(part, columns, True).double()
            own = capped[:, first:end].detach()
            torch.testing.assert_close(statistics[0], own.amax(1), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(statistics[3], own.sum(1), rtol=1e-5, atol=1e-4)
            functions.gradient_(
                part,
                columns,
                normaliser.detach().float(),
                factor,
                1 - smoothing,
                smoothing / WIDTH,
            )
            logits[:, first:end] = part
    torch.testing.assert_close(
        logits.double(), leaf.grad, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
    )


@pytest.mark.parametrize(("smoothing", "z_loss"), TERMS)
def test_losses_and_gradients_of_two_parts_equal_float64(
    kernel: tuple[CrossEntropy, torch.dtype], smoothing: float, z_loss: float
) -> None:
    """Two ranks compute statistics of their parts, then gradients from the combined statistics."""
    logits, labels = logits_and_labels(kernel[1])
    expected, gradient = exact(logits, labels, smoothing, z_loss)
    cut = 32
    parts = [logits[:, :cut].contiguous(), logits[:, cut:].contiguous()]
    columns = [
        torch.where(labels < cut, labels, torch.full_like(labels, -1)),
        torch.where(labels >= cut, labels - cut, torch.full_like(labels, -1)),
    ]
    statistics = [
        kernel[0].statistics(part, column, True)
        for part, column in zip(parts, columns, strict=True)
    ]
    maximum = torch.maximum(statistics[0][0], statistics[1][0])
    total = sum(each[2] * (each[0] - maximum).exp() for each in statistics)
    assert isinstance(total, Tensor)
    log_normaliser = total.log() + maximum
    label, logit_sum = statistics[0][1] + statistics[1][1], statistics[0][3] + statistics[1][3]
    loss = (
        log_normaliser
        - (1 - smoothing) * label
        - smoothing * logit_sum / WIDTH
        + z_loss * log_normaliser.square()
    )
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-4)
    factor = 1 + 2 * z_loss * log_normaliser if z_loss else None
    for part, column in zip(parts, columns, strict=True):
        kernel[0].gradient_(part, column, log_normaliser, factor, 1 - smoothing, smoothing / WIDTH)
    tolerance = TOLERANCES[kernel[1]]
    torch.testing.assert_close(
        torch.cat(parts, 1).double(), gradient, rtol=tolerance, atol=tolerance * 1e-2
    )


def test_the_scale_applies_only_to_the_gradient(kernel: tuple[CrossEntropy, torch.dtype]) -> None:
    logits, labels = logits_and_labels(kernel[1])
    scaled = logits.clone()
    losses = kernel[0].loss_(logits, labels, 0.1, 0.01, 1.0)
    assert torch.equal(kernel[0].loss_(scaled, labels, 0.1, 0.01, 1024.0), losses)
    torch.testing.assert_close(scaled, 1024 * logits, rtol=1e-6, atol=1e-3)


def test_a_nan_logit_makes_only_its_loss_nan(kernel: tuple[CrossEntropy, torch.dtype]) -> None:
    logits, labels = logits_and_labels(kernel[1])
    logits[2, 5] = torch.nan
    losses = kernel[0].loss_(logits, labels, 0.0, 0.0, 1.0)
    assert losses.isnan().tolist() == [row == 2 for row in range(ROWS)]


@pytest.mark.parametrize("rows_per_block", [1, 3, 100])
def test_blocks_of_any_size_equal_float64(
    rows_per_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cross_entropy, "_CACHED_ELEMENTS", rows_per_block * WIDTH // torch.get_num_threads()
    )
    logits, labels = logits_and_labels(torch.float32)
    expected, gradient = exact(logits, labels, 0.1, 0.01)
    losses = cross_entropy.loss_(logits, labels, 0.1, 0.01, 1.0)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(logits.double(), gradient, rtol=1e-5, atol=1e-7)


def test_a_failing_compiler_is_replaced_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def fails(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> None:
        raise RuntimeError("no such GPU\nmore of it")

    kernel = compiled(fails)
    logits, labels = logits_and_labels(torch.float32)
    expected = logits.clone()
    losses = cross_entropy.REFERENCE.loss_(expected, labels, 0.1, 0.01, 1.0)
    with caplog.at_level(logging.WARNING, logger="megacore"):
        assert torch.equal(kernel.loss_(logits, labels, 0.1, 0.01, 1.0), losses)
        kernel.statistics(logits.clone(), labels, True)
    assert torch.equal(logits, expected)
    assert [record.getMessage() for record in caplog.records] == [
        "the cross entropy runs without torch.compile, which failed: RuntimeError: no such GPU"
    ]


def test_another_number_of_rows_does_not_change_the_graph(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A run that has evaluated computes with the same graph as one that has just resumed."""
    shapes = []

    def record(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        shapes.append([each.shape for each in inputs if isinstance(each, Tensor)])
        return graph.forward

    kernel = compiled(record)
    logits, labels = logits_and_labels(torch.float32)
    for rows in (ROWS, ROWS - 2, ROWS - 3, ROWS):
        kernel.statistics(logits[:rows], labels[:rows], False)
    assert shapes == [
        [torch.Size((rows, WIDTH)), torch.Size((rows,))] for rows in (ROWS, ROWS - 2, ROWS - 3)
    ]
    assert all(type(size) is int for graph in shapes for shape in graph for size in shape)
    assert not [record for record in caplog.records if record.name.startswith("megacore")]


def test_a_working_compiler_is_used(caplog: pytest.LogCaptureFixture) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def works(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled(works).loss_(*logits_and_labels(torch.float32), 0.0, 0.0, 1.0)
    assert len(graphs) == 1
    assert not [record for record in caplog.records if record.name.startswith("megacore")]


@pytest.mark.parametrize("while_compiling", [False, True])
def test_lack_of_memory_is_no_failure_of_the_compiler(
    caplog: pytest.LogCaptureFixture, while_compiling: bool
) -> None:
    def fails(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def run(*arguments: Tensor) -> None:
            raise torch.OutOfMemoryError("out of memory")

        return run() if while_compiling else run

    with pytest.raises((torch.OutOfMemoryError, BackendCompilerFailed), match="out of memory"):
        compiled(fails).loss_(*logits_and_labels(torch.float32), 0.0, 0.0, 1.0)
    assert not [record for record in caplog.records if record.name.startswith("megacore")]
