import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.errors import ConfigError
from megacore.kernels.cpu.norm import layer_norm, rms_norm
from tests.kernels.cpu._pointwise import (
    both_types,
    check,
    check_compiled,
    check_threads,
    random,
    results,
)

EPS = 1e-5

widths = pytest.mark.parametrize("width", [5, 16, 17, 250, 1024])


def layer_norm_of(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return layer_norm(x, weight, bias, EPS)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def rms_norm_of(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, EPS)


def rms_norm_reference(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


@both_types
@widths
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_equals_float64(dtype: torch.dtype, width: int, bias: bool) -> None:
    leaves = [
        random(3, 29, width, dtype=dtype),
        random(width, dtype=dtype),
        random(width, dtype=dtype, seed=1),
    ]
    check(layer_norm_of, layer_norm_reference, leaves if bias else leaves[:2])


@both_types
@widths
def test_rms_norm_equals_float64(dtype: torch.dtype, width: int) -> None:
    check(
        rms_norm_of,
        rms_norm_reference,
        [random(3, 29, width, dtype=dtype), random(width, dtype=dtype)],
    )


@both_types
@pytest.mark.parametrize(
    ("shape", "view"),
    [
        ((5, 7, 3, 32), lambda x: x[:, :, 1]),
        ((5, 7, 40), lambda x: x[..., 3:35]),
        ((32, 5, 7), lambda x: x.permute(1, 2, 0)),
        ((5, 4, 7, 32), lambda x: x.transpose(1, 2)),
        ((7, 32), lambda x: x.expand(4, 7, 32)),
    ],
    ids=[
        "heads of a mixed projection",
        "part of each row",
        "strided columns",
        "transposed",
        "expanded",
    ],
)
def test_inputs_of_any_strides_are_accepted(
    dtype: torch.dtype, shape: tuple[int, ...], view: object
) -> None:
    x, weight, bias = (
        random(*shape, dtype=dtype),
        random(32, dtype=dtype),
        random(32, dtype=dtype, seed=1),
    )
    check(layer_norm_of, layer_norm_reference, [x, weight, bias], view)  # type: ignore[arg-type]
    check(rms_norm_of, rms_norm_reference, [x, weight], view)  # type: ignore[arg-type]


@both_types
def test_rows_of_zeros_and_of_large_numbers_stay_finite(dtype: torch.dtype) -> None:
    x = random(6, 64, dtype=dtype).detach()
    x[0] = 0.0
    x[1] = 3.0
    x[2] *= 1e4
    x[3] += 1e3
    leaves = [x.requires_grad_(), random(64, dtype=dtype), random(64, dtype=dtype, seed=1)]
    for result in results(layer_norm_of, leaves, torch.ones_like(x)):
        assert result.isfinite().all()
    assert torch.equal(layer_norm_of(*leaves)[0], leaves[2])
    assert torch.equal(layer_norm_of(*leaves)[1], leaves[2])
    assert not rms_norm_of(*leaves[:2])[0].any()
    exact = layer_norm_reference(*(leaf.double() for leaf in leaves))
    torch.testing.assert_close(layer_norm_of(*leaves).double(), exact, rtol=4e-3, atol=1e-3)


@both_types
def test_inputs_without_rows_give_zero_gradients(dtype: torch.dtype) -> None:
    leaves = [random(0, 20, dtype=dtype), random(20, dtype=dtype), random(20, dtype=dtype)]
    output, dx, dweight, dbias = results(layer_norm_of, leaves, torch.ones(0, 20, dtype=dtype))
    assert output.shape == dx.shape == (0, 20)
    assert not dweight.any()
    assert not dbias.any()


@both_types
def test_threads_do_not_change_the_result(dtype: torch.dtype) -> None:
    x, grad = random(603, 130, dtype=dtype), random(603, 130, dtype=dtype, seed=3).detach()
    weight, bias = random(130, dtype=dtype), random(130, dtype=dtype, seed=1)
    check_threads(layer_norm_of, [x, weight, bias], grad)
    check_threads(rms_norm_of, [x, weight], grad)


@both_types
def test_compiled_results_are_identical(dtype: torch.dtype) -> None:
    x, grad = random(2, 9, 48, dtype=dtype), random(2, 9, 48, dtype=dtype, seed=3).detach()
    weight, bias = random(48, dtype=dtype), random(48, dtype=dtype, seed=1)
    check_compiled(layer_norm_of, [x, weight, bias], grad)
    check_compiled(layer_norm_of, [x, weight], grad)
    check_compiled(rms_norm_of, [x, weight], grad)


def test_weights_must_have_the_width_of_rows() -> None:
    with pytest.raises(ConfigError, match=r"8 columns of \[2, 8\], not \[7\]"):
        rms_norm(torch.ones(2, 8), torch.ones(7), EPS)
    with pytest.raises(ConfigError, match=r"8 columns of \[2, 8\], not \[1\]"):
        layer_norm(torch.ones(2, 8), torch.ones(8), torch.ones(1), EPS)


def test_types_must_agree() -> None:
    with pytest.raises(ConfigError, match=r"float32 together with torch\.bfloat16"):
        rms_norm(torch.ones(2, 8), torch.ones(8, dtype=torch.bfloat16), EPS)
    with pytest.raises(ConfigError, match=r"not in torch\.float64"):
        rms_norm(torch.ones(2, 8).double(), torch.ones(8).double(), EPS)
