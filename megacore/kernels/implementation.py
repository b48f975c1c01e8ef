"""Implementations of an operation, and conditions for their use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Generic, TypeVar

import torch

F = TypeVar("F")


@dataclass(frozen=True)
class Setting:
    """Properties of a run that determine the choice of an implementation."""

    device: torch.device
    dtype: torch.dtype
    """Type in which the model computes."""
    compiled: bool = False
    """True if layers go through `torch.compile`, which fuses plain torch without further help."""


@dataclass(frozen=True)
class Implementation(Generic[F]):
    """One implementation of an operation."""

    name: str
    """Name in the log and in the run's record."""
    load: Callable[[], F]
    """Function that imports the requirements and returns the callable."""
    usable: Callable[[Setting], bool]
    """Function that returns True if the implementation runs in a setting and is better there than
    the ones after it."""


def first_usable(implementations: Sequence[Implementation[F]], setting: Setting) -> tuple[str, F]:
    """Return name and callable of the first usable implementation; the last always is usable."""
    for implementation in implementations:
        if implementation.usable(setting):
            return implementation.name, implementation.load()
    raise AssertionError("the last implementation of an operation is usable everywhere")


def everywhere(setting: Setting) -> bool:
    """Return True: usable in any setting."""
    return True


def cpp_runs(setting: Setting) -> bool:
    """Return True if the C++ kernels of `megacore.kernels.cpu` run in a setting."""
    if setting.device.type != "cpu":
        return False
    from megacore.kernels.cpu import common

    return common.runs(setting.dtype)


def cpp_runs_uncompiled(setting: Setting) -> bool:
    """Return True if the C++ kernels run in a setting without torch.compile.

    torch.compile draws random numbers its own way, and fuses sums with neighbouring operations.
    """
    return cpp_runs(setting) and not setting.compiled


@cache
def has_apex(module: str) -> bool:
    """Return True if a module of NVIDIA apex can be imported.

    Installations differ in the modules that were built. `scripts/install_apex.sh` builds them from
    NVIDIA's source. On PyPI `apex` is another package without these modules.
    """
    try:
        import_module(module)
    except (ImportError, OSError):
        return False
    return True
