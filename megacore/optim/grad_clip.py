"""Clipping by the global gradient norm (Pascanu et al. 2013), without a transfer to the host."""

from collections.abc import Iterable

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to the norm before it divides the limit, as torch and Megatron-LM do."""
_BLOCK = 4096


def sum_of_squares(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Of all elements of flat fp32 tensors on `device`: a float64 scalar there.

    Blocks are added in float64: over millions of elements torch's fp32 norm is wrong by 1e-4 on CPUs.
    """
    norms = [torch.zeros(1, device=device)]
    for gradient in gradients:
        whole = gradient.numel() // _BLOCK * _BLOCK
        norms.append(torch.linalg.vector_norm(gradient[:whole].view(-1, _BLOCK), dim=1))
        norms.append(torch.linalg.vector_norm(gradient[whole:]).view(1))
    return torch.cat(norms).double().square().sum()


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of this global norm are divided by so that it is at most `max_norm`: a scalar of at least 1.

    Args:
        norm: a scalar.
        max_norm: limit of the norm; 0 does not clip.
    """
    return torch.clamp((norm + EPSILON) / max_norm, min=1.0) if max_norm > 0 else torch.ones_like(norm)
