"""Accumulation of the weight gradient dyᵀ x in an fp32 main gradient.

Megatron-LM's fused gradient accumulation does the same.
"""

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from megacore.kernels.implementation import Implementation, Setting, cpp_runs, everywhere, has_apex


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


def _runs_cpp(setting: Setting) -> bool:
    return cpp_runs(setting) and setting.dtype == torch.bfloat16


def _half_on_gpu(setting: Setting) -> bool:
    return setting.device.type == "cuda" and setting.dtype != torch.float32


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


IMPLEMENTATIONS = (
    Implementation[WeightGradient](
        "apex wgrad_gemm_accum_fp32",
        _load_apex,
        lambda setting: _half_on_gpu(setting) and has_apex("fused_weight_gradient_mlp_cuda"),
    ),
    Implementation[WeightGradient](
        "torch addmm in fp32",
        lambda: widening,
        lambda setting: _half_on_gpu(setting) and _adds_in_fp32(setting.device, setting.dtype),
    ),
    Implementation[WeightGradient](
        "torch mm in fp32, then add", lambda: widening_apart, _half_on_gpu
    ),
    Implementation[WeightGradient]("C++ with AVX512-BF16", _load_cpp, _runs_cpp),
    Implementation[WeightGradient]("torch mm, then add", lambda: reference, everywhere),
)
