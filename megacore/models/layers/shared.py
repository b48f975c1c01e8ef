"""What all layers of a stack have in common for one micro batch; it is made once."""

from dataclasses import dataclass

from torch import Tensor

from megacore.models.layers.cache import KeyValueCache


@dataclass(frozen=True)
class Shared:
    """Masks, positions and memories."""

    bias: Tensor | None = None
    """[b or 1, n/t or 1, s, keys], added to the scores of self-attention, -inf where a token does not see another;
    None: a decoder's tokens see all before them, an encoder's see all."""
    rotary: tuple[Tensor, Tensor] | None = None
    """Cosines and sines [b or 1, 1, s, rotary_dim] by which queries and keys are rotated."""
    memory: Tensor | None = None
    """What a decoder's layers look at besides: the encoder's output [b, s_e, h], or this rank's part of it."""
    memory_bias: Tensor | None = None
    """[b, 1, 1, s_e], added to the scores of cross attention."""
    cache: KeyValueCache | None = None
    """Of a model that generates."""
