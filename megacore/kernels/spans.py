"""The keys that each query sees, as one interval per query: masks in memory O(s).

Causal masks, documents, sliding windows, padding at an end and their intersections are of this
kind, also for some queries of a longer sequence.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spans:
    """First and last visible key of each query, both inclusive.

    A query whose last key is before its first one sees nothing: its output and gradient are 0.
    """

    first: Tensor
    """First visible key of each query, int32 [b or 1, s]; [b or 1, 1] if all queries see the
    same."""
    last: Tensor
    """Last visible key of each query, of the same shape."""

    @classmethod
    def of(
        cls,
        queries: int,
        keys: int,
        *,
        causal: bool,
        device: torch.device,
        documents: Tensor | None = None,
        present: Tensor | None = None,
        window: int | None = None,
    ) -> Self:
        """Return the spans of the last `queries` of `keys` tokens.

        Nothing here waits for a GPU.

        Args:
            queries: number of query tokens.
            keys: number of key tokens.
            causal: a token sees only itself and previous tokens.
            device: device of the result.
            documents: document numbers [b, keys], never decreasing; a token sees only its own
                document.
            present: bool mask [b, keys]; False is padding, which no token sees. It is only at the
                ends of a sequence.
            window: number of tokens back that a token sees, including itself.
        """
        every = torch.arange(keys, dtype=torch.int32, device=device)[None]
        place = every[:, keys - queries :]
        first, last = every[:, :1], every[:, -1:]
        if causal:
            last = place
        if window is not None:
            first = (place - (window - 1)).clamp(min=0)
        if documents is not None:
            documents = documents.contiguous()
            own = documents[:, keys - queries :].contiguous()
            begin = torch.searchsorted(documents, own, out_int32=True)
            end = torch.searchsorted(documents, own, out_int32=True, right=True)
            first, last = torch.maximum(first, begin), torch.minimum(last, end - 1)
        if present is not None:
            begin = torch.where(present, every, keys).amin(1, keepdim=True)
            end = torch.where(present, every, -1).amax(1, keepdim=True)
            # Only kernels of CPUs take spans from masks of padding, so this waits for no GPU.
            assert present.device.type != "cpu" or torch.equal(
                present.sum(1, keepdim=True), (end - begin + 1).clamp(min=0).long()
            ), "padding between tokens cannot be a span"
            first, last = torch.maximum(first, begin), torch.minimum(last, end)
        both = first + last
        return cls(first.expand_as(both).contiguous(), last.expand_as(both).contiguous())

    def at(self, positions: Tensor) -> "Spans":
        """Return the spans of the queries with the indices `positions`, of the same keys."""
        if self.first.shape[1] == 1:
            return self
        return Spans(self.first.index_select(1, positions), self.last.index_select(1, positions))

    def bias(self, keys: int, dtype: torch.dtype) -> Tensor:
        """Return the additive bias [b or 1, 1, s or 1, keys]: 0 at visible keys, otherwise -inf.

        For a query that sees nothing it is 0: its softmax would be NaN. `hide` completes it.
        """
        key = torch.arange(keys, dtype=torch.int32, device=self.first.device)
        first, last = self.first[:, None, :, None], self.last[:, None, :, None]
        hidden = ((key < first) | (key > last)) & (first <= last)
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
            hidden, -torch.inf
        )

    def hide(self, output: Tensor) -> Tensor:
        """Return attention's output [b, n, s, d] with 0 for the queries that see nothing."""
        return output.masked_fill((self.last < self.first)[:, None, :, None], 0)
