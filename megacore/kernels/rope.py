"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

It is on halves of a head, as GPT-NeoX and Llama have it.
"""

from typing import Protocol

import torch
from torch import Tensor

from megacore.kernels.implementation import Implementation, cpp_runs, everywhere


class Rotate(Protocol):
    """Rotates heads by the angles of their positions."""

    def __call__(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate the first elements of each head: [b, n, s, d] -> [b, n, s, d]."""
        ...


def reference(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """See `Rotate`."""
    cosines, sines = rotary
    size = cosines.shape[-1]
    turned, rest = (x, None) if size == x.shape[-1] else x.tensor_split((size,), -1)
    first, second = turned.chunk(2, -1)
    turned = turned * cosines + torch.cat([-second, first], -1) * sines
    return turned if rest is None else torch.cat([turned, rest], -1)


def _load_cpp() -> Rotate:
    from megacore.kernels.cpu import rope

    return rope.rotate


IMPLEMENTATIONS = (
    Implementation[Rotate]("C++ with AVX-512", _load_cpp, cpp_runs),
    Implementation[Rotate]("torch", lambda: reference, everywhere),
)
