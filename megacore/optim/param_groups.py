"""Which parameters weight decay applies to."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that share their hyperparameters."""

    names: tuple[str, ...]
    """Global names."""
    decays: bool
    """Whether weight decay applies to them."""


def has_weight_decay(name: str, parameter: Tensor) -> bool:
    """Whether a parameter decays: biases and the gains of layer norms (all vectors) do not, as in Megatron-LM.

    `parameter` is the model's, whole or a tensor-parallel part; a flattened piece of it has lost what decides.
    """
    return parameter.dim() > 1 and not name.endswith(".bias")


def param_groups(named_parameters: Iterable[tuple[str, Tensor]]) -> tuple[ParamGroup, ...]:
    """Divide parameters into those that decay and those that do not; empty groups are left out."""
    decayed: list[str] = []
    undecayed: list[str] = []
    for name, parameter in named_parameters:
        (decayed if has_weight_decay(name, parameter) else undecayed).append(name)
    groups = (ParamGroup(tuple(decayed), decays=True), ParamGroup(tuple(undecayed), decays=False))
    return tuple(group for group in groups if group.names)
