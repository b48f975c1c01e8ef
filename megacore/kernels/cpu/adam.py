"""AdamW over fp32 main weights in C++.

The update also rounds into the model's weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megacore.errors import ConfigError
from megacore.kernels.adamw import AdamTensors, Hyperparameters
from megacore.kernels.cpu import _kernels
from megacore.kernels.cpu.common import operator


def adamw_(tensors: AdamTensors, values: Hyperparameters, divisor: Tensor) -> None:
    """Update all tensors in one pass over the memory, see `megacore.kernels.adamw.AdamW`.

    Gradients are only read. Targets are bf16 and get the new weights rounded to nearest, ties to
    even.
    """
    if not tensors.weights:
        return
    torch.ops.megacore.adamw_(
        *tensors[:4],
        tensors.targets or (),
        values.step,
        values.lr,
        values.beta1,
        values.beta2,
        values.weight_decay,
        values.eps,
        float(divisor),
    )


def _addresses(tensors: Sequence[Tensor], sizes: Sequence[int], dtype: torch.dtype) -> list[int]:
    if len(tensors) != len(sizes):
        raise ConfigError(
            f"AdamW takes lists of one length, not of {len(tensors)} and {len(sizes)} tensors."
        )
    for tensor, size in zip(tensors, sizes, strict=True):
        if tensor.dtype is not dtype or tensor.numel() != size or not tensor.is_contiguous():
            raise ConfigError(
                f"The C++ kernel takes a contiguous tensor of {size} elements of {dtype} here, "
                f"not {tuple(tensor.shape)} of {tensor.dtype} with strides {tensor.stride()}."
            )
    return [tensor.data_ptr() for tensor in tensors]


@operator(
    "adamw_(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] exp_avgs, Tensor(c!)[] "
    "exp_avg_sqs, Tensor(d!)[] targets, int step, float lr, float beta1, float beta2, float "
    "weight_decay, float eps, float divisor) -> ()",
    lambda *arguments: None,
)
def _adamw_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    targets: Sequence[Tensor],
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    divisor: float,
) -> None:
    sizes = [weight.numel() for weight in weights]
    _kernels.adamw(
        _addresses(weights, sizes, torch.float32),
        _addresses(gradients, sizes, torch.float32),
        _addresses(exp_avgs, sizes, torch.float32),
        _addresses(exp_avg_sqs, sizes, torch.float32),
        _addresses(targets, sizes, torch.bfloat16) if targets else [],
        sizes,
        step,
        lr,
        beta1,
        beta2,
        weight_decay,
        eps,
        divisor,
        torch.get_num_threads(),
    )
