"""What tests of the kernels of rows have in common."""

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
    """Normally distributed, as a leaf that wants a gradient."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return values.to(dtype).requires_grad_()


def results(function: Function, leaves: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """The output and each leaf's gradient, given the output's."""
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def check(
    function: Function,
    reference: Function,
    leaves: Sequence[Tensor],
    view: Function | None = None,
    *,
    kept_in_half: float = 0.0,
) -> None:
    """Compare output and gradients with float64.

    bf16 is rounded once, and nothing that is computed before shows.

    Args:
        function: of all leaves.
        reference: the same in plain torch.
        leaves: the arguments, which all want gradients.
        view: of the first leaf, which takes its place.
        kept_in_half: what bf16 gradients may differ besides, where they are computed of outputs
            that were rounded.
    """
    if view is not None:
        leaves = [view(leaves[0]).detach().requires_grad_(), *leaves[1:]]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    output = reference(*exact)
    grad = random(*output.shape, dtype=leaves[0].dtype, seed=7).detach()
    expected = [output.detach(), *torch.autograd.grad(output, exact, grad.double())]
    found = results(function, leaves, grad)
    half = leaves[0].dtype == torch.bfloat16
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == leaves[0].dtype
        largest = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(
            one.double(),
            other,
            rtol=4e-3 if half else 2e-6,
            atol=largest * (2e-4 + kept_in_half if half else 2e-6),
        )


def check_threads(function: Function, leaves: Sequence[Tensor], grad: Tensor) -> None:
    """One thread and two find the same bits."""
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
    """In a graph without breaks it finds the same bits."""
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found, expected = results(compiled, leaves, grad), results(function, leaves, grad)
    assert all(torch.equal(first, second) for first, second in zip(found, expected, strict=True))
