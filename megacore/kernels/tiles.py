"""Masks on CPUs without the C++ kernels: torch's attention of tiles of queries.

A tile's queries are multiplied by the keys between the first and the last one that they see, so
that time and memory grow with the visible part of the scores.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megacore.kernels.implementation import operator
from megacore.kernels.spans import Spans

TILE = 128
"""Queries of a tile, but for a document that is one tile."""
_WASTE = 1.25
"""Scores of a tile of all samples relative to those of one tile per sample, up to which the samples
are computed together."""
_NONE = np.iinfo(np.int32).max
Positions = NDArray[np.int32]
"""Positions of keys for each query [b or 1, s]."""
_forward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attention(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, *, scale: float | None
) -> Tensor:
    """Compute attention with spans, see `megacore.kernels.attention.Attention`.

    Outputs and gradients are those of torch's kernel with the dense mask, up to rounding. A query
    that sees nothing has output 0.
    """
    sharing = query.shape[1] // key.shape[1]
    if sharing > 1:
        key, value = (part.repeat_interleave(sharing, 1) for part in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    first, last = (part.expand(-1, query.shape[2]) for part in (spans.first, spans.last))
    output: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        query, key, value, first, last, scale
    )
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        output, lse = torch.ops.megacore.tiled_attention_forward(*arguments)
        *tensors, ctx.scale = arguments
        ctx.save_for_backward(*tensors, output, lse)
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gradients = torch.ops.megacore.tiled_attention_backward(
            *grads, *ctx.saved_tensors, ctx.scale
        )
        return *gradients, None, None, None


@dataclass(frozen=True)
class _Tile:
    """Some queries of some samples, and the keys that they see."""

    samples: slice
    queries: slice
    keys: slice
    causal: bool
    """True if the queries are a whole document, in which torch's kernel hides what follows."""
    spans: Spans
    """Spans of the queries, counted from the first key."""
    blind: bool
    """True if a query sees nothing."""

    def queries_of(self, tensor: Tensor) -> Tensor:
        """Return a view of [b, n, s, ...]."""
        return tensor[self.samples, :, self.queries]

    def keys_of(self, tensor: Tensor) -> Tensor:
        """Return a view of [b, n, s_k, d]."""
        return tensor[self.samples, :, self.keys]

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask, None if the kernel needs none."""
        keys = self.keys.stop - self.keys.start
        every = not self.spans.first.any() and bool((self.spans.last >= keys - 1).all())
        return None if self.causal or every else self.spans.bias(keys, dtype)

    def hide(self, output: Tensor) -> Tensor:
        """Return an output or its gradient with 0 for the queries that see nothing."""
        return self.spans.hide(output) if self.blind else output


def _tiles(first: Tensor, last: Tensor) -> Iterator[_Tile]:
    """Yield the tiles of spans [b or 1, s], without those whose queries see nothing."""
    begin, end = first.numpy(), last.numpy() + 1
    blind = end <= begin
    lowest, highest = np.where(blind, _NONE, begin), np.where(blind, 0, end)
    samples = [slice(None)] if _together(lowest, highest) else _rows(len(begin))
    for rows in samples:
        for start, stop, causal in _ranges(begin[rows], end[rows]):
            part = rows, slice(start, stop)
            low, high = int(lowest[part].min()), int(highest[part].max())
            if high:
                spans = Spans(first[part] - low, last[part] - low)
                keys = slice(low, high)
                yield _Tile(rows, part[1], keys, causal, spans, bool(blind[part].any()))


def _rows(count: int) -> list[slice]:
    return [slice(row, row + 1) for row in range(count)]


def _together(lowest: Positions, highest: Positions) -> bool:
    """Return True if all samples are computed together."""
    starts = np.arange(0, lowest.shape[1], TILE)
    lows = np.minimum.reduceat(lowest, starts, axis=1)
    highs = np.maximum.reduceat(highest, starts, axis=1)
    together = len(lowest) * np.maximum(highs.max(0) - lows.min(0), 0).sum()
    return bool(together <= _WASTE * np.maximum(highs - lows, 0).sum())


def _ranges(begin: Positions, end: Positions) -> Iterator[tuple[int, int, bool]]:
    """Yield start and end of the queries of each tile, and whether they are a whole document."""
    length, done = begin.shape[1], 0
    for start, stop in _documents(begin, end):
        yield from ((at, min(at + TILE, start), False) for at in range(done, start, TILE))
        yield start, stop, True
        done = stop
    yield from ((at, min(at + TILE, length), False) for at in range(done, length, TILE))


def _documents(begin: Positions, end: Positions) -> Iterator[tuple[int, int]]:
    """Yield start and end of the documents of more than a tile, if all samples have the same.

    Each query of a document sees what precedes it there, and itself.
    """
    if len(begin) > 1 and not ((begin == begin[0]).all() and (end == end[0]).all()):
        return
    begin, end = begin[0], end[0]
    own = end == np.arange(1, len(end) + 1)
    starts = np.flatnonzero(np.diff(begin, prepend=-1))
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(begin)], strict=True):
        if stop - start > TILE and begin[start] == start and own[start:stop].all():
            yield start, stop


def _zero_heads(like: Tensor) -> Tensor:
    """Return zeros [b, n, s, d], a view of new memory [b, s, n, d]."""
    b, n, s, d = like.shape
    return like.new_zeros((b, s, n, d)).transpose(1, 2)


def _zero_sums(query: Tensor) -> Tensor:
    """Return zeros [b, n, s] for the logarithms of the sums."""
    return query.new_zeros(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))


@operator(
    "tiled_attention_forward(Tensor query, Tensor key, Tensor value, Tensor first, Tensor last, "
    "float scale) -> (Tensor, Tensor)",
    fake=lambda query, *rest: (_zero_heads(query), _zero_sums(query)),
    devices="CPU",
)
def _forward(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor, last: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    output, sums = _zero_heads(query), _zero_sums(query)
    for tile in _tiles(first, last):
        computed = _forward_kernel(
            tile.queries_of(query),
            tile.keys_of(key),
            tile.keys_of(value),
            0.0,
            tile.causal,
            attn_mask=tile.mask(query.dtype),
            scale=scale,
        )
        tile.queries_of(output).copy_(tile.hide(computed[0]))
        tile.queries_of(sums).copy_(computed[1])
    return output, sums


@operator(
    "tiled_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor first, "
    "Tensor last, Tensor output, Tensor sums, float scale) -> (Tensor, Tensor, Tensor)",
    fake=lambda grad, query, key, value, *rest: tuple(map(_zero_heads, (query, key, value))),
    devices="CPU",
)
def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    last: Tensor,
    output: Tensor,
    sums: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = _zero_heads(query), _zero_heads(key), _zero_heads(value)
    for tile in _tiles(first, last):
        own, *others = _backward_kernel(
            tile.hide(tile.queries_of(grad)),
            tile.queries_of(query),
            tile.keys_of(key),
            tile.keys_of(value),
            tile.queries_of(output),
            tile.queries_of(sums),
            0.0,
            tile.causal,
            attn_mask=tile.mask(query.dtype),
            scale=scale,
        )
        tile.queries_of(gradients[0]).copy_(own)
        for gradient, part in zip(gradients[1:], others, strict=True):
            tile.keys_of(gradient).add_(part)
    return gradients
