"""One update of AdamW for many tensors, with rounding into the model's weights.

AdamW is of Loshchilov and Hutter 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megacore.kernels.implementation import Implementation, cpp_runs, everywhere, has_apex

_APEX_CHUNK = 2048 * 32
"""Elements of one block of threads, as apex's own optimizers have it."""
_ADAMW = 1
"""apex's mode with decoupled weight decay."""


@dataclass(frozen=True)
class Hyperparameters:
    """Of one update."""

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    step: int
    """Number of this update, from 1; it corrects the bias of the moments."""


class AdamTensors(NamedTuple):
    """What is updated: tensors of one shape at each place of the lists.

    They are contiguous, in main memory or on one GPU.
    """

    weights: Sequence[Tensor]
    """Main weights, fp32, as are the next three."""
    gradients: Sequence[Tensor]
    """Used up by an update."""
    exp_avgs: Sequence[Tensor]
    """First moments."""
    exp_avg_sqs: Sequence[Tensor]
    """Second moments."""
    targets: Sequence[Tensor] | None
    """Of the model's lower precision: the updated weights are rounded into them. None where the
    weights are the model's own."""


class AdamW(Protocol):
    """Makes one update."""

    def __call__(self, tensors: AdamTensors, values: Hyperparameters, divisor: Tensor) -> None:
        """Update weights and moments in place.

        An element's result does not depend on how tensors are divided.

        Args:
            tensors: what is updated.
            values: of this update.
            divisor: what the gradients are divided by first: fp32, 0-dimensional, on the tensors'
                device.
        """
        ...


def reference(tensors: AdamTensors, values: Hyperparameters, divisor: Tensor) -> None:
    """By torch's fused kernel.

    `torch.optim.AdamW(fused=True)` calls the same one, but its wrapper takes seconds to import.
    """
    weights, gradients, exp_avgs, exp_avg_sqs, _ = tensors
    device = weights[0].device
    # The kernel reads the number of the present step, and wants it once per tensor.
    step = torch.full((), float(values.step), device=device)
    torch._fused_adamw_(
        list(weights),
        list(gradients),
        list(exp_avgs),
        list(exp_avg_sqs),
        [],
        [step] * len(weights),
        lr=values.lr,
        beta1=values.beta1,
        beta2=values.beta2,
        weight_decay=values.weight_decay,
        eps=values.eps,
        amsgrad=False,
        maximize=False,
        # It writes the divided gradients back, which is not free: on the CPU a 1 is seen, on a GPU
        # it would be waited for.
        grad_scale=None if device.type == "cpu" and divisor == 1 else divisor,
    )
    _publish(tensors)


def _publish(tensors: AdamTensors) -> None:
    if tensors.targets is not None:
        torch._foreach_copy_(list(tensors.targets), list(tensors.weights))


def _load_apex() -> AdamW:
    import amp_C  # type: ignore[import-not-found]

    def update(tensors: AdamTensors, values: Hyperparameters, divisor: Tensor) -> None:
        weights, gradients, exp_avgs, exp_avg_sqs, _ = tensors
        device = weights[0].device
        amp_C.multi_tensor_adam_capturable(
            _APEX_CHUNK,
            # no overflow: the update would be left out
            torch.zeros(1, dtype=torch.int32, device=device),
            [list(gradients), list(weights), list(exp_avgs), list(exp_avg_sqs)],
            torch.full((), values.lr, device=device),
            values.beta1,
            values.beta2,
            values.eps,
            torch.full((1,), values.step, dtype=torch.int32, device=device),
            _ADAMW,
            True,  # correct the bias of the moments
            values.weight_decay,
            divisor.reciprocal().view(1),
        )
        _publish(tensors)

    return update


def _load_cpp() -> AdamW:
    from megacore.kernels.cpu.adam import adamw_

    def update(tensors: AdamTensors, values: Hyperparameters, divisor: Tensor) -> None:
        adamw_(
            *tensors,
            step=values.step,
            lr=values.lr,
            beta1=values.beta1,
            beta2=values.beta2,
            weight_decay=values.weight_decay,
            eps=values.eps,
            divisor=float(divisor),
        )

    return update


IMPLEMENTATIONS = (
    Implementation[AdamW](
        "apex FusedAdam",
        _load_apex,
        lambda setting: setting.device.type == "cuda" and has_apex("amp_C"),
    ),
    Implementation[AdamW]("C++ with AVX-512, publishing as it goes", _load_cpp, cpp_runs),
    Implementation[AdamW]("torch fused AdamW", lambda: reference, everywhere),
)
