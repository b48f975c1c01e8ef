"""LayerNorm and RMSNorm in C++: statistics and sums in fp32, each row is read once from memory."""

from typing import Any

import torch
from torch import Tensor

from megacore.kernels.cpu import _kernels
from megacore.kernels.cpu.common import address, is_half, operator, per_column, rows_of


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Compute (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension."""
    return _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-any-return, no-untyped-call]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x²) + eps) * weight over the last dimension."""
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return, no-untyped-call]


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        y, mean, rstd = torch.ops.megacore.layer_norm(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.has_bias = bias is not None
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = torch.ops.megacore.layer_norm_backward(grads[0], *ctx.saved_tensors)
        return dx, dweight, dbias if ctx.has_bias else None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = torch.ops.megacore.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight = torch.ops.megacore.rms_norm_backward(grads[0], *ctx.saved_tensors)
        return dx, dweight, None


def _statistic(x: Tensor) -> Tensor:
    return x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


@operator(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    fake=lambda x, weight, bias, eps: (x.new_empty(x.shape), _statistic(x), _statistic(x)),
)
def _layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = x.new_empty(x.shape), _statistic(x), _statistic(x)
    _forward(x, weight, bias, y, mean, rstd, eps)
    return y, mean, rstd


@operator(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    fake=lambda x, weight, eps: (x.new_empty(x.shape), _statistic(x)),
)
def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, rstd = x.new_empty(x.shape), _statistic(x)
    _forward(x, weight, None, y, None, rstd, eps)
    return y, rstd


@operator(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd) -> (Tensor, "
    "Tensor, Tensor)",
    fake=lambda dy, x, weight, mean, rstd: (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape),
    ),
)
def _layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape),
        weight.new_empty(weight.shape),
    )
    _backward(dy, x, weight, mean, rstd, dx, dweight, dbias)
    return dx, dweight, dbias


@operator(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)",
    fake=lambda dy, x, weight, rstd: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
)
def _rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    dx, dweight = x.new_empty(x.shape), weight.new_empty(weight.shape)
    _backward(dy, x, weight, None, rstd, dx, dweight, None)
    return dx, dweight


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    eps: float,
) -> None:
    half, rows = is_half(x, weight, bias), rows_of(x)
    gain, shift = per_column(weight, x), per_column(bias, x)
    _kernels.norm_forward(
        rows.data_ptr(),
        rows.stride(0),
        address(gain),
        address(shift),
        y.data_ptr(),
        address(mean),
        rstd.data_ptr(),
        rows.shape[0],
        rows.shape[1],
        eps,
        mean is not None,
        half,
        torch.get_num_threads(),
    )


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor | None,
) -> None:
    half, rows, grads, gain = is_half(x, dy, weight), rows_of(x), rows_of(dy), per_column(weight, x)
    _kernels.norm_backward(
        grads.data_ptr(),
        grads.stride(0),
        rows.data_ptr(),
        rows.stride(0),
        address(gain),
        address(mean),
        rstd.data_ptr(),
        dx.data_ptr(),
        dweight.data_ptr(),
        address(dbias),
        rows.shape[0],
        rows.shape[1],
        mean is not None,
        half,
        torch.get_num_threads(),
    )
