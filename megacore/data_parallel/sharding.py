"""Division of parameters, gradients and optimizer state over data-parallel ranks.

Gradient reduction, optimizers, checkpoints and planner read it here.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Self

from megacore.config.parallel import ZERO_STAGES, DataParallelSharding

if TYPE_CHECKING:  # the planner starts without torch
    from torch import Tensor

ALIGNMENT = 16
"""Alignment of parameters and shards in elements: 64 bytes of fp32, a multiple of the vector width
of torch's fused AdamW, so that a parameter is updated with the same bits as a whole or in
pieces."""
_MIB = 1 << 20


@dataclass(frozen=True)
class Piece:
    """Contiguous elements of one parameter within a flat buffer."""

    name: str
    """Global name of the parameter."""
    start: int
    """First element, counted within the flattened parameter."""
    offset: int
    """First element, counted within the buffer."""
    length: int
    """Number of elements."""

    def of(self, flat: "Tensor") -> "Tensor":
        """Return the piece of a flat buffer, as a view."""
        return flat[self.offset : self.offset + self.length]


@dataclass(frozen=True)
class BucketLayout:
    """Parameters that share a flat buffer."""

    sizes: Mapping[str, int]
    """Number of elements of each parameter, in the order of the buffer."""
    shards: int = 1
    """Number of equal parts that the buffer can be divided into."""

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Complete parameters; the padding between them stays zero."""
        pieces, offset = [], 0
        for name, size in self.sizes.items():
            pieces.append(Piece(name, 0, offset, size))
            offset = _rounded_up(offset + size, ALIGNMENT)
        return tuple(pieces)

    @property
    def length(self) -> int:
        """Number of elements of the buffer."""
        last = self.pieces[-1]
        return _rounded_up(last.offset + last.length, ALIGNMENT * self.shards)

    def within(self, shard: range) -> Iterator[Piece]:
        """Yield the pieces in a part of the buffer, with offsets relative to the part's start."""
        for piece in self.pieces:
            first = max(piece.offset, shard.start)
            last = min(piece.offset + piece.length, shard.stop)
            if first < last:
                yield Piece(piece.name, first - piece.offset, first - shard.start, last - first)

    def runs(self, shard: range, names: Collection[str]) -> Iterator[slice]:
        """Yield the fewest slices of the buffer's part that cover exactly the given parameters."""
        start = stop = 0
        for piece in self.within(shard):
            if piece.name not in names:
                continue
            if piece.offset != _rounded_up(stop, ALIGNMENT):
                if stop > start:
                    yield slice(start, stop)
                start = piece.offset
            stop = piece.offset + piece.length
        if stop > start:
            yield slice(start, stop)


def plan_buckets(sizes: Mapping[str, int], bucket_mb: float) -> list[dict[str, int]]:
    """Divide parameters, in reverse order, into buckets of at most `bucket_mb` MiB of fp32.

    Args:
        sizes: number of elements of each parameter, by name, in the model's order.
        bucket_mb: limit of a bucket, without padding; a larger parameter gets a separate bucket.
    """
    limit = bucket_mb * _MIB / 4
    buckets: list[dict[str, int]] = []
    filled = 0
    for name, size in reversed(list(sizes.items())):
        if not buckets or filled + size > limit:
            buckets.append({})
            filled = 0
        buckets[-1][name] = size
        filled += size
    return buckets


def _rounded_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


State = Literal["optimizer", "gradients", "parameters"]
"""Main weights and moments; main gradients; weights that the model computes with."""


@dataclass(frozen=True)
class Sharding:
    """Division of a replica's training state over the replicas.

    The state is in buckets. Of a divided state, each replica has one shard of every bucket.
    """

    kind: DataParallelSharding
    """The last state that is divided, in the order of ZeRO's stages."""
    replicas: int
    """Number of replicas, counting the parts of a sequence."""

    @classmethod
    def of(cls, kind: DataParallelSharding, replicas: int) -> Self:
        """Return the division of a run; one replica divides nothing."""
        return cls(kind if replicas > 1 else "none", replicas)

    def divides(self, state: State) -> bool:
        """Return True if each replica has only a shard of `state`."""
        return ZERO_STAGES.index(self.kind) >= ZERO_STAGES.index(state)

    def bucket(self, sizes: Mapping[str, int]) -> BucketLayout:
        """Return the layout of a bucket of parameters with these numbers of elements."""
        return BucketLayout(sizes, self.replicas if self.divides("optimizer") else 1)

    def updated(self, layout: BucketLayout, rank: int) -> range:
        """Return the part of a bucket that a replica sums and updates: all of it, or its shard."""
        if not self.divides("optimizer"):
            return range(layout.length)
        part = layout.length // self.replicas
        return range(rank * part, (rank + 1) * part)

    def share(self, state: State, elements: int) -> int:
        """Return how many of the elements of `state` a replica has, without the padding."""
        return -(-elements // self.replicas) if self.divides(state) else elements
