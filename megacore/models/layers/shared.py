"""Parts that the layers of a model share: their setup, and the values of one micro batch.

For generation the latter include the cache of keys and values.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.kernels.choice import Kernels
from megacore.kernels.spans import Spans
from megacore.parallel.mesh import SINGLE_RANK, ParallelGroup


@dataclass(frozen=True)
class LayerSetup:
    """Kernels, ranks and device that the layers of a model are built with."""

    kernels: Kernels
    tp: ParallelGroup = SINGLE_RANK
    """Ranks that share each layer."""
    sequence_parallel: bool = False
    """True if the activations between layers are this rank's part of the sequence."""
    device: torch.device | str = "cpu"
    """Device of the parameters."""


class KeyValueCache:
    """Keys and values of every layer of one model, for sequences of equal length.

    Each layer's forward pass appends to it; then `advance` moves on to the next tokens. A decoder
    with cross attention also keeps the keys and values of the encoder's output.
    """

    def __init__(self, max_length: int) -> None:
        """Set the capacity to `max_length` tokens per sequence.

        Memory is allocated when a layer first appends.
        """
        self.max_length = max_length
        self.length = 0
        """Number of tokens that all layers have appended."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, number: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append a layer's keys and values of new tokens, [b, g/t, s, d] each.

        Return those of all tokens, as views.
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

    def memory(
        self, number: int, project: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values of the encoder's output, [b, n/t, s_e, d] each.

        The layer's first call computes them with `project`.
        """
        if number not in self._memory:
            self._memory[number] = project()
        return self._memory[number]

    def advance(self, tokens: int) -> None:
        """Count `tokens` more tokens, which every layer has appended."""
        self.length += tokens

    def keep(self, rows: Tensor) -> None:
        """Keep only the sequences with the indices `rows`, in this order."""
        self._layers, self._memory = (
            {
                number: (keys.index_select(0, rows), values.index_select(0, rows))
                for number, (keys, values) in pairs.items()
            }
            for pairs in (self._layers, self._memory)
        )

    @property
    def bytes(self) -> int:
        """Memory allocated so far, in bytes."""
        pairs = (*self._layers.values(), *self._memory.values())
        return sum(part.numel() * part.element_size() for pair in pairs for part in pair)


def positions_of(length: int, new: int, device: torch.device) -> Tensor:
    """Return the positions [1, new] of `new` tokens after `length` others."""
    return torch.arange(length, length + new, device=device).unsqueeze(0)


@dataclass(frozen=True)
class Shared:
    """Masks, positions, encoder output and cache that the layers share."""

    bias: Tensor | None = None
    """Bias [b or 1, n/t or 1, s, keys] of self-attention scores, -inf where a token does not see
    another. None means that a token sees all tokens, in a decoder only itself and previous ones."""
    spans: Spans | None = None
    """Keys that each token sees in self-attention, if the bias does not hide the others."""
    rotary: tuple[Tensor, Tensor] | None = None
    """Cosines and sines [b or 1, 1, s, rotary_dim] of the rotation of queries and keys."""
    memory: Tensor | None = None
    """Encoder output [b, s_e, h] that a decoder's layers attend to, or this rank's part of it."""
    memory_masks: "Shared | None" = None
    """Values for cross attention: bias [b, 1, 1, s_e] or spans."""
    cache: KeyValueCache | None = None
    """Cache of keys and values, for generation."""
    cp: ParallelGroup = SINGLE_RANK
    """Ranks that have the other keys and values of self-attention."""
    windowed: "Shared | None" = None
    """Values for the layers with a sliding window, in a model in which not all layers have it."""
