"""What the kernels share.

Where they run, how torch knows them, what they need of tensors, and dropout's mask.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch  # first: the kernels use the OpenMP library that it brings
from torch import Tensor

from megacore.errors import ConfigError
from megacore.kernels.cpu import _kernels

_LIBRARY = torch.library.Library("megacore", "FRAGMENT")  # type: ignore[no-untyped-call]
_SAMPLE = 4001
"""Numbers by which two generators are compared: of several blocks, and not of a whole number of
them."""

F = TypeVar("F", bound=Callable[..., Any])


@cache
def runs_fp32() -> bool:
    """Whether the CPU has AVX-512 (F, BW, DQ, VL) and FMA."""
    return _kernels.runs_fp32()


@cache
def runs_bf16() -> bool:
    """Whether it has AVX512-BF16 besides."""
    return _kernels.runs_bf16()


def runs(dtype: torch.dtype) -> bool:
    """Whether the kernels compute in `dtype` here."""
    return {torch.float32: runs_fp32, torch.bfloat16: runs_bf16}.get(dtype, lambda: False)()


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[F], F]:
    """Make a function the CPU kernel of `torch.ops.megacore.<name>`.

    Args:
        schema: as "name(Tensor x, float scale) -> Tensor", with aliases of what is changed in place
            as "Tensor(a!) x".
        fake: the same arguments to outputs of the right shape, type and strides without values.
    """
    name = schema.partition("(")[0]

    def register(function: F) -> F:
        _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, function, "CPU")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"megacore::{name}", fake, lib=_LIBRARY)
        return function

    return register


def rows_of(x: Tensor) -> Tensor:
    """[..., columns] -> [rows, columns] with dense columns; a view where strides allow one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def is_half(x: Tensor, *others: Tensor | None) -> bool:
    """Whether all of them are bf16; else all are fp32.

    Raises:
        ConfigError: they are neither, or not the same.
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
    """Raise ConfigError unless all have the shape of x.

    Kernels read as many rows and columns of each.
    """
    for other in others:
        if other is not None and other.shape != x.shape:
            raise ConfigError(
                f"The C++ kernels take tensors of one shape, not {[*x.shape]} together with "
                f"{[*other.shape]}."
            )


def per_column(values: Tensor | None, x: Tensor) -> Tensor | None:
    """A weight or a bias with a number for each of x's columns, contiguous.

    Raises:
        ConfigError: it has more or fewer.
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
    """Where it lies; 0 is nowhere."""
    return 0 if x is None else x.data_ptr()


def kept_like(x: Tensor, p: float) -> Tensor:
    """Ones, and zeros with probability p, in a tensor that is dense like x.

    They are drawn from torch's default generator.

    From the same state of the generator torch drops the same elements, but draws one number at a
    time in one thread, 5 ns for each; vectors of the same generator take a tenth of it.
    """
    kept = torch.empty_like(x)
    if torch.compiler.is_compiling() or not draws_as_torch():
        return kept.bernoulli_(1.0 - p)
    state = torch.get_rng_state()
    _kernels.bernoulli(state.data_ptr(), 1.0 - p, kept.data_ptr(), kept.numel(), is_half(kept))
    torch.set_rng_state(state)
    return kept


@cache
def draws_as_torch() -> bool:
    """Whether torch draws with this generator here; on Intel's CPUs it has MKL's instead."""
    before = torch.get_rng_state()
    torch.rand(3)
    state = torch.get_rng_state()
    expected, found = torch.empty(_SAMPLE).bernoulli_(0.7), torch.empty(_SAMPLE)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    _kernels.bernoulli(state.data_ptr(), 0.7, found.data_ptr(), _SAMPLE, False)
    return torch.equal(expected, found) and torch.equal(state, after)
