"""Gated units (Shazeer 2020, arXiv:2002.05202)."""

from typing import Protocol

from torch import Tensor

from megacore.config.model import Activation
from megacore.kernels.bias_activation import activate
from megacore.kernels.implementation import Implementation, cpp_runs, everywhere


class Gated(Protocol):
    """f(gate) * up."""

    def __call__(self, gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
        """Both [..., f] -> [..., f]."""
        ...


def reference(gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
    """See `Gated`."""
    return activate(gate, kind) * up


def _load_cpp() -> Gated:
    from megacore.kernels.cpu import activation

    return activation.gated


IMPLEMENTATIONS = (
    Implementation[Gated]("C++ with AVX-512", _load_cpp, cpp_runs),
    Implementation[Gated]("torch", lambda: reference, everywhere),
)
