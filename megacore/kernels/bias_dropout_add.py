"""What a branch gives to the residual stream, residual + dropout(branch + bias); as Megatron-LM's bias_dropout_add."""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from megacore.kernels.implementation import Implementation, cpp_runs_uncompiled, everywhere


class BiasDropoutAdd(Protocol):
    """residual + dropout(branch + bias)."""

    def __call__(self, branch: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> Tensor:
        """Both [..., h] -> [..., h]; p = 0 drops nothing."""
        ...


def reference(branch: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> Tensor:
    """See `BiasDropoutAdd`."""
    if bias is not None:
        branch = branch + bias
    return residual + (F.dropout(branch, p) if p else branch)


def _load_cpp() -> BiasDropoutAdd:
    from megacore.kernels.cpu import residual

    return residual.bias_dropout_add


IMPLEMENTATIONS = (
    Implementation[BiasDropoutAdd]("C++ with AVX-512", _load_cpp, cpp_runs_uncompiled),
    Implementation[BiasDropoutAdd]("torch", lambda: reference, everywhere),
)
