"""What kernels of contiguous rows need of tensors."""

import torch
from torch import Tensor

from megacore.errors import ConfigError


def rows_of(x: Tensor) -> Tensor:
    """[..., columns] -> [rows, columns] with columns that lie together; a view where the strides allow one."""
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
            raise ConfigError(f"The C++ kernels take tensors of one type, not {dtype} together with {other.dtype}.")
    if dtype == torch.bfloat16:
        return True
    if dtype == torch.float32:
        return False
    raise ConfigError(f"The C++ kernels compute in bf16 and fp32, not in {dtype}.")


def check_shapes(x: Tensor, *others: Tensor | None) -> None:
    """Raise ConfigError unless all have the shape of x: kernels read as many rows and columns of each."""
    for other in others:
        if other is not None and other.shape != x.shape:
            raise ConfigError(
                f"The C++ kernels take tensors of one shape, not {[*x.shape]} together with {[*other.shape]}."
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
            f"The C++ kernels take one number for each of the {x.shape[-1]} columns of {[*x.shape]}, "
            f"not {[*values.shape]}."
        )
    return values.contiguous()


def address(x: Tensor | None) -> int:
    """Where it lies; 0 is nowhere."""
    return 0 if x is None else x.data_ptr()
