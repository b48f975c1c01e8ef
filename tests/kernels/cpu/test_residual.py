import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.errors import ConfigError
from megacore.kernels.cpu.residual import bias_dropout_add, dropout
from tests.kernels.cpu._pointwise import both_types, check, check_compiled, check_threads, random


def reference(
    branch: Tensor, residual: Tensor, bias: Tensor | None = None, p: float = 0.0
) -> Tensor:
    return residual + F.dropout(branch if bias is None else branch + bias, p)


@both_types
@pytest.mark.parametrize("width", [1, 17, 64, 250])
def test_sums_without_dropout_equal_float64(dtype: torch.dtype, width: int) -> None:
    leaves = [
        random(3, 29, width, dtype=dtype),
        random(3, 29, width, dtype=dtype, seed=1),
        random(width, dtype=dtype),
    ]
    check(lambda x, r: bias_dropout_add(x, None, r, 0.0), reference, leaves[:2])
    check(lambda x, r, b: bias_dropout_add(x, b, r, 0.0), reference, leaves)


@both_types
@pytest.mark.parametrize("bias", [True, False])
def test_dropout_draws_the_mask_and_leaves_the_state_of_torch(
    dtype: torch.dtype, bias: bool
) -> None:
    branch, residual = random(40, 33, dtype=dtype), random(40, 33, dtype=dtype, seed=1)
    leaves = [branch, residual, *([random(33, dtype=dtype)] if bias else [])]
    mask = _seeded(lambda: F.dropout(torch.ones_like(branch), 0.3)) > 0
    assert 0.2 < 1.0 - mask.double().mean() < 0.4

    def fused(x: Tensor, r: Tensor, b: Tensor | None = None) -> Tensor:
        return _seeded(lambda: bias_dropout_add(x, b, r, 0.3))

    def expected(x: Tensor, r: Tensor, b: Tensor | None = None) -> Tensor:
        return r + (x if b is None else x + b) * mask / 0.7

    check(fused, expected, leaves)
    _seeded(lambda: bias_dropout_add(branch, None, residual, 0.3))
    after = torch.get_rng_state()
    _seeded(lambda: F.dropout(branch, 0.3))
    assert torch.equal(after, torch.get_rng_state())


@both_types
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_inputs_of_any_strides_are_accepted(dtype: torch.dtype, p: float) -> None:
    bias, other = random(32, dtype=dtype), random(5, 7, 32, dtype=dtype, seed=1)
    mask = _seeded(lambda: F.dropout(torch.ones(5, 7, 32, dtype=dtype), p)) > 0

    def expected(x: Tensor, r: Tensor, b: Tensor) -> Tensor:
        return r + (x + b) * mask / (1.0 - p)

    for shape, view in (
        ((5, 7, 2, 32), lambda x: x[:, :, 1]),
        ((5, 7, 40), lambda x: x[..., 3:35]),
        ((5, 1, 32), lambda x: x.expand(5, 7, 32)),
    ):
        leaves = [random(*shape, dtype=dtype), other, bias]
        check(
            lambda x, r, b: _seeded(lambda: bias_dropout_add(r, b, x, p)),
            lambda x, r, b: expected(r, x, b),
            leaves,
            view,
        )
        if p == 0.0:
            check(lambda x, r, b: bias_dropout_add(x, b, r, p), expected, leaves, view)


@both_types
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_threads_do_not_change_the_result(dtype: torch.dtype, p: float) -> None:
    leaves = [
        random(603, 130, dtype=dtype),
        random(130, dtype=dtype),
        random(603, 130, dtype=dtype, seed=1),
    ]
    grad = random(603, 130, dtype=dtype, seed=3).detach()
    check_threads(lambda x, b, r: _seeded(lambda: bias_dropout_add(x, b, r, p)), leaves, grad)


@both_types
def test_compiled_results_are_identical(dtype: torch.dtype) -> None:
    leaves = [
        random(2, 9, 48, dtype=dtype),
        random(48, dtype=dtype),
        random(2, 9, 48, dtype=dtype, seed=1),
    ]
    grad = random(2, 9, 48, dtype=dtype, seed=3).detach()
    check_compiled(lambda x, b, r: bias_dropout_add(x, b, r, 0.0), leaves, grad)
    compiled = torch.compile(
        lambda x, b, r: bias_dropout_add(x, b, r, 0.3), fullgraph=True, backend="aot_eager"
    )
    torch.autograd.grad(compiled(*leaves), leaves, grad)


def test_shapes_must_agree() -> None:
    x = torch.ones(4, 33)
    with pytest.raises(ConfigError, match=r"\[4, 33\] together with \[1, 33\]"):
        bias_dropout_add(x, torch.ones(33), x[:1], 0.0)
    with pytest.raises(ConfigError, match=r"33 columns of \[4, 33\], not \[1\]"):
        bias_dropout_add(x, torch.ones(1), x, 0.0)


@both_types
def test_column_sums_equal_float64(dtype: torch.dtype) -> None:
    x = random(700, 37, dtype=dtype).detach()
    expected = x.double().sum(0)
    torch.testing.assert_close(
        torch.ops.megacore.column_sum(x).double(), expected, rtol=4e-3, atol=1e-4
    )


def _seeded(function):  # type: ignore[no-untyped-def]
    torch.manual_seed(5)
    return function()


@both_types
def test_dropout_without_a_residual_draws_the_mask_of_torch(dtype: torch.dtype) -> None:
    x = random(40, 33, dtype=dtype)
    mask = _seeded(lambda: F.dropout(torch.ones_like(x), 0.3)) > 0
    check(lambda x: _seeded(lambda: dropout(x, 0.3)), lambda x: x * mask / 0.7, [x])
