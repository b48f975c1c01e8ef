"""Dropout (Srivastava et al. 2014) in training, also fused with bias and residual.

The latter is residual + dropout(branch + bias), as in Megatron-LM's bias_dropout_add. Both use
torch's generator. A tensor with a part of a sequence drops the elements that the whole would drop
there: the numbers of the whole are drawn.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megacore.kernels.implementation import Implementation, cpp_obstacle_uncompiled, everywhere


@dataclass(frozen=True)
class SequencePart:
    """Part of the sequences [..., s, h] whose numbers are drawn that a tensor [..., s/n, h] has."""

    length: int
    """Tokens of a whole sequence (s)."""
    ranges: tuple[tuple[int, int], ...]
    """First position of each consecutive part and the one after its last, in ascending order."""

    def whole(self, x: Tensor) -> tuple[int, ...]:
        """Return the shape [..., s, h] of whole sequences, of which `x` is a part."""
        return (*x.shape[:-2], self.length, x.shape[-1])

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of whole sequences: [..., s, h] to [..., s/n, h]."""
        return torch.cat([whole[..., start:stop, :] for start, stop in self.ranges], -2)


class Dropout(Protocol):
    """Interface of dropout."""

    def __call__(self, x: Tensor, p: float, part: SequencePart | None = None) -> Tensor:
        """Return 0 with probability p, 0 < p < 1, else x / (1 - p); for any shape.

        With a `part`, x is [..., s/n, h].
        """
        ...


class BiasDropoutAdd(Protocol):
    """Interface of residual + dropout(branch + bias)."""

    def __call__(
        self,
        branch: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        p: float,
        part: SequencePart | None = None,
    ) -> Tensor:
        """Map branch and residual [..., h] to [..., h]; p = 0 drops nothing."""
        ...


def dropout(x: Tensor, p: float, part: SequencePart | None = None) -> Tensor:
    """Apply torch's dropout, see `Dropout`."""
    if part is None:
        return F.dropout(x, p)
    # On GPUs the numbers depend on the number of elements and on their type.
    kept = torch.native_dropout(x.new_empty(part.whole(x)), p, True)[1]
    return x * part.of(kept) * (1.0 / (1.0 - p))


def bias_dropout_add(
    branch: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float,
    part: SequencePart | None = None,
) -> Tensor:
    """Compute residual + dropout(branch + bias) with torch, see `BiasDropoutAdd`."""
    if bias is not None:
        branch = branch + bias
    return residual + (dropout(branch, p, part) if p else branch)


def _load_cpp_dropout() -> Dropout:
    from megacore.kernels.cpu import residual

    return residual.dropout


def _load_cpp_bias_dropout_add() -> BiasDropoutAdd:
    from megacore.kernels.cpu import residual

    return residual.bias_dropout_add


DROPOUT = (
    Implementation[Dropout]("cpp", "C++ with AVX-512", _load_cpp_dropout, cpp_obstacle_uncompiled),
    Implementation[Dropout]("plain", "torch", lambda: dropout, everywhere),
)
BIAS_DROPOUT_ADD = (
    Implementation[BiasDropoutAdd](
        "cpp", "C++ with AVX-512", _load_cpp_bias_dropout_add, cpp_obstacle_uncompiled
    ),
    Implementation[BiasDropoutAdd]("plain", "torch", lambda: bias_dropout_add, everywhere),
)
