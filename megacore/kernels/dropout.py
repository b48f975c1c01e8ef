"""Dropout (Srivastava et al. 2014) in training, of what torch's generator draws."""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from megacore.kernels.implementation import Implementation, cpp_runs_uncompiled, everywhere


class Dropout(Protocol):
    """Drops elements."""

    def __call__(self, x: Tensor, p: float) -> Tensor:
        """Zero with probability p, 0 < p < 1, else x / (1 - p); of any shape."""
        ...


def reference(x: Tensor, p: float) -> Tensor:
    """See `Dropout`."""
    return F.dropout(x, p)


def _load_cpp() -> Dropout:
    from megacore.kernels.cpu import residual

    return residual.dropout


IMPLEMENTATIONS = (
    Implementation[Dropout]("C++ with AVX-512", _load_cpp, cpp_runs_uncompiled),
    Implementation[Dropout]("torch", lambda: reference, everywhere),
)
