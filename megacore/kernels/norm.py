"""Norms over the last dimension: LayerNorm and RMSNorm.

See Ba et al. 2016, arXiv:1607.06450, and Zhang and Sennrich 2019. The fused norms of NVIDIA apex
are those of `apex.normalization`, without its autocast.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.kernels.implementation import (
    Implementation,
    Setting,
    apex_obstacle,
    cpp_obstacle,
    everywhere,
)


class LayerNorm(Protocol):
    """Interface of LayerNorm."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Normalize [..., h] to mean 0 and variance 1, then apply weight [h] and bias [h]."""
        ...


class RMSNorm(Protocol):
    """Interface of RMSNorm."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalize [..., h] to a mean square of 1, then apply weight [h]."""
        ...


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Apply torch's LayerNorm, see `LayerNorm`."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply torch's RMSNorm, see `RMSNorm`."""
    return F.rms_norm(x, weight.shape, weight, eps)


def _load_apex_layer_norm() -> LayerNorm:
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine

    def fused(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        if bias is None:  # apex has no kernel with a weight only
            return layer_norm(x, weight, None, eps)
        return fused_layer_norm_affine(x, weight, bias, list(weight.shape), eps)  # type: ignore[no-any-return]

    return fused


def _load_apex_rms_norm() -> RMSNorm:
    from apex.normalization.fused_layer_norm import fused_rms_norm_affine

    def fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return fused_rms_norm_affine(x, weight, list(weight.shape), eps)  # type: ignore[no-any-return]

    return fused


def _load_cpp_layer_norm() -> LayerNorm:
    from megacore.kernels.cpu import norm

    return norm.layer_norm


def _load_cpp_rms_norm() -> RMSNorm:
    from megacore.kernels.cpu import norm

    return norm.rms_norm


def _apex_obstacle(setting: Setting) -> str | None:
    if setting.device.type == "cuda" and setting.compiled:
        return "it does not run in layers that torch.compile compiles; set train.compile to off"
    return apex_obstacle(setting, "fused_layer_norm_cuda")


def _faster_in_cpp(setting: Setting) -> bool:
    """Return True if the C++ kernels are faster.

    In fp32, torch.compile is as fast because it fuses the norm with the preceding operations.
    """
    return not (setting.compiled and setting.dtype == torch.float32)


LAYER_NORM = (
    Implementation[LayerNorm]("apex", "apex FusedLayerNorm", _load_apex_layer_norm, _apex_obstacle),
    Implementation[LayerNorm](
        "cpp", "C++ with AVX-512", _load_cpp_layer_norm, cpp_obstacle, _faster_in_cpp
    ),
    Implementation[LayerNorm]("plain", "torch", lambda: layer_norm, everywhere),
)
RMS_NORM = (
    Implementation[RMSNorm]("apex", "apex FusedRMSNorm", _load_apex_rms_norm, _apex_obstacle),
    Implementation[RMSNorm](
        "cpp", "C++ with AVX-512", _load_cpp_rms_norm, cpp_obstacle, _faster_in_cpp
    ),
    Implementation[RMSNorm]("plain", "torch", lambda: rms_norm, everywhere),
)
