"""Which of the C++ kernels run on this machine."""

from functools import cache

import torch  # first: the kernels use the OpenMP library that it brings

from megacore.kernels.cpu import _support


@cache
def runs_fp32() -> bool:
    """Whether the CPU has AVX-512 (F, BW, DQ, VL) and FMA."""
    return _support.runs_fp32()


@cache
def runs_bf16() -> bool:
    """Whether it has AVX512-BF16 besides."""
    return _support.runs_bf16()


def runs(dtype: torch.dtype) -> bool:
    """Whether the kernels compute in `dtype` here."""
    return {torch.float32: runs_fp32, torch.bfloat16: runs_bf16}.get(dtype, lambda: False)()
