"""Activations in one pass: of an input plus bias, and of gated units.

GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415) and ReLU are fused with the bias as in
Megatron-LM's bias_gelu. Gated units are Shazeer's (2020, arXiv:2002.05202).
"""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from megacore.config.model import Activation
from megacore.kernels.implementation import Implementation, cpp_obstacle, everywhere


class BiasActivation(Protocol):
    """Interface of f(x + bias)."""

    def __call__(self, x: Tensor, bias: Tensor | None, kind: Activation) -> Tensor:
        """Map [..., f] to [..., f]."""
        ...


class Gated(Protocol):
    """Interface of f(gate) * up."""

    def __call__(self, gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
        """Map two tensors [..., f] to one [..., f]."""
        ...


def bias_activation(x: Tensor, bias: Tensor | None, kind: Activation) -> Tensor:
    """Compute f(x + bias), see `BiasActivation`."""
    return activate(x if bias is None else x + bias, kind)


def gated(gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
    """Compute f(gate) * up, see `Gated`."""
    return activate(gate, kind) * up


def activate(x: Tensor, kind: Activation) -> Tensor:
    """Apply an activation, or for a gated unit the function of its gate."""
    match kind:
        case "gelu_tanh" | "geglu_tanh":
            return F.gelu(x, approximate="tanh")
        case "gelu" | "geglu":
            return F.gelu(x)
        case "swiglu":
            return F.silu(x)
        case "relu":
            return F.relu(x)


def _load_cpp_bias_activation() -> BiasActivation:
    from megacore.kernels.cpu import activation

    return activation.bias_activation


def _load_cpp_gated() -> Gated:
    from megacore.kernels.cpu import activation

    return activation.gated


BIAS_ACTIVATION = (
    Implementation[BiasActivation](
        "cpp", "C++ with AVX-512", _load_cpp_bias_activation, cpp_obstacle
    ),
    Implementation[BiasActivation]("plain", "torch", lambda: bias_activation, everywhere),
)
GATED = (
    Implementation[Gated]("cpp", "C++ with AVX-512", _load_cpp_gated, cpp_obstacle),
    Implementation[Gated]("plain", "torch", lambda: gated, everywhere),
)
