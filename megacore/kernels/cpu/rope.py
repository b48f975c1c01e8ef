"""Rotary position embedding in C++.

Forward and backward take one pass each, and keep the memory order of the heads.
"""

from typing import Any

import torch
from torch import Tensor

from megacore.errors import ConfigError
from megacore.kernels.cpu import _kernels
from megacore.kernels.cpu.common import is_half, operator


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first elements of each head: [b, n, s, d] to [b, n, s, d].

    If x is a transposed [b, s, n, d], so is the result. The tables get no gradient.

    Args:
        x: heads, with any strides.
        rotary: cosines and sines [b or 1, 1, s, rotated]; the second half repeats the first.
    """
    return _Rotate.apply(x, *rotary)  # type: ignore[no-any-return, no-untyped-call]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return torch.ops.megacore.rotate(x, cosines, sines, False)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return torch.ops.megacore.rotate(grads[0], *ctx.saved_tensors, True), None, None


def _alike(x: Tensor, cosines: Tensor, sines: Tensor, back: bool) -> Tensor:
    """Return memory for the result: dense, heads and sequence in the order they have in x."""
    batch, heads, sequence, size = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty(batch, sequence, heads, size).transpose(1, 2)
    return x.new_empty(x.shape)


@operator("rotate(Tensor x, Tensor cosines, Tensor sines, bool back) -> Tensor", fake=_alike)
def _rotate(x: Tensor, cosines: Tensor, sines: Tensor, back: bool) -> Tensor:
    batch, _, sequence, size = x.shape
    rows, one, places, rotated = cosines.shape
    if (
        rows not in (1, batch)
        or (one, places) != (1, sequence)
        or rotated > size
        or sines.shape != cosines.shape
    ):
        raise ConfigError(
            f"Tables of {[*cosines.shape]} and {[*sines.shape]} do not rotate heads of "
            f"{[*x.shape]}."
        )
    half, y = is_half(x, cosines, sines), _alike(x, cosines, sines, back)
    x = x if x.stride(3) == 1 else x.contiguous()
    cosines, sines = cosines.contiguous(), sines.contiguous()
    _kernels.rotate(
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        x.stride(2),
        cosines.data_ptr(),
        sines.data_ptr(),
        cosines.stride(0) if cosines.shape[0] > 1 else 0,
        y.data_ptr(),
        y.stride(0),
        y.stride(1),
        y.stride(2),
        x.shape[0],
        x.shape[1],
        x.shape[2],
        x.shape[3],
        cosines.shape[-1],
        back,
        half,
        torch.get_num_threads(),
    )
    return y
