"""Registration of C++ kernels as operators of torch, which `torch.compile` can put into its graphs."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_LIBRARY = torch.library.Library("megacore", "FRAGMENT")  # type: ignore[no-untyped-call]

F = TypeVar("F", bound=Callable[..., Any])


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[F], F]:
    """Make a function the CPU kernel of `torch.ops.megacore.<name>`.

    Args:
        schema: as "name(Tensor x, float scale) -> Tensor", with aliases of what is changed in place as "Tensor(a!) x".
        fake: the same arguments to outputs of the right shape, type and strides without values.
    """
    name = schema.partition("(")[0]

    def register(function: F) -> F:
        _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, function, "CPU")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"megacore::{name}", fake, lib=_LIBRARY)
        return function

    return register
