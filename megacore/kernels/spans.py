"""The keys that each query sees, as one interval per query: masks in memory O(s).

Causal masks, documents, sliding windows, padding at an end and their intersections are of this
kind, also for some queries of a longer sequence.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
"""Queries, and keys, of a block in `Spans.blocks`: FlexAttention's default."""


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
    blocks: tuple[Tensor, ...] | None = None
    """Lists of the blocks that a kernel of blocks computes, see `blocked`."""
    slopes: Tensor | None = None
    """ALiBi's slopes [n] that a kernel of blocks adds: the decrease of a head's scores per token of
    distance. The queries are then the last of the keys."""

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
            query_documents = documents[:, keys - queries :].contiguous()
            begin = torch.searchsorted(documents, query_documents, out_int32=True)
            end = torch.searchsorted(documents, query_documents, out_int32=True, right=True)
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
        """Return the spans of the queries with the indices `positions`, without blocks."""
        if self.first.shape[1] == 1:
            return self
        return Spans(self.first.index_select(1, positions), self.last.index_select(1, positions))

    def blocked(self, queries: int, keys: int, slopes: Tensor | None = None) -> "Spans":
        """Return the same spans, one for each query, with lists of blocks, in the device's memory.

        A block has `BLOCK` queries and keys. It is skipped if no query sees a key, partial if some
        do, full if all do; a block at a ragged end is never full. The lists are what FlexAttention
        takes: number [b or 1, 1, blocks of queries] and indices [b or 1, 1, blocks of queries,
        blocks of keys] of each one's partial blocks, then of its full ones, and then the same for
        each block of keys; int32. Indices after the number are of other blocks. They take
        O((s / 128)²) memory; nothing waits for a GPU.

        Args:
            queries: number of query tokens (s).
            keys: number of key tokens.
            slopes: see the attribute.
        """
        first, last = (each.expand(-1, queries).contiguous() for each in (self.first, self.last))
        nothing, ragged = last < first, -queries % BLOCK

        def blocks_of(tokens: Tensor) -> Tensor:
            return tokens.view(len(tokens), -1, BLOCK)

        # A query that sees nothing, and one after the end, makes no block visible, and none full.
        beginning = blocks_of(F.pad(first.masked_fill(nothing, keys), (0, ragged), value=keys))
        ending = blocks_of(F.pad(last.masked_fill(nothing, -1), (0, ragged), value=-1))
        low = torch.arange(0, keys, BLOCK, dtype=torch.int32, device=first.device)
        high = low + (BLOCK - 1)
        visible = (beginning.amin(2)[..., None] <= high) & (ending.amax(2)[..., None] >= low)
        full = (beginning.amax(2)[..., None] <= low) & (ending.amin(2)[..., None] >= high)
        partial, full = (visible & ~full)[:, None], full[:, None]
        lists = [_listed(each) for each in (partial, full, partial.mT, full.mT)]
        blocks = tuple(part for pair in lists for part in pair)
        return replace(self, first=first, last=last, blocks=blocks, slopes=slopes)

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


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of True in each row of a bool matrix, and their columns followed by others.

    For [..., rows, columns] these are [..., rows] and [..., rows, columns] in int32.
    """
    columns = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), columns.to(torch.int32)
