"""Implementations of an operation, conditions for their use, and their names in torch's graphs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Generic, Literal, TypeVar

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Type of a computation by its name in `train.precision`."""
F = TypeVar("F")
Function = TypeVar("Function", bound=Callable[..., Any])
_LIBRARY = torch.library.Library("megacore", "FRAGMENT")  # type: ignore[no-untyped-call]


MaskForm = Literal["dense", "spans", "blocks"]
"""Form of a mask of attention: a bias, `Spans`, or spans with blocks, which may have ALiBi's
slopes."""


@dataclass(frozen=True)
class Setting:
    """Properties of a run that determine the choice of an implementation."""

    device: torch.device
    dtype: torch.dtype
    """Type in which the model computes."""
    compiled: bool = False
    """True if layers go through `torch.compile`, which fuses plain torch without further help."""
    softcapped: bool = False
    """True if the attention scores have a soft cap."""
    masked: bool = False
    """True if attention has a mask or bias that its fused kernels on GPUs lack."""
    flex_failure: str | None = None
    """Reason why FlexAttention cannot compute the model's attention, None if it can."""


@dataclass(frozen=True)
class Implementation(Generic[F]):
    """One implementation of an operation."""

    option: str
    """Value of the operation in `train.kernels`."""
    name: str
    """Name in the log and in the run's record."""
    load: Callable[[], F]
    """Function that imports the requirements and returns the callable."""
    obstacle: Callable[[Setting], str | None]
    """Function that returns why the implementation cannot run in a setting, None if it can."""
    preferred: Callable[[Setting], bool] = lambda setting: True
    """Function that returns True if the implementation, where it runs, is better than the ones
    after it."""
    masks: MaskForm = "dense"
    """Form of the masks that attention takes, where it has neither bias nor dropout."""

    def usable(self, setting: Setting) -> bool:
        """Return True if the automatic choice may take this implementation in a setting."""
        return self.preferred(setting) and self.obstacle(setting) is None


def first_usable(implementations: Sequence[Implementation[F]], setting: Setting) -> tuple[str, F]:
    """Return name and callable of the first usable implementation; the last always is usable."""
    for implementation in implementations:
        if implementation.usable(setting):
            return implementation.name, implementation.load()
    raise AssertionError("the last implementation of an operation is usable everywhere")


def everywhere(setting: Setting) -> str | None:
    """Return None: there is no obstacle in any setting."""
    return None


def cpp_obstacle(setting: Setting) -> str | None:
    """Return why the C++ kernels of `megacore.kernels.cpu` cannot run, None if they can."""
    if setting.device.type != "cpu":
        return f"it runs on CPUs only, and the model is on {setting.device.type}"
    if setting.dtype not in (torch.float32, torch.bfloat16):
        return f"it computes in fp32 and bf16 only, and the model in {_short(setting.dtype)}"
    from megacore.kernels.cpu import common

    if common.runs(setting.dtype):
        return None
    instructions = "AVX512-BF16" if setting.dtype == torch.bfloat16 else "AVX-512"
    return f"this CPU has no {instructions}"


def cpp_obstacle_uncompiled(setting: Setting) -> str | None:
    """Return why C++ kernels with random numbers cannot run, None if they can.

    torch.compile draws random numbers its own way, and fuses sums with neighbouring operations.
    """
    if setting.compiled:
        return "it does not run in layers that torch.compile compiles; set train.compile to off"
    return cpp_obstacle(setting)


def apex_obstacle(setting: Setting, module: str) -> str | None:
    """Return why a module of NVIDIA apex cannot run, None if it can."""
    if setting.device.type != "cuda":
        return f"it runs on NVIDIA GPUs only, and the model is on {setting.device.type}"
    if not has_apex(module):
        return f"apex's module {module} cannot be imported (scripts/install_apex.sh builds it)"
    return None


def half_on_gpu_obstacle(setting: Setting) -> str | None:
    """Return None for a model in half precision on a GPU, otherwise what is different."""
    if setting.device.type != "cuda":
        return f"it runs on GPUs only, and the model is on {setting.device.type}"
    if setting.dtype == torch.float32:
        return "it multiplies in half precision only, and the model computes in fp32"
    return None


def flex_obstacle(setting: Setting) -> str | None:
    """Return why torch's FlexAttention cannot run, None if it can."""
    if setting.device.type != "cuda":
        return f"it runs on GPUs only, and the model is on {setting.device.type}"
    if not setting.compiled:
        return "the layers are not compiled (train.compile), and it would store all scores"
    return setting.flex_failure


def _short(dtype: torch.dtype) -> str:
    """Return the name of a type in messages, such as fp16."""
    return {torch.float16: "fp16", torch.float64: "fp64"}.get(dtype, str(dtype))


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


def operator(
    schema: str, fake: Callable[..., Any], devices: str = "CompositeExplicitAutograd"
) -> Callable[[Function], Function]:
    """Register a function as `torch.ops.megacore.<name>`.

    Its autograd formula, if any, is registered by `differentiable`.

    Args:
        schema: schema such as "name(Tensor x, float scale) -> Tensor", with alias annotations such
            as "Tensor(a!) x" for tensors that are changed in place.
        fake: function from the same arguments to outputs of the right shape, type and strides,
            without values.
        devices: torch's dispatch key, such as "CPU"; the default means every device.
    """
    name = schema.partition("(")[0]

    def register(function: Function) -> Function:
        _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, function, devices)  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"megacore::{name}", fake, lib=_LIBRARY)
        return function

    return register


def differentiable(name: str, backward: Callable[..., Any], save: Callable[..., None]) -> None:
    """Register the autograd formula of an operator, as `torch.library.register_autograd` does."""
    torch.library.register_autograd(f"megacore::{name}", backward, setup_context=save, lib=_LIBRARY)
