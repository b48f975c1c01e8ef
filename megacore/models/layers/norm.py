"""The norms of a model."""

import torch
from torch import Tensor, nn

from megacore.config.model import ModelConfig
from megacore.kernels.choice import Kernels


class LayerNorm(nn.Module):
    """Vectors of `size` with mean 0 and variance 1, times a weight plus a bias (Ba et al. 2016)."""

    def __init__(self, size: int, eps: float, kernels: Kernels, device: torch.device | str) -> None:
        super().__init__()
        self.eps = eps
        self.kernels = kernels
        self.weight = nn.Parameter(torch.ones(size, device=device))
        self.bias = nn.Parameter(torch.zeros(size, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """Vectors of `size` with a mean square of 1, times a weight (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float, kernels: Kernels, device: torch.device | str) -> None:
        super().__init__()
        self.eps = eps
        self.kernels = kernels
        self.weight = nn.Parameter(torch.ones(size, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return self.kernels.rms_norm(x, self.weight, self.eps)


def make_norm(
    model: ModelConfig, size: int, kernels: Kernels, device: torch.device | str
) -> nn.Module:
    """The model's kind of norm, of vectors of `size`."""
    kind = RMSNorm if model.normalization == "rmsnorm" else LayerNorm
    return kind(size, model.layernorm_epsilon, kernels, device)


def parameters_of(module: nn.Module, *names: str) -> frozenset[str]:
    """Names of the parameters of a module's children `names`, those that there are."""
    return frozenset(
        f"{name}.{parameter}"
        for name in names
        if (child := getattr(module, name, None)) is not None
        for parameter, _ in child.named_parameters()
    )
