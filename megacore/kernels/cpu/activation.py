"""Activations of x + bias, and gated units, in C++.

They compute in fp32. The backward pass also sums the bias's gradient. Torch computes an activation
that has no C++ function in `_KINDS`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.config.model import Activation
from megacore.kernels import activation as plain
from megacore.kernels.cpu import _kernels
from megacore.kernels.cpu.common import (
    address,
    check_shapes,
    is_half,
    operator,
    per_column,
    rows_of,
)

_KINDS: dict[Activation, int] = {
    "gelu_tanh": _kernels.GELU_TANH,
    "gelu": _kernels.GELU,
    "relu": _kernels.RELU,
    "swiglu": _kernels.SILU,
    "geglu": _kernels.GELU,
    "geglu_tanh": _kernels.GELU_TANH,
}


def bias_activation(x: Tensor, bias: Tensor | None, kind: Activation) -> Tensor:
    """Compute f(x + bias): [..., f] and [f] to [..., f].

    f is an activation, or the function of a gated unit's gate.
    """
    if kind == "relu" and bias is None and x.dtype == torch.float32:
        return F.relu(x)  # nothing to fuse: torch is limited by memory bandwidth, too
    if kind not in _KINDS:
        return plain.bias_activation(x, bias, kind)
    return _BiasActivation.apply(x, bias, _KINDS[kind])  # type: ignore[no-any-return, no-untyped-call]


def gated(gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
    """Compute f(gate) * up for swiglu, geglu or geglu_tanh: two [..., f] to one [..., f]."""
    if kind not in _KINDS:
        return plain.gated(gate, up, kind)
    return _Gated.apply(gate, up, _KINDS[kind])  # type: ignore[no-any-return, no-untyped-call]


class _BiasActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.kind = kind
        return torch.ops.megacore.bias_activation(x, bias, kind)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dx, dbias = torch.ops.megacore.bias_activation_backward(grads[0], x, bias, ctx.kind)
        return dx, None if bias is None else dbias, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: int) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return torch.ops.megacore.gated(gate, up, kind)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dgate, dup = torch.ops.megacore.gated_backward(grads[0], *ctx.saved_tensors, ctx.kind)
        return dgate, dup, None


def _gradient_of(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return memory for the bias's gradient; without bias an empty tensor for the operator."""
    return x.new_empty(0) if bias is None else bias.new_empty(bias.shape)


@operator(
    "bias_activation(Tensor x, Tensor? bias, int kind) -> Tensor",
    fake=lambda x, bias, kind: x.new_empty(x.shape),
)
def _bias_activation(x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
    half, rows, y = is_half(x, bias), rows_of(x), x.new_empty(x.shape)
    bias = per_column(bias, x)
    _kernels.activation_forward(
        rows.data_ptr(),
        rows.stride(0),
        address(bias),
        y.data_ptr(),
        rows.shape[0],
        rows.shape[1],
        kind,
        half,
        torch.get_num_threads(),
    )
    return y


@operator(
    "bias_activation_backward(Tensor dy, Tensor x, Tensor? bias, int kind) -> (Tensor, Tensor)",
    fake=lambda dy, x, bias, kind: (x.new_empty(x.shape), _gradient_of(x, bias)),
)
def _bias_activation_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, kind: int
) -> tuple[Tensor, Tensor]:
    half, rows, grads = is_half(x, dy, bias), rows_of(x), rows_of(dy)
    dx, dbias = x.new_empty(x.shape), _gradient_of(x, bias)
    bias = per_column(bias, x)
    _kernels.activation_backward(
        grads.data_ptr(),
        grads.stride(0),
        rows.data_ptr(),
        rows.stride(0),
        address(bias),
        dx.data_ptr(),
        0 if bias is None else dbias.data_ptr(),
        rows.shape[0],
        rows.shape[1],
        kind,
        half,
        torch.get_num_threads(),
    )
    return dx, dbias


@operator(
    "gated(Tensor gate, Tensor up, int kind) -> Tensor",
    fake=lambda gate, up, kind: gate.new_empty(gate.shape),
)
def _gated(gate: Tensor, up: Tensor, kind: int) -> Tensor:
    check_shapes(gate, up)
    half, gates, ups, y = is_half(gate, up), rows_of(gate), rows_of(up), gate.new_empty(gate.shape)
    _kernels.gated_forward(
        gates.data_ptr(),
        gates.stride(0),
        ups.data_ptr(),
        ups.stride(0),
        y.data_ptr(),
        gates.shape[0],
        gates.shape[1],
        kind,
        half,
        torch.get_num_threads(),
    )
    return y


@operator(
    "gated_backward(Tensor dy, Tensor gate, Tensor up, int kind) -> (Tensor, Tensor)",
    fake=lambda dy, gate, up, kind: (gate.new_empty(gate.shape), gate.new_empty(gate.shape)),
)
def _gated_backward(dy: Tensor, gate: Tensor, up: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    half, grads, gates, ups = is_half(gate, up, dy), rows_of(dy), rows_of(gate), rows_of(up)
    dgate, dup = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    _kernels.gated_backward(
        grads.data_ptr(),
        grads.stride(0),
        gates.data_ptr(),
        gates.stride(0),
        ups.data_ptr(),
        ups.stride(0),
        dgate.data_ptr(),
        dup.data_ptr(),
        gates.shape[0],
        gates.shape[1],
        kind,
        half,
        torch.get_num_threads(),
    )
    return dgate, dup
