"""Cross entropy in C++ with a gradient that replaces the logits.

Logits are bf16 or fp32; the kernels compute in fp32. All functions take logits [n, w] with
contiguous rows, w being the width of this rank's part of the vocabulary, and labels as columns of
that part, int64 [n]. A NaN among the logits makes its row's statistics, loss and gradient NaN.
Logits of -inf, as for padding, count as e^-inf = 0.
"""

import torch
from torch import Tensor

from megacore.errors import ConfigError
from megacore.kernels.cpu import _kernels
from megacore.kernels.cpu.common import operator


def label_statistics(logits: Tensor, columns: Tensor, with_sum: bool = False) -> Tensor:
    """Compute the statistics, fp32 [3 or 4, n], see `megacore.kernels.cross_entropy.Statistics`.

    A column outside 0 … w - 1 is a label on another rank.
    """
    statistics: Tensor = torch.ops.megacore.label_statistics(logits, columns, with_sum)
    return statistics


def softmax_gradient_(
    logits: Tensor,
    columns: Tensor,
    log_normaliser: Tensor,
    factor: Tensor | None = None,
    label_weight: float = 1.0,
    evenly: float = 0.0,
) -> None:
    """Replace logits by the gradient, see `megacore.kernels.cross_entropy.GradientInPlace`.

    A column outside 0 … w - 1 is a label on another rank. `log_normaliser` and `factor` are fp32.
    """
    torch.ops.megacore.softmax_gradient_(
        logits, columns, log_normaliser, factor, label_weight, evenly
    )


def cross_entropy_(
    logits: Tensor,
    columns: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    scale: float = 1.0,
) -> Tensor:
    """Return the losses, fp32 [n], and replace the logits by their gradient.

    See `megacore.kernels.cross_entropy.LossInPlace`. The gradient of a row is
    (1 + 2 z logsumexp) softmax - (1 - ε) onehot - ε / w. A label outside 0 … w - 1 makes the row's
    loss and gradient NaN. Each row is processed while it is in the cache.
    """
    losses: Tensor = torch.ops.megacore.cross_entropy_(
        logits, columns, label_smoothing, z_loss, scale
    )
    return losses


def _rows(logits: Tensor, columns: Tensor) -> tuple[int, bool, int, int, int, int]:
    """Return logits and labels as arguments of the C++ functions."""
    half = logits.dtype is torch.bfloat16
    if not (half or logits.dtype is torch.float32) or logits.dim() != 2 or logits.stride(1) != 1:
        raise ConfigError(
            "The C++ cross entropy takes logits [n, w] in bf16 or fp32 with contiguous rows, "
            f"not {tuple(logits.shape)} in {logits.dtype} with strides {logits.stride()}."
        )
    if (
        columns.dtype is not torch.int64
        or not columns.is_contiguous()
        or columns.numel() != logits.shape[0]
    ):
        raise ConfigError(
            f"The C++ cross entropy takes the labels of {logits.shape[0]} rows as contiguous "
            f"int64, not {tuple(columns.shape)} in {columns.dtype}."
        )
    return (
        logits.data_ptr(),
        half,
        logits.shape[0],
        logits.shape[1],
        logits.stride(0),
        columns.data_ptr(),
    )


def _address(values: Tensor, count: int) -> int:
    """Return the address of a tensor with one fp32 number per row."""
    if values.dtype is not torch.float32 or not values.is_contiguous() or values.numel() != count:
        raise ConfigError(
            f"The C++ cross entropy takes log_normaliser and factor as {count} contiguous fp32 "
            f"numbers, not {tuple(values.shape)} in {values.dtype}."
        )
    return values.data_ptr()


def _new_statistics(logits: Tensor, with_sum: bool) -> Tensor:
    return torch.empty(
        4 if with_sum else 3, logits.shape[0], dtype=torch.float32, device=logits.device
    )


@operator(
    "label_statistics(Tensor logits, Tensor columns, bool with_sum) -> Tensor",
    lambda logits, columns, with_sum: _new_statistics(logits, with_sum),
)
def _label_statistics(logits: Tensor, columns: Tensor, with_sum: bool) -> Tensor:
    statistics = _new_statistics(logits, with_sum)
    _kernels.label_statistics(
        *_rows(logits, columns), with_sum, statistics.data_ptr(), torch.get_num_threads()
    )
    return statistics


@operator(
    "softmax_gradient_(Tensor(a!) logits, Tensor columns, Tensor log_normaliser, Tensor? factor, "
    "float label_weight, float evenly) -> ()",
    lambda *arguments: None,
)
def _softmax_gradient_(
    logits: Tensor,
    columns: Tensor,
    log_normaliser: Tensor,
    factor: Tensor | None,
    label_weight: float,
    evenly: float,
) -> None:
    _kernels.softmax_gradient(
        *_rows(logits, columns),
        _address(log_normaliser, logits.shape[0]),
        0 if factor is None else _address(factor, logits.shape[0]),
        label_weight,
        evenly,
        torch.get_num_threads(),
    )


@operator(
    "cross_entropy_(Tensor(a!) logits, Tensor columns, float smoothing, float z_loss, float scale) "
    "-> Tensor",
    lambda logits, columns, *options: torch.empty_like(columns, dtype=torch.float32),
)
def _cross_entropy_(
    logits: Tensor, columns: Tensor, smoothing: float, z_loss: float, scale: float
) -> Tensor:
    losses = torch.empty_like(columns, dtype=torch.float32)
    _kernels.cross_entropy(
        *_rows(logits, columns),
        smoothing,
        z_loss,
        scale,
        losses.data_ptr(),
        torch.get_num_threads(),
    )
    return losses
