"""One update of AdamW (Loshchilov and Hutter 2019) for many tensors.

The updated weights are rounded into the model's weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megacore.kernels.implementation import Implementation, apex_obstacle, cpp_obstacle, everywhere

_APEX_CHUNK = 2048 * 32
"""Elements per thread block, as in apex's own optimizers."""
_ADAMW = 1
"""Mode of apex with decoupled weight decay."""


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters of one update."""

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    step: int
    """Number of this update, from 1; used for the bias correction of the moments."""


class AdamTensors(NamedTuple):
    """Tensors of an update; tensors at the same position of the lists have the same shape.

    All are contiguous, in host memory or on one GPU.
    """

    weights: Sequence[Tensor]
    """Main weights, in fp32 like the next three lists."""
    gradients: Sequence[Tensor]
    """Gradients; an update may overwrite them."""
    exp_avgs: Sequence[Tensor]
    """First moments."""
    exp_avg_sqs: Sequence[Tensor]
    """Second moments."""
    targets: Sequence[Tensor] | None
    """Model weights of lower precision, into which the updated weights are rounded. None if
    `weights` are the model's own weights."""


class AdamW(Protocol):
    """Interface of an AdamW update."""

    def __call__(self, tensors: AdamTensors, values: Hyperparameters, divisor: Tensor) -> None:
        """Update weights and moments in place.

        An element's result does not depend on how the tensors are divided.

        Args:
            tensors: tensors to update.
            values: hyperparameters of this update.
            divisor: number by which the gradients are divided first: fp32, 0-dimensional, on the
                tensors' device.
        """
        ...


def reference(tensors: AdamTensors, values: Hyperparameters, divisor: Tensor) -> None:
    """Update with torch's fused kernel.

    `torch.optim.AdamW(fused=True)` calls the same kernel, but its wrapper takes seconds to import.
    """
    weights, gradients, exp_avgs, exp_avg_sqs, _ = tensors
    device = weights[0].device
    # The kernel expects the number of the current step once per tensor.
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
        # With grad_scale the kernel also writes the divided gradients back, which takes time. It is
        # left out only on a CPU, because reading a divisor on a GPU would synchronize.
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
            # The overflow flag, which stays 0 because apex would skip the update.
            torch.zeros(1, dtype=torch.int32, device=device),
            [list(gradients), list(weights), list(exp_avgs), list(exp_avg_sqs)],
            torch.full((), values.lr, device=device),
            values.beta1,
            values.beta2,
            values.eps,
            torch.full((1,), values.step, dtype=torch.int32, device=device),
            _ADAMW,
            True,  # bias correction of the moments
            values.weight_decay,
            divisor.reciprocal().view(1),
        )
        _publish(tensors)

    return update


def _load_cpp() -> AdamW:
    from megacore.kernels.cpu.adam import adamw_

    return adamw_


IMPLEMENTATIONS = (
    Implementation[AdamW](
        "apex", "apex FusedAdam", _load_apex, lambda setting: apex_obstacle(setting, "amp_C")
    ),
    Implementation[AdamW](
        "cpp", "C++ with AVX-512, publishing as it goes", _load_cpp, cpp_obstacle
    ),
    Implementation[AdamW]("plain", "torch fused AdamW", lambda: reference, everywhere),
)
