"""Dropout (Srivastava et al. 2014) in training, also fused with bias and residual.

The latter is residual + dropout(branch + bias), as in Megatron-LM's bias_dropout_add. Both use
torch's generator.
"""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from megacore.kernels.implementation import Implementation, cpp_obstacle_uncompiled, everywhere


class Dropout(Protocol):
    """Interface of dropout."""

    def __call__(self, x: Tensor, p: float) -> Tensor:
        """Return 0 with probability p, 0 < p < 1, else x / (1 - p); for any shape."""
        ...


class BiasDropoutAdd(Protocol):
    """Interface of residual + dropout(branch + bias)."""

    def __call__(self, branch: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> Tensor:
        """Map branch and residual [..., h] to [..., h]; p = 0 drops nothing."""
        ...


def dropout(x: Tensor, p: float) -> Tensor:
    """Apply torch's dropout, see `Dropout`."""
    return F.dropout(x, p)


def bias_dropout_add(branch: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> Tensor:
    """Compute residual + dropout(branch + bias) with torch, see `BiasDropoutAdd`."""
    if bias is not None:
        branch = branch + bias
    return residual + (F.dropout(branch, p) if p else branch)


def _load_cpp_dropout() -> Dropout:
    from megacore.kernels.cpu import residual

    return residual.dropout


def _load_cpp_bias_dropout_add() -> BiasDropoutAdd:
    from megacore.kernels.cpu import residual

    return residual.bias_dropout_add


DROPOUT = (
    Implementation[Dropout]("cpp", "C++ with AVX-512", _load_cpp_dropout, cpp_obstacle_uncompiled),
    Implementation[Dropout]("plain", "torch", lambda: dropout, everywhere),
)
BIAS_DROPOUT_ADD = (
    Implementation[BiasDropoutAdd](
        "cpp", "C++ with AVX-512", _load_cpp_bias_dropout_add, cpp_obstacle_uncompiled
    ),
    Implementation[BiasDropoutAdd]("plain", "torch", lambda: bias_dropout_add, everywhere),
)
