"""Shared parts of the C++ kernels.

Detection of the CPU's instructions, registration of operators, checks of tensors, dropout masks.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch  # first, because it loads the OpenMP library that the kernels use
from torch import Tensor

from megacore.errors import ConfigError
from megacore.kernels import implementation
from megacore.kernels.cpu import _kernels
from megacore.kernels.dropout import SequencePart

_SAMPLE = 4001
"""Numbers drawn to compare two generators: several blocks, and not a multiple of a block."""

_ZEN_5 = 26
"""AMD's family of the CPU."""

F = TypeVar("F", bound=Callable[..., Any])


@cache
def runs_fp32() -> bool:
    """Return True if the CPU has AVX-512 (F, BW, DQ, VL) and FMA."""
    return _kernels.runs_fp32()


@cache
def runs_bf16() -> bool:
    """Return True if the CPU also has AVX512-BF16."""
    return _kernels.runs_bf16()


@cache
def outruns_mkl() -> bool:
    """Return True if kernels with AVX-512 multiply fp32 matrices about twice as fast as MKL.

    torch multiplies them with MKL, which uses AVX-512 on Intel's CPUs only. On AMD's, AVX-512 is
    twice as fast as AVX2 since Zen 5.
    """
    has_mkl = bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
    return has_mkl and runs_fp32() and _kernels.amd_family() >= _ZEN_5


def runs(dtype: torch.dtype) -> bool:
    """Return True if the kernels can compute in `dtype` on this CPU."""
    return {torch.float32: runs_fp32, torch.bfloat16: runs_bf16}.get(dtype, lambda: False)()


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[F], F]:
    """Register a function as the CPU kernel of `torch.ops.megacore.<name>`."""
    return implementation.operator(schema, fake, "CPU")


def rows_of(x: Tensor) -> Tensor:
    """View [..., columns] as [rows, columns] with contiguous columns; copy if necessary."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def is_half(x: Tensor, *others: Tensor | None) -> bool:
    """Return True if all tensors are bf16, False if all are fp32.

    Raises:
        ConfigError: the tensors have different types or another type.
    """
    dtype = x.dtype
    for other in others:
        if other is not None and other.dtype != dtype:
            raise ConfigError(
                f"The C++ kernels take tensors of one type, not {dtype} together with "
                f"{other.dtype}."
            )
    if dtype == torch.bfloat16:
        return True
    if dtype == torch.float32:
        return False
    raise ConfigError(f"The C++ kernels compute in bf16 and fp32, not in {dtype}.")


def check_shapes(x: Tensor, *others: Tensor | None) -> None:
    """Raise ConfigError unless all tensors have the shape of x.

    Kernels read the same number of rows and columns of each.
    """
    for other in others:
        if other is not None and other.shape != x.shape:
            raise ConfigError(
                f"The C++ kernels take tensors of one shape, not {[*x.shape]} together with "
                f"{[*other.shape]}."
            )


def per_column(values: Tensor | None, x: Tensor) -> Tensor | None:
    """Return a weight or a bias with one number per column of x, contiguous.

    Raises:
        ConfigError: the number of elements differs.
    """
    if values is None:
        return None
    if values.shape != x.shape[-1:]:
        raise ConfigError(
            f"The C++ kernels take one number for each of the {x.shape[-1]} columns of "
            f"{[*x.shape]}, not {[*values.shape]}."
        )
    return values.contiguous()


def address(x: Tensor | None) -> int:
    """Return the address of the first element, 0 for None."""
    return 0 if x is None else x.data_ptr()


def kept_like(x: Tensor, p: float, part: SequencePart | None = None) -> Tensor:
    """Return a dropout mask with x's shape and strides: zeros with probability p, else ones.

    The mask is drawn from torch's default generator. It is the one that torch draws from the same
    state, but torch draws one number at a time in one thread, which takes 5 ns each; the vectorised
    generator takes a tenth of that. With a `part`, x is a part of contiguous sequences; numbers of
    other parts are passed over, which is faster than to draw them.
    """
    if torch.compiler.is_compiling() or not draws_as_torch():
        if part is not None:
            return part.of(x.new_empty(part.whole(x)).bernoulli_(1.0 - p))
        return torch.empty_like(x).bernoulli_(1.0 - p)
    rows, length, ranges = 1, x.numel(), [(0, x.numel())]
    mask = torch.empty_like(x)
    if part is not None:
        mask, columns = x.new_empty(x.shape), x.shape[-1]
        rows, length = x.shape[:-2].numel(), part.length * columns
        ranges = [(start * columns, stop * columns) for start, stop in part.ranges]
    state = torch.get_rng_state()
    _kernels.bernoulli(
        state.data_ptr(), 1.0 - p, mask.data_ptr(), rows, length, ranges, is_half(mask)
    )
    torch.set_rng_state(state)
    return mask


@cache
def draws_as_torch() -> bool:
    """Return True if torch uses this generator here; on Intel's CPUs it uses MKL's instead."""
    before = torch.get_rng_state()
    torch.rand(3)
    state = torch.get_rng_state()
    expected, drawn = torch.empty(_SAMPLE).bernoulli_(0.7), torch.empty(_SAMPLE)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    _kernels.bernoulli(state.data_ptr(), 0.7, drawn.data_ptr(), 1, _SAMPLE, [(0, _SAMPLE)], False)
    return torch.equal(expected, drawn) and torch.equal(state, after)
