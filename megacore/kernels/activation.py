"""A bias and an activation in one pass: GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415) and ReLU.

Fused as in Megatron-LM's bias_gelu.
"""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from megacore.config.model import Activation
from megacore.kernels.implementation import Implementation, cpp_runs, everywhere


class BiasActivation(Protocol):
    """f(x + bias)."""

    def __call__(self, x: Tensor, bias: Tensor | None, kind: Activation) -> Tensor:
        """[..., f] -> [..., f]."""
        ...


def reference(x: Tensor, bias: Tensor | None, kind: Activation) -> Tensor:
    """See `BiasActivation`."""
    return activate(x if bias is None else x + bias, kind)


def activate(x: Tensor, kind: Activation) -> Tensor:
    """The function of an activation, or of what gates a gated unit's other half."""
    match kind:
        case "gelu_tanh" | "geglu_tanh":
            return F.gelu(x, approximate="tanh")
        case "gelu" | "geglu":
            return F.gelu(x)
        case "swiglu":
            return F.silu(x)
        case "relu":
            return F.relu(x)


def _load_cpp() -> BiasActivation:
    from megacore.kernels.cpu import activation

    return activation.bias_activation


IMPLEMENTATIONS = (
    Implementation[BiasActivation]("C++ with AVX-512", _load_cpp, cpp_runs),
    Implementation[BiasActivation]("torch", lambda: reference, everywhere),
)
