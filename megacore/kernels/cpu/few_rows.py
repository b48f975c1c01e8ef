"""The linear layer of few rows in C++, which generation needs for each token."""

import torch
from torch import Tensor, nn

from megacore.kernels.cpu import _kernels

MOST_ROWS = 32
"""Most rows for which the kernel is faster than BLAS."""
_RUNS = _kernels.runs_few_rows()


def supports(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return True if `affine` accepts these tensors.

    They must be fp32 and in the memory of a CPU with AVX2, x with at most 32 rows, and the weight
    contiguous.
    """
    return (
        _RUNS
        and type(x) is Tensor  # neither fake nor traced
        and type(weight) in (Tensor, nn.Parameter)
        and x.device.type == "cpu" == weight.device.type
        and x.dtype == weight.dtype == torch.float32
        and (bias is None or (bias.dtype == torch.float32 and bias.is_contiguous()))
        and 0 < x.numel() <= MOST_ROWS * x.shape[-1]
        and weight.is_contiguous()
        and not torch.compiler.is_compiling()
    )


def affine(x: Tensor, weight: Tensor, bias: Tensor | None, share: float = 1.0) -> Tensor:
    """Return x Wᵀ + share · b, without gradients.

    A row of the result is bitwise the same for any number of rows and threads.

    Args:
        x: rows [..., i], see `supports`.
        weight: [o, i].
        bias: [o].
        share: factor on the bias.

    Returns:
        [..., o] in new memory.
    """
    x = x.contiguous()
    out_features, in_features = weight.shape
    y = x.new_empty(*x.shape[:-1], out_features)
    _kernels.few_rows(
        x.data_ptr(),
        x.numel() // in_features,
        in_features,
        weight.data_ptr(),
        out_features,
        0 if bias is None else bias.data_ptr(),
        share,
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y
