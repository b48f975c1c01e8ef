"""Matrix products of linear layers, by the faster of torch's two libraries on this CPU.

torch multiplies fp32 matrices with MKL, which uses half of the width of AMD's newer CPUs, and in
bf16 it writes the bias into the result before it multiplies. Its other library, oneDNN, uses the
whole width, and adds the bias as it writes the result.
"""

import time
from functools import cache

import torch
from torch import Tensor

from megacore.kernels.implementation import DTYPES

_LEAST_WORK = 1 << 20
"""Multiplications from which oneDNN's call, which takes 10 µs more than MKL's, is worth it."""
_MEASURED_SIZE, _MEASURED_SIZE_ON_GPUS = 512, 8192
_MEASURING_SECONDS = 0.2


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None, share: float = 1.0) -> Tensor:
    """Return x Wᵀ + share · b, outside of autograd.

    The result is not a view, so that the caller may change it in place.

    Args:
        x: [..., i].
        weight: [o, i].
        bias: [o].
        share: factor on the bias.
    """
    rows, shape = x.reshape(-1, x.shape[-1]), (*x.shape[:-1], weight.shape[0])
    if _onednn_is_faster(rows, weight, with_bias=bias is not None):
        # the operator of torch's compiler, since no public one multiplies fp32 with oneDNN
        if bias is not None:  # it ignores a bias's stride
            bias = bias.contiguous() if share == 1.0 else bias * share
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        return product.resize_(shape)
    y = x.new_empty(shape)
    if bias is None:
        torch.mm(rows, weight.t(), out=y.view(-1, shape[-1]))
    else:
        torch.addmm(bias, rows, weight.t(), beta=share, out=y.view(-1, shape[-1]))
    return y


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Return x y of [rows, i] and [i, o], outside of autograd."""
    if _onednn_is_faster(x, y):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, y.t(), None, "none", [], "")
        return product
    return torch.mm(x, y)


def add_product_(total: Tensor, x: Tensor, y: Tensor) -> None:
    """Add x y of [rows, i] and [i, o] to `total`, outside of autograd."""
    if _onednn_is_faster(x, y):
        total.add_(multiply(x, y))
    else:
        total.addmm_(x, y)


def measured_tflops(
    precision: str, seconds: float = _MEASURING_SECONDS, device: torch.device | None = None
) -> float:
    """Measure the best rate of `multiply` for square matrices for about `seconds`, in TFLOP/s.

    A device of None means this process's CPU threads.
    """
    dtype = DTYPES[precision]
    cuda = device is not None and device.type == "cuda"
    size = _MEASURED_SIZE_ON_GPUS if cuda else _MEASURED_SIZE
    left = torch.ones(size, size, dtype=dtype, device=device)
    if cuda:  # products of equal numbers take less power, and are faster than a model's
        left.normal_(generator=torch.Generator(device).manual_seed(0))
    right = left.clone()
    multiply(left, right)
    if cuda:
        torch.cuda.synchronize(device)
    best = float("inf")
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        multiply(left, right)
        if cuda:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    if cuda:  # the run's peak memory does not contain this
        del left, right
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return 2 * size**3 / best / 1e12


def _onednn_is_faster(x: Tensor, y: Tensor, *, with_bias: bool = False) -> bool:
    if x.device.type != "cpu" or x.shape[0] * y.numel() < _LEAST_WORK:
        return False
    if x.dtype == torch.bfloat16:
        return with_bias and _available()[1]
    return x.dtype == torch.float32 and _available()[0]


@cache
def _available() -> tuple[bool, bool]:
    """Return whether oneDNN is to multiply in fp32 and in bf16 with a bias."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False, False
    from megacore.kernels.cpu import common

    return common.outruns_mkl(), common.runs_bf16()
