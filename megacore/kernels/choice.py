"""Which implementation each operation of a run has.

Chosen when it starts, logged, and passed on to who computes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from megacore.errors import ConfigError
from megacore.kernels import (
    activation,
    adamw,
    attention,
    cross_entropy,
    dropout,
    norm,
    rope,
    sum_of_squares,
    weight_gradient,
)
from megacore.kernels.activation import BiasActivation, Gated
from megacore.kernels.adamw import AdamW
from megacore.kernels.attention import Attention, PackedAttention
from megacore.kernels.cross_entropy import CrossEntropy
from megacore.kernels.dropout import BiasDropoutAdd, Dropout
from megacore.kernels.implementation import Setting, first_usable
from megacore.kernels.norm import LayerNorm, RMSNorm
from megacore.kernels.rope import Rotate
from megacore.kernels.sum_of_squares import SumOfSquares
from megacore.kernels.weight_gradient import WeightGradient

_OPERATIONS: dict[str, Any] = {
    "attention": attention.IMPLEMENTATIONS,
    "packed_attention": attention.PACKED,
    "layer_norm": norm.LAYER_NORM,
    "rms_norm": norm.RMS_NORM,
    "bias_activation": activation.BIAS_ACTIVATION,
    "gated": activation.GATED,
    "rotate": rope.IMPLEMENTATIONS,
    "dropout": dropout.DROPOUT,
    "bias_dropout_add": dropout.BIAS_DROPOUT_ADD,
    "cross_entropy": cross_entropy.IMPLEMENTATIONS,
    "weight_gradient": weight_gradient.IMPLEMENTATIONS,
    "optimizer": adamw.IMPLEMENTATIONS,
    "sum_of_squares": sum_of_squares.IMPLEMENTATIONS,
}
"""Implementations of each, the preferred ones first; the last one is plain torch."""


@dataclass(frozen=True)
class Kernels:
    """The callables of one choice."""

    attention: Attention
    packed_attention: PackedAttention
    layer_norm: LayerNorm
    rms_norm: RMSNorm
    bias_activation: BiasActivation
    gated: Gated
    rotate: Rotate
    dropout: Dropout
    bias_dropout_add: BiasDropoutAdd
    cross_entropy: CrossEntropy
    weight_gradient: WeightGradient
    optimizer: AdamW
    sum_of_squares: SumOfSquares
    names: Mapping[str, str]
    """What computes each operation, as the log and the run's record show it."""


def choose_kernels(device: torch.device, dtype: torch.dtype, *, compiled: bool = False) -> Kernels:
    """The first implementation of each operation that runs here.

    Args:
        device: of the model.
        dtype: in which it computes.
        compiled: whether layers go through `torch.compile`.

    Raises:
        ConfigError: the C++ module is not there.
    """
    setting = Setting(device, dtype, compiled)
    try:
        chosen = {
            operation: first_usable(found, setting) for operation, found in _OPERATIONS.items()
        }
    except ImportError as error:
        raise ConfigError(
            f"A kernel cannot be loaded ({error}): install megacore again, which compiles its C++ "
            "kernels, or set train.kernels to plain."
        ) from error
    names = {operation: name for operation, (name, _) in chosen.items()}
    return _kernels(names, **{operation: function for operation, (_, function) in chosen.items()})


@cache
def plain_kernels() -> Kernels:
    """Plain torch for every operation, on any device and in any type."""
    last = {operation: found[-1] for operation, found in _OPERATIONS.items()}
    return _kernels(
        {operation: found.name for operation, found in last.items()},
        **{operation: found.load() for operation, found in last.items()},
    )


def _kernels(names: dict[str, str], **callables: Any) -> Kernels:
    return Kernels(names=MappingProxyType(names), **callables)


def summary(names: Mapping[str, str]) -> str:
    """The operations of each implementation, as `torch: layer_norm, rotate; C++: attention`."""
    operations: dict[str, list[str]] = {}
    for operation, name in names.items():
        operations.setdefault(name, []).append(operation)
    return "; ".join(f"{name}: {', '.join(found)}" for name, found in operations.items())
