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


def address(x: Tensor | None) -> int:
    """Where it lies; 0 is nowhere."""
    return 0 if x is None else x.data_ptr()
