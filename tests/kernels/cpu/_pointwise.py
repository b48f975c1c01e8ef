"""Checks shared by the tests of kernels that work on rows."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megacore.kernels.cpu.common import runs_bf16, runs_fp32

FP32 = pytest.param(
    torch.float32,
    marks=pytest.mark.skipif(not runs_fp32(), reason="this CPU has no AVX-512"),
    id="fp32",
)
BF16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(not runs_bf16(), reason="this CPU has no AVX512-BF16"),
    id="bf16",
)
both_types = pytest.mark.parametrize("dtype", [FP32, BF16])

Function = Callable[..., Tensor]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return normally distributed values as a leaf that requires a gradient."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return values.to(dtype).requires_grad_()


def results(function: Function, leaves: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the output and the gradient of each leaf for a gradient of the output."""
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def check(
    function: Function,
    reference: Function,
    leaves: Sequence[Tensor],
    view: Function | None = None,
    *,
    rounding_tolerance: float = 0.0,
) -> None:
    """Compare output and gradients with float64.

    Results in bf16 are rounded once, and intermediate values are not rounded.

    Args:
        function: kernel of all leaves.
        reference: the same function in plain torch.
        leaves: arguments, all of which require gradients.
        view: function of the first leaf; its result replaces the leaf.
        rounding_tolerance: additional tolerance, relative to the largest element, of bf16 gradients
            that are computed from rounded outputs.
    """
    if view is not None:
        leaves = [view(leaves[0]).detach().requires_grad_(), *leaves[1:]]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    output = reference(*exact)
    grad = random(*output.shape, dtype=leaves[0].dtype, seed=7).detach()
    expected = [output.detach(), *torch.autograd.grad(output, exact, grad.double())]
    actual = results(function, leaves, grad)
    half = leaves[0].dtype == torch.bfloat16
    for result, exact_result in zip(actual, expected, strict=True):
        assert result.dtype == leaves[0].dtype
        largest = max(1.0, float(exact_result.abs().max()))
        torch.testing.assert_close(
            result.double(),
            exact_result,
            rtol=4e-3 if half else 2e-6,
            atol=largest * (2e-4 + rounding_tolerance if half else 2e-6),
        )


def check_threads(function: Function, leaves: Sequence[Tensor], grad: Tensor) -> None:
    """Check that one thread and two threads give the same bits."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = results(function, leaves, grad)
        torch.set_num_threads(2)
        two = results(function, leaves, grad)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(first, second) for first, second in zip(one, two, strict=True))


def check_compiled(function: Function, leaves: Sequence[Tensor], grad: Tensor) -> None:
    """Check that a graph without breaks gives the same bits."""
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    actual, expected = results(compiled, leaves, grad), results(function, leaves, grad)
    assert all(torch.equal(first, second) for first, second in zip(actual, expected, strict=True))
