"""Accumulation of the weight gradient dyᵀ x in an fp32 main gradient.

Megatron-LM's fused gradient accumulation does the same.
"""

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from megacore.kernels.implementation import (
    Implementation,
    Setting,
    apex_obstacle,
    cpp_obstacle,
    everywhere,
    half_on_gpu_obstacle,
)


class WeightGradient(Protocol):
    """Interface of the accumulation in a main gradient."""

    def __call__(self, main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
        """Compute main_grad += dyᵀ x.

        Args:
            main_grad: [o, i], fp32.
            dy: gradient of a linear layer's output, [rows, o].
            x: input of the layer, [rows, i].
        """
        ...


def reference(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """Accumulate with torch; in half precision the product is rounded before it is added."""
    if x.dtype == main_grad.dtype:
        main_grad.addmm_(dy.t(), x)
    else:
        main_grad.add_(dy.t() @ x)


def widening(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """Accumulate on a GPU with one matmul of half-precision factors that adds in fp32."""
    if x.dtype == main_grad.dtype:
        main_grad.addmm_(dy.t(), x)
    else:
        torch.addmm(main_grad, dy.t(), x, out_dtype=main_grad.dtype, out=main_grad)


def widening_apart(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """Accumulate on a GPU with a separate fp32 product of half-precision factors."""
    if x.dtype == main_grad.dtype:
        main_grad.addmm_(dy.t(), x)
    else:
        main_grad.add_(torch.mm(dy.t(), x, out_dtype=main_grad.dtype))


def _load_apex() -> WeightGradient:
    import fused_weight_gradient_mlp_cuda  # type: ignore[import-not-found]

    def accumulate(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
        # The kernel ignores strides; it would read beyond the end of expanded gradients.
        fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(
            x.contiguous(), dy.contiguous(), main_grad
        )

    return accumulate


def _load_cpp() -> WeightGradient:
    from megacore.kernels.cpu.weight_grad import accumulate_

    return accumulate_


def _apex_obstacle(setting: Setting) -> str | None:
    module = "fused_weight_gradient_mlp_cuda"
    return half_on_gpu_obstacle(setting) or apex_obstacle(setting, module)


def _outruns_torch(setting: Setting) -> bool:
    from megacore.kernels.cpu import common

    return setting.dtype != torch.float32 or common.outruns_mkl()


@cache
def _adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if torch's addmm can add factors of `dtype` to an fp32 sum on `device`.

    A small product tests this once.
    """
    total, factor = torch.ones(8, 8, device=device), torch.ones(8, 8, dtype=dtype, device=device)
    try:
        widening(total, factor, factor)
    except RuntimeError:
        return False
    return bool((total == 9.0).all())


def _addmm_obstacle(setting: Setting) -> str | None:
    obstacle = half_on_gpu_obstacle(setting)
    if obstacle is None and not _adds_in_fp32(setting.device, setting.dtype):
        return "torch's addmm does not add to an fp32 sum on this GPU"
    return obstacle


IMPLEMENTATIONS = (
    Implementation[WeightGradient](
        "apex", "apex wgrad_gemm_accum_fp32", _load_apex, _apex_obstacle
    ),
    Implementation[WeightGradient](
        "torch_fp32", "torch addmm in fp32", lambda: widening, _addmm_obstacle
    ),
    Implementation[WeightGradient](
        "torch_fp32", "torch mm in fp32, then add", lambda: widening_apart, half_on_gpu_obstacle
    ),
    Implementation[WeightGradient](
        "cpp", "C++ with AVX-512", _load_cpp, cpp_obstacle, preferred=_outruns_torch
    ),
    Implementation[WeightGradient]("plain", "torch mm, then add", lambda: reference, everywhere),
)
