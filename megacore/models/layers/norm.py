"""Normalization layers."""

import torch
from torch import Tensor, nn

from megacore.config.model import ModelConfig
from megacore.kernels.choice import Kernels
from megacore.models.layers.shared import LayerSetup
from megacore.tensor_parallel.mappings import gather_within_tensor_parallel_region


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


class LayerNorm1p(LayerNorm):
    """LayerNorm that multiplies by 1 + weight, computed in the weight's type."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., size] to [..., size]."""
        return self.kernels.layer_norm(x, 1 + self.weight, self.bias, self.eps)


class RMSNorm1p(RMSNorm):
    """RMSNorm that multiplies by 1 + weight, computed in the weight's type."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., size] to [..., size]."""
        return self.kernels.rms_norm(x, 1 + self.weight, self.eps)


class ProjectionRMSNorm(RMSNorm):
    """RMSNorm of queries or keys over all heads, which are divided over ranks (OLMo 2).

    Every rank has the whole weight [n d] and uses the part of its heads, so that its gradient is
    partial. With fewer key-value heads than ranks, several ranks have the same head; the mean of
    the ranks' mean squares is that of all heads in both cases.

    Args:
        size: width of all heads together (n d).
        head_dim: size of a head (d).
        zero_centered: multiply by 1 + weight.
        eps: term added to the mean square.
        setup: kernels, ranks and device.
    """

    def __init__(
        self,
        size: int,
        head_dim: int,
        *,
        zero_centered: bool,
        eps: float,
        setup: LayerSetup,
    ) -> None:
        super().__init__(size, eps, setup.kernels, setup.device)
        self.tp = tp = setup.tp
        self.zero_centered = zero_centered
        heads = size // head_dim
        self.first = tp.rank * heads // tp.size * head_dim
        self.local = max(1, heads // tp.size) * head_dim

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's heads [b, s, n/t, d] to the same shape."""
        weight = 1 + self.weight if self.zero_centered else self.weight
        flat = x.flatten(2)
        if self.tp.size == 1:
            return self.kernels.rms_norm(flat, weight, self.eps).view(x.shape)
        exact = flat.to(torch.promote_types(x.dtype, torch.float32))
        # The gather's backward pass sums over the ranks, all of which use the mean.
        squares = gather_within_tensor_parallel_region(
            exact.square().mean(-1, keepdim=True), self.tp
        )
        normed = exact * torch.rsqrt(squares.mean(-1, keepdim=True) + self.eps)
        return (normed * weight.narrow(0, self.first, self.local)).to(x.dtype).view(x.shape)


def make_norm(model: ModelConfig, size: int, setup: LayerSetup) -> nn.Module:
    """Return a norm of the model's kind for vectors of `size`."""
    if model.normalization == "rmsnorm":
        kind: type[LayerNorm | RMSNorm] = RMSNorm1p if model.apply_layernorm_1p else RMSNorm
    else:
        kind = LayerNorm1p if model.apply_layernorm_1p else LayerNorm
    return kind(size, model.layernorm_epsilon, setup.kernels, setup.device)


def make_head_norm(model: ModelConfig, heads: int, setup: LayerSetup) -> nn.Module | None:
    """Return the norm of queries or keys with `heads` heads, None for a model without one."""
    if not model.qk_layernorm:
        return None
    if model.qk_layernorm_scope == "head":
        return make_norm(model, model.head_dim, setup)
    return ProjectionRMSNorm(
        heads * model.head_dim,
        model.head_dim,
        zero_centered=model.apply_layernorm_1p,
        eps=model.layernorm_epsilon,
        setup=setup,
    )


def parameters_of(module: nn.Module, *names: str) -> frozenset[str]:
    """Return the parameter names of a module's children `names`, skipping missing children."""
    return frozenset(
        f"{name}.{parameter}"
        for name in names
        if (child := getattr(module, name, None)) is not None
        for parameter, _ in child.named_parameters()
    )
