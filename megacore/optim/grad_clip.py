"""Clipping by the global gradient norm (Pascanu et al. 2013), without a transfer to the host."""

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to the norm before it divides the limit, as torch and Megatron-LM do."""


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of this global norm are divided by so that it is at most `max_norm`: a scalar of at least 1.

    Args:
        norm: a scalar.
        max_norm: limit of the norm; 0 does not clip.
    """
    return torch.clamp((norm + EPSILON) / max_norm, min=1.0) if max_norm > 0 else torch.ones_like(norm)
