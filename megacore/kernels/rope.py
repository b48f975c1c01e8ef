"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

It pairs the halves of a head, as in GPT-NeoX and Llama.
"""

from typing import Protocol

import torch
from torch import Tensor

from megacore.kernels.implementation import Implementation, cpp_obstacle, everywhere


class Rotate(Protocol):
    """Interface of the rotation of heads by the angles of their positions."""

    def __call__(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate the first elements of each head: [b, n, s, d] -> [b, n, s, d]."""
        ...


def reference(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate with torch, see `Rotate`."""
    cosines, sines = rotary
    size = cosines.shape[-1]
    rotated, rest = (x, None) if size == x.shape[-1] else x.tensor_split((size,), -1)
    first, second = rotated.chunk(2, -1)
    rotated = rotated * cosines + torch.cat([-second, first], -1) * sines
    return rotated if rest is None else torch.cat([rotated, rest], -1)


def _load_cpp() -> Rotate:
    from megacore.kernels.cpu import rope

    return rope.rotate


IMPLEMENTATIONS = (
    Implementation[Rotate]("cpp", "C++ with AVX-512", _load_cpp, cpp_obstacle),
    Implementation[Rotate]("plain", "torch", lambda: reference, everywhere),
)
