"""What can compute an operation, and where."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Generic, TypeVar

import torch

F = TypeVar("F")


@dataclass(frozen=True)
class Setting:
    """What a choice depends on."""

    device: torch.device
    dtype: torch.dtype
    """In which the model computes."""
    compiled: bool = False
    """Whether layers go through `torch.compile`, which fuses plain torch by itself."""


@dataclass(frozen=True)
class Implementation(Generic[F]):
    """One way to compute an operation."""

    name: str
    """As the log and the run's record show it."""
    load: Callable[[], F]
    """Imports what it needs and returns the callable."""
    usable: Callable[[Setting], bool]
    """Whether it runs in a setting and is the better choice there than those that follow it."""


def first_usable(implementations: Sequence[Implementation[F]], setting: Setting) -> tuple[str, F]:
    """Name and callable of the first implementation that is usable; the last one always is."""
    for implementation in implementations:
        if implementation.usable(setting):
            return implementation.name, implementation.load()
    raise AssertionError("the last implementation of an operation is usable everywhere")


def everywhere(setting: Setting) -> bool:
    """Usable in any setting."""
    return True


def cpp_runs(setting: Setting) -> bool:
    """Whether the C++ kernels of `megacore.kernels.cpu` compute in a setting."""
    if setting.device.type != "cpu":
        return False
    from megacore.kernels.cpu import common

    return common.runs(setting.dtype)


def cpp_runs_uncompiled(setting: Setting) -> bool:
    """The same outside of torch.compile.

    That draws by itself and makes sums a part of what stands around them.
    """
    return cpp_runs(setting) and not setting.compiled


@cache
def has_apex(module: str) -> bool:
    """Whether a module of NVIDIA apex can be imported.

    Which were built differs between installations.

    `scripts/install_apex.sh` builds them from NVIDIA's source. On PyPI `apex` is another package,
    which has none.
    """
    try:
        import_module(module)
    except (ImportError, OSError):
        return False
    return True
