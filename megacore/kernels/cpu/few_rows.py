"""The linear layer of few rows in C++, which generation needs for each token."""

import torch
from torch import Tensor, nn

from megacore.kernels.cpu import _kernels

MOST_ROWS = 32
"""Most rows for which the kernel, with AVX2, is faster than BLAS."""
_WORK_OF_A_THREAD = 1 << 15
"""Elements of a weight for which another thread pays."""
_RUNS = _kernels.runs_few_rows()


def supports(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return True if `affine` accepts these tensors.

    They must be fp32, of fitting shapes and in the memory of a CPU with AVX2, x with at most 32
    rows, and the weight contiguous.
    """
    return (
        _RUNS
        and type(x) is Tensor  # neither fake nor traced
        and type(weight) in (Tensor, nn.Parameter)
        and x.device.type == "cpu" == weight.device.type
        and x.dtype == weight.dtype == torch.float32
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[1]
        and (
            bias is None
            or (
                bias.device.type == "cpu"
                and bias.dtype == torch.float32
                and bias.shape == weight.shape[:1]
                and bias.is_contiguous()
            )
        )
        and 0 < x.numel() <= MOST_ROWS * x.shape[-1]
        and weight.is_contiguous()
        and not torch.compiler.is_compiling()
    )


def affine(x: Tensor, weight: Tensor, bias: Tensor | None, share: float = 1.0) -> Tensor:
    """Return x Wᵀ + share · b, without gradients.

    A row of the result is bitwise the same for any number of rows, up to MOST_ROWS, and threads.

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
    assert x.shape[-1] == in_features, (x.shape, weight.shape)
    y = x.new_empty(*x.shape[:-1], out_features)
    threads = min(torch.get_num_threads(), max(1, weight.numel() // _WORK_OF_A_THREAD))
    _kernels.few_rows(
        x.data_ptr(),
        x.numel() // in_features,
        in_features,
        weight.data_ptr(),
        out_features,
        0 if bias is None else bias.data_ptr(),
        share,
        y.data_ptr(),
        threads,
    )
    return y
