"""AdamW in C++ over fp32 main weights, and the sum of squares of gradients.

The update also rounds into the model.
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
    """One update by AdamW of all tensors of a list, in one pass over the memory.

    AdamW is of Loshchilov and Hutter 2019.

    What an element becomes depends on its own numbers alone, not on its place or on how tensors are
    divided.

    Args:
        weights: fp32 main weights; these and all others are contiguous, of one shape per position.
        gradients: fp32, only read.
        exp_avgs: first moments, fp32.
        exp_avg_sqs: second moments, fp32.
        targets: bf16, become the new weights rounded to the nearest, ties to even; None publishes
            nothing.
        step: number of this update, from 1; it corrects the bias of the moments.
        lr: learning rate.
        beta1: decay of the first moments.
        beta2: decay of the second moments.
        weight_decay: decoupled; weights lose lr · weight_decay of themselves first.
        eps: added to the root of the second moment.
        divisor: the gradients are divided by it.
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


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Of all elements of contiguous fp32 tensors: a float64 scalar.

    Its bits are the same with any number of threads.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    total: Tensor = torch.ops.megacore.sum_of_squares(tensors)
    return total


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


def _fake_sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    return torch.empty((), dtype=torch.float64)


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


@operator("sum_of_squares(Tensor[] tensors) -> Tensor", _fake_sum_of_squares)
def _sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    sizes = [tensor.numel() for tensor in tensors]
    total = _kernels.sum_of_squares(
        _addresses(tensors, sizes, torch.float32), sizes, torch.get_num_threads()
    )
    return torch.tensor(total, dtype=torch.float64)
