import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from megacore.config.model import GATED, Activation
from megacore.errors import ConfigError
from megacore.kernels import activation as plain
from megacore.kernels.cpu import activation as cpp
from megacore.kernels.cpu.activation import bias_activation, gated
from tests.kernels.cpu._pointwise import both_types, check, check_compiled, check_threads, random

activations = pytest.mark.parametrize("kind", get_args(Activation))
gates = pytest.mark.parametrize("kind", sorted(GATED))
widths = pytest.mark.parametrize("width", [1, 17, 64, 250])


@both_types
@activations
@widths
def test_bias_activation_equals_float64(dtype: torch.dtype, kind: Activation, width: int) -> None:
    x, bias = random(3, 29, width, dtype=dtype), random(width, dtype=dtype)
    check(
        lambda x: bias_activation(x, None, kind),
        lambda x: plain.bias_activation(x, None, kind),
        [x],
    )
    check(
        lambda x, b: bias_activation(x, b, kind),
        lambda x, b: plain.bias_activation(x, b, kind),
        [x, bias],
    )


@both_types
@gates
@widths
def test_gated_activation_equals_float64(dtype: torch.dtype, kind: Activation, width: int) -> None:
    gate, up = random(3, 29, width, dtype=dtype), random(3, 29, width, dtype=dtype, seed=1)
    check(lambda x, y: gated(x, y, kind), lambda x, y: plain.gated(x, y, kind), [gate, up])


def test_torch_computes_an_activation_without_a_cpp_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = random(4, 33, dtype=torch.float32)
    up, bias = random(4, 33, dtype=torch.float32, seed=1), random(33, dtype=torch.float32)
    monkeypatch.delitem(cpp._KINDS, "gelu")
    monkeypatch.delitem(cpp._KINDS, "swiglu")
    assert bias_activation(x, bias, "gelu").equal(plain.bias_activation(x, bias, "gelu"))
    assert bias_activation(x, None, "gelu").equal(plain.bias_activation(x, None, "gelu"))
    assert gated(x, up, "swiglu").equal(plain.gated(x, up, "swiglu"))


@both_types
@pytest.mark.parametrize(
    ("shape", "view"),
    [
        ((5, 7, 2, 32), lambda x: x[:, :, 1]),
        ((5, 7, 40), lambda x: x[..., 3:35]),
        ((32, 5, 7), lambda x: x.permute(1, 2, 0)),
        ((5, 1, 32), lambda x: x.expand(5, 7, 32)),
    ],
    ids=["half of a projection", "part of each row", "strided columns", "expanded"],
)
def test_inputs_of_any_strides_are_accepted(
    dtype: torch.dtype, shape: tuple[int, ...], view: object
) -> None:
    x, up, bias = (
        random(*shape, dtype=dtype),
        random(5, 7, 32, dtype=dtype),
        random(32, dtype=dtype),
    )
    check(
        lambda x, b: bias_activation(x, b, "gelu_tanh"),
        lambda x, b: plain.bias_activation(x, b, "gelu_tanh"),
        [x, bias],
        view,  # type: ignore[arg-type]
    )
    check(
        lambda x, y: gated(x, y, "swiglu"), lambda x, y: plain.gated(x, y, "swiglu"), [x, up], view
    )  # type: ignore[arg-type]
    check(
        lambda x, y: gated(y, x, "swiglu"), lambda x, y: plain.gated(y, x, "swiglu"), [x, up], view
    )  # type: ignore[arg-type]


@both_types
@pytest.mark.parametrize("kind", ["gelu_tanh", "gelu", "relu", "swiglu"])
def test_activations_of_every_magnitude_equal_float64(dtype: torch.dtype, kind: Activation) -> None:
    """Check the range where the function bends, and far values, where the slope is 0 or 1."""
    x = (
        torch.cat([torch.linspace(-20, 20, 4001), torch.tensor([0.0, -0.0])])
        .to(dtype)
        .requires_grad_()
    )
    far = torch.tensor([100.0, 1e4, 1e30, -100.0, -1e4, -1e30]).to(dtype).requires_grad_()

    def apply(x: Tensor) -> Tensor:
        return (
            gated(x, torch.ones_like(x), kind)
            if kind == "swiglu"
            else bias_activation(x, None, kind)
        )

    check(apply, lambda x: plain.activate(x, kind), [x])
    output = apply(far)
    output.sum().backward()
    assert far.grad is not None
    torch.testing.assert_close(output, far.detach().clamp(min=0.0), rtol=2e-7, atol=1e-30)
    torch.testing.assert_close(far.grad, (far.detach() > 0).to(dtype), rtol=2e-7, atol=1e-30)


@both_types
@pytest.mark.parametrize("kind", ["gelu_tanh", "gelu", "relu", "swiglu"])
def test_nan_stays_nan(dtype: torch.dtype, kind: Activation) -> None:
    x = torch.tensor([math.nan, 1.0]).to(dtype)
    output = (
        gated(x, torch.ones_like(x), kind) if kind == "swiglu" else bias_activation(x, None, kind)
    )
    assert output.isnan().tolist() == [True, False]


def test_shapes_must_agree() -> None:
    x, narrow = torch.ones(4, 33), torch.ones(32)
    with pytest.raises(ConfigError, match=r"33 columns of \[4, 33\], not \[32\]"):
        bias_activation(x, narrow, "gelu")
    with pytest.raises(ConfigError, match=r"\[4, 33\] together with \[3, 33\]"):
        gated(x, x[:3], "swiglu")


@both_types
def test_threads_do_not_change_the_result(dtype: torch.dtype) -> None:
    x, up, bias = (
        random(603, 130, dtype=dtype),
        random(603, 130, dtype=dtype, seed=1),
        random(130, dtype=dtype),
    )
    grad = random(603, 130, dtype=dtype, seed=3).detach()
    check_threads(lambda x, b: bias_activation(x, b, "gelu_tanh"), [x, bias], grad)
    check_threads(lambda x, y: gated(x, y, "geglu"), [x, up], grad)


@both_types
def test_compiled_results_are_identical(dtype: torch.dtype) -> None:
    x, up, bias = (
        random(2, 9, 48, dtype=dtype),
        random(2, 9, 48, dtype=dtype, seed=1),
        random(48, dtype=dtype),
    )
    grad = random(2, 9, 48, dtype=dtype, seed=3).detach()
    check_compiled(lambda x, b: bias_activation(x, b, "gelu_tanh"), [x, bias], grad)
    check_compiled(lambda x: bias_activation(x, None, "gelu"), [x], grad)
    check_compiled(lambda x, y: gated(x, y, "swiglu"), [x, up], grad)
