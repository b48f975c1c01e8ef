"""What all layers of a stage have in common for one micro batch; it is made once.

Generation adds the keys and values of the tokens that the model has read: each is computed once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values of every layer of one model, for sequences that grow together.

    A forward pass appends to each layer's, and `advance` then moves on to the next tokens.
    """

    def __init__(self, max_length: int) -> None:
        """Room for `max_length` tokens of each sequence.

        Memory is taken when a layer first appends.
        """
        self.max_length = max_length
        self.length = 0
        """Tokens that are complete in all layers."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's keys and values of new tokens, [b, g/t, s, d] each.

        Returns those of all tokens, as views.
        """
        end = self.length + key.shape[2]
        assert end <= self.max_length, f"{end} tokens do not fit the cache of {self.max_length}"
        if number not in self._layers:
            shape = (*key.shape[:2], self.max_length, key.shape[3])
            self._layers[number] = (key.new_empty(shape), value.new_empty(shape))
        keys, values = self._layers[number]
        keys[:, :, self.length : end] = key
        values[:, :, self.length : end] = value
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, tokens: int) -> None:
        """Count `tokens` that every layer has appended."""
        self.length += tokens

    def keep(self, rows: Tensor) -> None:
        """Go on with these sequences alone, in this order; `rows` are their numbers."""
        self._layers = {
            number: (keys.index_select(0, rows), values.index_select(0, rows))
            for number, (keys, values) in self._layers.items()
        }

    @property
    def bytes(self) -> int:
        """Memory taken so far."""
        return sum(
            part.numel() * part.element_size() for pair in self._layers.values() for part in pair
        )


def positions_of(length: int, new: int, device: torch.device) -> Tensor:
    """[1, new]: the positions of `new` tokens after `length` others."""
    return torch.arange(length, length + new, device=device).unsqueeze(0)


@dataclass(frozen=True)
class Shared:
    """Masks, positions and memories."""

    bias: Tensor | None = None
    """[b or 1, n/t or 1, s, keys], added to the scores of self-attention, -inf where a token does
    not see another; None: a decoder's tokens see all before them, an encoder's see all."""
    rotary: tuple[Tensor, Tensor] | None = None
    """Cosines and sines [b or 1, 1, s, rotary_dim] by which queries and keys are rotated."""
    memory: Tensor | None = None
    """What a decoder's layers look at besides: the encoder's output [b, s_e, h], or this rank's
    part of it."""
    memory_bias: Tensor | None = None
    """[b, 1, 1, s_e], added to the scores of cross attention."""
    cache: KeyValueCache | None = None
    """Of a model that generates."""
