"""Choice of the implementation of each operation, made and logged at the start of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from megacore.config.train import KernelsConfig
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
from megacore.kernels.implementation import Implementation, MaskForm, Setting, first_usable
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
"""Implementations of each operation in order of preference; the last one is plain torch."""
_CHOSEN_TOGETHER: dict[str, tuple[str, ...]] = {
    "attention": ("attention", "packed_attention"),
    "norm": ("layer_norm", "rms_norm"),
    "activation": ("bias_activation", "gated"),
    "rope": ("rotate",),
    "dropout": ("dropout", "bias_dropout_add"),
    "cross_entropy": ("cross_entropy",),
    "weight_gradient": ("weight_gradient",),
    "adamw": ("optimizer",),
    "sum_of_squares": ("sum_of_squares",),
}
"""Operations to which each name in `train.kernels` applies."""


@dataclass(frozen=True)
class Kernels:
    """The chosen callable of each operation."""

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
    masks: MaskForm
    """Form of the masks that attention takes, where it has neither bias nor dropout."""
    names: Mapping[str, str]
    """Name of each operation's implementation, as in the log and the run's record."""


def choose_kernels(setting: Setting, *, config: KernelsConfig | None = None) -> Kernels:
    """Choose the configured implementation of each operation, for auto the first usable one.

    Args:
        setting: properties of the run.
        config: value of `train.kernels`; None means auto for every operation.

    Raises:
        ConfigError: a configured implementation cannot run, or the C++ module is missing.
    """
    config = config or KernelsConfig()
    try:
        chosen = {
            operation: _choose(name, getattr(config, name), operation, setting)
            for name, operations in _CHOSEN_TOGETHER.items()
            for operation in operations
        }
    except ImportError as error:
        raise ConfigError(
            f"a kernel cannot be loaded ({error}): install megacore again, which compiles its C++ "
            "kernels, or set train.kernels to plain"
        ) from error
    names = {operation: chosen[operation][0] for operation in _OPERATIONS}
    return _kernels(names, **{operation: function for operation, (_, function) in chosen.items()})


def _choose(name: str, option: str, operation: str, setting: Setting) -> tuple[str, Any]:
    """Return name and callable of an operation's implementation.

    Args:
        name: name in `train.kernels`.
        option: its value.
        operation: one of the operations to which it applies.
        setting: properties of the run.

    Raises:
        ConfigError: no implementation of this option runs in the setting.
    """
    implementations: tuple[Implementation[Any], ...] = _OPERATIONS[operation]
    if option == "auto":
        return first_usable(implementations, setting)
    obstacles: list[str] = []
    for implementation in implementations:
        if implementation.option == option:
            obstacle = implementation.obstacle(setting)
            if obstacle is None:
                return implementation.name, implementation.load()
            obstacles.append(obstacle)
    raise ConfigError(
        f"train.kernels.{name} is {option}, which cannot run here: {obstacles[-1]}; give auto or "
        "plain, or remove it"
    )


@cache
def plain_kernels() -> Kernels:
    """Return plain torch for every operation, on any device and in any type."""
    last = {operation: implementations[-1] for operation, implementations in _OPERATIONS.items()}
    return _kernels(
        {operation: implementation.name for operation, implementation in last.items()},
        **{operation: implementation.load() for operation, implementation in last.items()},
    )


def _kernels(names: dict[str, str], **callables: Any) -> Kernels:
    forms = {each.name: each.masks for each in attention.IMPLEMENTATIONS}
    return Kernels(masks=forms[names["attention"]], names=MappingProxyType(names), **callables)


def summary(names: Mapping[str, str]) -> str:
    """Return the operations of each implementation: `torch: layer_norm, rotate; C++: attention`."""
    operations: dict[str, list[str]] = {}
    for operation, name in names.items():
        operations.setdefault(name, []).append(operation)
    return "; ".join(f"{name}: {', '.join(uses)}" for name, uses in operations.items())
