"""Clipping by the global gradient norm (Pascanu et al. 2013), without a transfer to the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

_EPSILON = 1e-6


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all elements of all gradients: an fp32 scalar on their device.

    Args:
        gradients: fp32 tensors of any shape, together holding every gradient element once.
    """
    norms = torch._foreach_norm(list(gradients), 2)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), 2)
    return total


def clip_by_norm_(gradients: Sequence[Tensor], norm: Tensor, max_norm: float, *, scale: float = 1.0) -> None:
    """Multiply gradients in place so that, divided by `scale`, their global norm is at most `max_norm`.

    Args:
        gradients: fp32 tensors of any shape.
        norm: their global norm after the division by `scale`, a scalar.
        max_norm: limit of the norm; 0 does not clip.
        scale: loss scale that the gradients still carry; they are divided by it in the same pass.
    """
    if max_norm > 0:
        factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0) / scale
    elif scale != 1.0:
        factor = torch.full_like(norm, 1.0 / scale)
    else:
        return
    torch._foreach_mul_(list(gradients), factor)
