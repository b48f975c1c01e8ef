"""Norms over the last dimension: LayerNorm and RMSNorm.

See Ba et al. 2016, arXiv:1607.06450, and Zhang and Sennrich 2019. The fused norms of NVIDIA apex
are those of `apex.normalization`, without its autocast.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.kernels.implementation import Implementation, Setting, cpp_runs, everywhere, has_apex


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


def _runs_apex(setting: Setting) -> bool:
    return (
        setting.device.type == "cuda" and not setting.compiled and has_apex("fused_layer_norm_cuda")
    )


def _runs_cpp(setting: Setting) -> bool:
    """Return True if the C++ kernels are faster.

    In fp32, torch.compile is as fast because it fuses the norm with the preceding operations.
    """
    return cpp_runs(setting) and not (setting.compiled and setting.dtype == torch.float32)


LAYER_NORM = (
    Implementation[LayerNorm]("apex FusedLayerNorm", _load_apex_layer_norm, _runs_apex),
    Implementation[LayerNorm]("C++ with AVX-512", _load_cpp_layer_norm, _runs_cpp),
    Implementation[LayerNorm]("torch", lambda: layer_norm, everywhere),
)
RMS_NORM = (
    Implementation[RMSNorm]("apex FusedRMSNorm", _load_apex_rms_norm, _runs_apex),
    Implementation[RMSNorm]("C++ with AVX-512", _load_cpp_rms_norm, _runs_cpp),
    Implementation[RMSNorm]("torch", lambda: rms_norm, everywhere),
)
