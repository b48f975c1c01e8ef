"""Dropout (Srivastava et al. 2014) in training, and what a branch gives to the residual stream.

The latter is residual + dropout(branch + bias), as Megatron-LM's bias_dropout_add. Both drop what
torch's generator draws.
"""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from megacore.kernels.implementation import Implementation, cpp_runs_uncompiled, everywhere


class Dropout(Protocol):
    """Drops elements."""

    def __call__(self, x: Tensor, p: float) -> Tensor:
        """Zero with probability p, 0 < p < 1, else x / (1 - p); of any shape."""
        ...


class BiasDropoutAdd(Protocol):
    """residual + dropout(branch + bias)."""

    def __call__(self, branch: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> Tensor:
        """Both [..., h] -> [..., h]; p = 0 drops nothing."""
        ...


def dropout(x: Tensor, p: float) -> Tensor:
    """See `Dropout`."""
    return F.dropout(x, p)


def bias_dropout_add(branch: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> Tensor:
    """See `BiasDropoutAdd`."""
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
    Implementation[Dropout]("C++ with AVX-512", _load_cpp_dropout, cpp_runs_uncompiled),
    Implementation[Dropout]("torch", lambda: dropout, everywhere),
)
BIAS_DROPOUT_ADD = (
    Implementation[BiasDropoutAdd](
        "C++ with AVX-512", _load_cpp_bias_dropout_add, cpp_runs_uncompiled
    ),
    Implementation[BiasDropoutAdd]("torch", lambda: bias_dropout_add, everywhere),
)
