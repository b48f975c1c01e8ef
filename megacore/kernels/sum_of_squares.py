"""Sum of squares of many flat tensors, for the global gradient norm."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from megacore.kernels.implementation import (
    Implementation,
    apex_obstacle,
    everywhere,
)

_BLOCK = 4096
_APEX_CHUNK = 2048 * 32
"""Elements per thread block, as in apex's own optimizers."""


class SumOfSquares(Protocol):
    """Interface of the sum of squares."""

    def __call__(self, gradients: Iterable[Tensor], device: torch.device) -> Tensor:
        """Return the sum of squares of flat fp32 tensors on `device`, a float64 scalar there."""
        ...


def reference(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum squares in blocks, and the blocks in float64.

    Over millions of elements torch's fp32 norm has an error of 1e-4 on CPUs.
    """
    norms = [torch.zeros(1, device=device)]
    for gradient in gradients:
        block_end = gradient.numel() // _BLOCK * _BLOCK
        norms.append(torch.linalg.vector_norm(gradient[:block_end].view(-1, _BLOCK), dim=1))
        norms.append(torch.linalg.vector_norm(gradient[block_end:]).view(1))
    return torch.cat(norms).double().square().sum()


def _load_apex() -> SumOfSquares:
    import amp_C  # type: ignore[import-not-found]

    def total(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
        flat = [gradient for gradient in gradients if gradient.numel()]
        if not flat:
            return torch.zeros((), dtype=torch.float64, device=device)
        no_overflow = torch.zeros(1, dtype=torch.int32, device=device)
        norm: Tensor = amp_C.multi_tensor_l2norm(_APEX_CHUNK, no_overflow, [flat], False)[0]
        return norm.double().square().sum()

    return total


IMPLEMENTATIONS = (
    Implementation[SumOfSquares](
        "apex",
        "apex multi_tensor_l2norm",
        _load_apex,
        lambda setting: apex_obstacle(setting, "amp_C"),
    ),
    Implementation[SumOfSquares]("plain", "torch", lambda: reference, everywhere),
)
