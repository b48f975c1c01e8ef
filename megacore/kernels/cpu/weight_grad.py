"""Weight gradient of a linear layer in C++.

A product of bf16 factors is added to fp32 without rounding to bf16.
"""

import torch
from torch import Tensor

from megacore.errors import ConfigError
from megacore.kernels.cpu import _kernels
from megacore.kernels.cpu.common import is_half, operator


def accumulate_(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """Compute main_grad += dyᵀ x, summed in fp32, without a temporary of main_grad's size.

    Megatron-LM's fused weight-gradient accumulation does the same. The order of the sum over rows
    is fixed: the result is bitwise the same for any number of threads.

    Args:
        main_grad: [o, i], fp32, with contiguous rows.
        dy: gradient of the layer's output, [rows, o], fp32 or bf16.
        x: the layer's input, [rows, i], of the same type.
    """
    torch.ops.megacore.accumulate_weight_grad_(main_grad, dy, x)


def _fake_accumulate(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    pass


@operator(
    "accumulate_weight_grad_(Tensor(a!) main_grad, Tensor dy, Tensor x) -> ()", _fake_accumulate
)
def _accumulate(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    rows, out_features = dy.shape
    in_features = x.shape[1]
    if main_grad.shape != (out_features, in_features) or x.shape[0] != rows:
        raise ConfigError(
            "A weight gradient [o, i] is the product of dy [rows, o] and x [rows, i], "
            f"not {tuple(main_grad.shape)} of {tuple(dy.shape)} and {tuple(x.shape)}."
        )
    half = is_half(dy, x)
    if main_grad.dtype is not torch.float32:
        raise ConfigError(
            f"The C++ weight gradient is added to a main gradient in fp32, not {main_grad.dtype}."
        )
    if main_grad.stride(1) != 1:
        raise ConfigError(
            "The C++ weight gradient takes a main gradient with contiguous rows, not strides "
            f"{main_grad.stride()}."
        )
    dy, x = (factor if factor.stride(1) == 1 else factor.contiguous() for factor in (dy, x))
    _kernels.accumulate_weight_grad(
        main_grad.data_ptr(),
        main_grad.stride(0),
        dy.data_ptr(),
        out_features,
        dy.stride(0),
        x.data_ptr(),
        in_features,
        x.stride(0),
        rows,
        half,
        torch.get_num_threads(),
    )
