"""Activations of x + bias, and gated units, in C++: computed in fp32, the biases' gradients in the same pass."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.config.model import Activation
from megacore.kernels.cpu import _activation
from megacore.kernels.cpu.operators import operator
from megacore.kernels.cpu.rows import address, is_half, rows_of

_KINDS: dict[Activation, int] = {"gelu_tanh": _activation.GELU_TANH, "gelu": _activation.GELU, "relu": _activation.RELU}
_GATES: dict[Activation, int] = {
    "swiglu": _activation.SILU,
    "geglu": _activation.GELU,
    "geglu_tanh": _activation.GELU_TANH,
}


def bias_activation(x: Tensor, bias: Tensor | None, kind: Activation) -> Tensor:
    """f(x + bias), f one of gelu_tanh, gelu and relu: [..., f] and [f] -> [..., f]."""
    if kind == "relu" and bias is None and x.dtype == torch.float32:
        return F.relu(x)  # nothing to fuse: as fast as memory already
    return _BiasActivation.apply(x, bias, _KINDS[kind])  # type: ignore[no-any-return, no-untyped-call]


def gated(
    gate: Tensor, up: Tensor, kind: Activation, gate_bias: Tensor | None = None, up_bias: Tensor | None = None
) -> Tensor:
    """f(gate + gate_bias) * (up + up_bias), f that of swiglu, geglu or geglu_tanh: twice [..., f] -> [..., f]."""
    return _Gated.apply(gate, up, gate_bias, up_bias, _GATES[kind])  # type: ignore[no-any-return, no-untyped-call]


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
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None, kind: int
    ) -> Tensor:
        ctx.save_for_backward(gate, up, gate_bias, up_bias)
        ctx.kind = kind
        return torch.ops.megacore.gated(gate, up, gate_bias, up_bias, kind)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, _, gate_bias, up_bias = saved = ctx.saved_tensors
        dgate, dup, dgate_bias, dup_bias = torch.ops.megacore.gated_backward(grads[0], *saved, ctx.kind)
        return dgate, dup, None if gate_bias is None else dgate_bias, None if up_bias is None else dup_bias, None


def _gradient_of(x: Tensor, bias: Tensor | None) -> Tensor:
    """Where a bias's gradient goes; of none an empty tensor, which an operator may return."""
    return x.new_empty(0) if bias is None else bias.new_empty(bias.shape)


@operator(
    "bias_activation(Tensor x, Tensor? bias, int kind) -> Tensor", fake=lambda x, bias, kind: x.new_empty(x.shape)
)
def _bias_activation(x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
    half, rows, y = is_half(x, bias), rows_of(x), x.new_empty(x.shape)
    bias = None if bias is None else bias.contiguous()
    _activation.forward(
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
def _bias_activation_backward(dy: Tensor, x: Tensor, bias: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
    half, rows, grads = is_half(x, dy, bias), rows_of(x), rows_of(dy)
    dx, dbias = x.new_empty(x.shape), _gradient_of(x, bias)
    bias = None if bias is None else bias.contiguous()
    _activation.backward(
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
    "gated(Tensor gate, Tensor up, Tensor? gate_bias, Tensor? up_bias, int kind) -> Tensor",
    fake=lambda gate, up, gate_bias, up_bias, kind: gate.new_empty(gate.shape),
)
def _gated(gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None, kind: int) -> Tensor:
    half, gates, ups, y = is_half(gate, up, gate_bias, up_bias), rows_of(gate), rows_of(up), gate.new_empty(gate.shape)
    gate_bias = None if gate_bias is None else gate_bias.contiguous()
    up_bias = None if up_bias is None else up_bias.contiguous()
    _activation.gated_forward(
        gates.data_ptr(),
        gates.stride(0),
        ups.data_ptr(),
        ups.stride(0),
        address(gate_bias),
        address(up_bias),
        y.data_ptr(),
        gates.shape[0],
        gates.shape[1],
        kind,
        half,
        torch.get_num_threads(),
    )
    return y


@operator(
    "gated_backward(Tensor dy, Tensor gate, Tensor up, Tensor? gate_bias, Tensor? up_bias, int kind) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    fake=lambda dy, gate, up, gate_bias, up_bias, kind: (
        gate.new_empty(gate.shape),
        gate.new_empty(gate.shape),
        _gradient_of(gate, gate_bias),
        _gradient_of(gate, up_bias),
    ),
)
def _gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None, kind: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    half = is_half(gate, up, dy, gate_bias, up_bias)
    grads, gates, ups = rows_of(dy), rows_of(gate), rows_of(up)
    dgate, dup = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    dgate_bias, dup_bias = _gradient_of(gate, gate_bias), _gradient_of(gate, up_bias)
    gate_bias = None if gate_bias is None else gate_bias.contiguous()
    up_bias = None if up_bias is None else up_bias.contiguous()
    _activation.gated_backward(
        grads.data_ptr(),
        grads.stride(0),
        gates.data_ptr(),
        gates.stride(0),
        ups.data_ptr(),
        ups.stride(0),
        address(gate_bias),
        address(up_bias),
        dgate.data_ptr(),
        dup.data_ptr(),
        0 if gate_bias is None else dgate_bias.data_ptr(),
        0 if up_bias is None else dup_bias.data_ptr(),
        gates.shape[0],
        gates.shape[1],
        kind,
        half,
        torch.get_num_threads(),
    )
    return dgate, dup, dgate_bias, dup_bias
