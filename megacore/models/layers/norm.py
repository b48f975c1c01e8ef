"""The norms of a model."""

import torch
from torch import nn

from megacore.config.model import ModelConfig


def make_norm(model: ModelConfig, size: int, device: torch.device | str) -> nn.Module:
    """A norm of vectors of `size`: LayerNorm (Ba et al. 2016), or RMSNorm (Zhang and Sennrich 2019) without a bias."""
    if model.normalization == "rmsnorm":
        return nn.RMSNorm(size, eps=model.layernorm_epsilon, device=device)
    return nn.LayerNorm(size, eps=model.layernorm_epsilon, device=device)


def parameters_of(module: nn.Module, *names: str) -> frozenset[str]:
    """Names of the parameters of a module's children `names`, those that there are."""
    return frozenset(
        f"{name}.{parameter}"
        for name in names
        if (child := getattr(module, name, None)) is not None
        for parameter, _ in child.named_parameters()
    )
