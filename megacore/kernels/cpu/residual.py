"""Dropout, also fused with bias and residual, in C++.

The forward pass is one pass over the memory, as is the sum of the bias's gradient.
"""

from typing import Any

import torch
from torch import Tensor

from megacore.kernels.cpu import _kernels
from megacore.kernels.cpu.common import (
    address,
    check_shapes,
    is_half,
    kept_like,
    operator,
    per_column,
    rows_of,
)
from megacore.kernels.dropout import SequencePart


def bias_dropout_add(
    branch: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float,
    part: SequencePart | None = None,
) -> Tensor:
    """Compute residual + dropout(branch + bias): [..., h] to [..., h], contiguous.

    The dropped elements are those that `torch.nn.functional.dropout` drops from the same state of
    torch's generator.

    Args:
        branch: output of the branch.
        bias: bias [h] of the branch.
        residual: residual of the branch's shape.
        p: probability of dropping an element; 0 outside of training.
        part: part of the sequences that the branch has; None if it has them whole.
    """
    if not p and bias is None and branch.dtype == torch.float32:
        return residual + branch  # nothing to fuse, and no conversion to fp32
    mask = kept_like(branch, p, part) if p else None
    scale = 1.0 / (1.0 - p)
    return _BiasDropoutAdd.apply(branch, bias, residual, mask, scale)  # type: ignore[no-any-return, no-untyped-call]


def dropout(x: Tensor, p: float, part: SequencePart | None = None) -> Tensor:
    """Apply dropout as `torch.nn.functional.dropout` does in training; 0 < p < 1.

    It drops the same elements from the same state of torch's generator.
    """
    mask = kept_like(x, p, part)
    return _BiasDropoutAdd.apply(x, None, None, mask, 1.0 / (1.0 - p))  # type: ignore[no-any-return, no-untyped-call]


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        branch: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        mask: Tensor | None,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        ctx.has_bias, ctx.has_residual = bias is not None, residual is not None
        return torch.ops.megacore.bias_dropout_add(branch, bias, residual, mask, scale)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (mask,) = grads, ctx.saved_tensors
        dbranch, dbias = dy, None
        if mask is not None:
            dbranch, sums = torch.ops.megacore.dropout_backward(dy, mask, ctx.scale, ctx.has_bias)
            dbias = sums if ctx.has_bias else None
        elif ctx.has_bias:
            dbias = torch.ops.megacore.column_sum(dy)
        return dbranch, dbias, dy if ctx.has_residual else None, None, None


@operator(
    "bias_dropout_add(Tensor branch, Tensor? bias, Tensor? residual, Tensor? mask, float scale) -> "
    "Tensor",
    fake=lambda branch, bias, residual, mask, scale: branch.new_empty(branch.shape),
)
def _bias_dropout_add(
    branch: Tensor, bias: Tensor | None, residual: Tensor | None, mask: Tensor | None, scale: float
) -> Tensor:
    check_shapes(branch, residual, mask)
    half, y = is_half(branch, bias, residual, mask), branch.new_empty(branch.shape)
    branches, residuals = rows_of(branch), None if residual is None else rows_of(residual)
    mask_rows = None if mask is None else rows_of(mask)
    bias = per_column(bias, branch)
    _kernels.residual_forward(
        branches.data_ptr(),
        branches.stride(0),
        address(bias),
        address(residuals),
        0 if residuals is None else residuals.stride(0),
        address(mask_rows),
        0 if mask_rows is None else mask_rows.stride(0),
        scale,
        y.data_ptr(),
        branches.shape[0],
        branches.shape[1],
        half,
        torch.get_num_threads(),
    )
    return y


@operator(
    "dropout_backward(Tensor dy, Tensor mask, float scale, bool with_sum) -> (Tensor, Tensor)",
    fake=lambda dy, mask, scale, with_sum: (
        dy.new_empty(dy.shape),
        dy.new_empty(dy.shape[-1] if with_sum else 0),
    ),
)
def _dropout_backward(
    dy: Tensor, mask: Tensor, scale: float, with_sum: bool
) -> tuple[Tensor, Tensor]:
    half, grads, mask_rows = is_half(dy, mask), rows_of(dy), rows_of(mask)
    dbranch, sums = dy.new_empty(dy.shape), dy.new_empty(dy.shape[-1] if with_sum else 0)
    _kernels.residual_backward(
        grads.data_ptr(),
        grads.stride(0),
        mask_rows.data_ptr(),
        mask_rows.stride(0),
        scale,
        dbranch.data_ptr(),
        sums.data_ptr() if with_sum else 0,
        grads.shape[0],
        grads.shape[1],
        half,
        torch.get_num_threads(),
    )
    return dbranch, sums


@operator("column_sum(Tensor x) -> Tensor", fake=lambda x: x.new_empty(x.shape[-1]))
def _column_sum(x: Tensor) -> Tensor:
    half, rows, sums = is_half(x), rows_of(x), x.new_empty(x.shape[-1])
    _kernels.residual_backward(
        rows.data_ptr(),
        rows.stride(0),
        0,
        0,
        1.0,
        0,
        sums.data_ptr(),
        rows.shape[0],
        rows.shape[1],
        half,
        torch.get_num_threads(),
    )
    return sums
