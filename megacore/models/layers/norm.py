"""Normalization layers."""

import torch
from torch import Tensor, nn

from megacore.config.model import ModelConfig
from megacore.kernels.choice import Kernels


class LayerNorm(nn.Module):
    """Normalization of the last dimension to mean 0 and variance 1, with weight and bias.

    See Ba et al. 2016.
    """

    def __init__(self, size: int, eps: float, kernels: Kernels, device: torch.device | str) -> None:
        super().__init__()
        self.eps = eps
        self.kernels = kernels
        self.weight = nn.Parameter(torch.ones(size, device=device))
        self.bias = nn.Parameter(torch.zeros(size, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., size] to [..., size]."""
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """Normalization of the last dimension to a mean square of 1, with weight.

    See Zhang and Sennrich 2019.
    """

    def __init__(self, size: int, eps: float, kernels: Kernels, device: torch.device | str) -> None:
        super().__init__()
        self.eps = eps
        self.kernels = kernels
        self.weight = nn.Parameter(torch.ones(size, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., size] to [..., size]."""
        return self.kernels.rms_norm(x, self.weight, self.eps)


def make_norm(
    model: ModelConfig, size: int, kernels: Kernels, device: torch.device | str
) -> nn.Module:
    """Return a norm of the model's kind for vectors of `size`."""
    kind = RMSNorm if model.normalization == "rmsnorm" else LayerNorm
    return kind(size, model.layernorm_epsilon, kernels, device)


def parameters_of(module: nn.Module, *names: str) -> frozenset[str]:
    """Return the parameter names of a module's children `names`, skipping missing children."""
    return frozenset(
        f"{name}.{parameter}"
        for name in names
        if (child := getattr(module, name, None)) is not None
        for parameter, _ in child.named_parameters()
    )
