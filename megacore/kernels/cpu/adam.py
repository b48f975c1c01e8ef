"""AdamW over fp32 main weights in C++.

The update also rounds into the model's weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megacore.errors import ConfigError
from megacore.kernels.cpu import _kernels
from megacore.kernels.cpu.common import operator


def adamw_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    targets: Sequence[Tensor] | None,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    divisor: float = 1.0,
) -> None:
    """Update all tensors of a list by AdamW in one pass over the memory.

    See Loshchilov and Hutter 2019. The result of an element only depends on its own numbers, not on
    its position or on how the tensors are divided.

    Args:
        weights: fp32 main weights; all tensors are contiguous, and those at one position of the
            lists have one shape.
        gradients: gradients, fp32, only read.
        exp_avgs: first moments, fp32.
        exp_avg_sqs: second moments, fp32.
        targets: bf16 tensors that receive the new weights, rounded to nearest, ties to even; None
            for no such tensors.
        step: number of this update, from 1; used for the bias correction of the moments.
        lr: learning rate.
        beta1: decay of the first moments.
        beta2: decay of the second moments.
        weight_decay: decoupled weight decay; weights are first multiplied by 1 - lr · weight_decay.
        eps: number added to the root of the second moment.
        divisor: number by which the gradients are divided.
    """
    if not weights:
        return
    torch.ops.megacore.adamw_(
        weights,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        () if targets is None else targets,
        step,
        lr,
        beta1,
        beta2,
        weight_decay,
        eps,
        divisor,
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


def _fake_adamw_(
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
    pass


@operator(
    "adamw_(Tensor(a!)[] weights, Tensor[] gradients, Tensor(b!)[] exp_avgs, Tensor(c!)[] "
    "exp_avg_sqs, Tensor(d!)[] targets, int step, float lr, float beta1, float beta2, float "
    "weight_decay, float eps, float divisor) -> ()",
    _fake_adamw_,
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
