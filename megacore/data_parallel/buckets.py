"""Where parameters lie in flat buffers that travel as one."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

ALIGNMENT = 16
"""Elements to whose multiples parameters and shards are aligned: 64 bytes of fp32, which the vector loops of torch's
fused AdamW divide, so that a parameter is updated with the same bits whole or in pieces."""
_MIB = 1 << 20


@dataclass(frozen=True)
class Piece:
    """A run of one parameter's elements within a flat buffer."""

    name: str
    """Global name of the parameter."""
    start: int
    """First element, counted within the flattened parameter."""
    offset: int
    """First element, counted within the buffer."""
    length: int
    """Elements."""

    def of(self, flat: Tensor) -> Tensor:
        """The piece of a flat buffer, as a view."""
        return flat[self.offset : self.offset + self.length]


@dataclass(frozen=True)
class BucketLayout:
    """Which parameters share a flat buffer."""

    sizes: Mapping[str, int]
    """Elements of each parameter, in the order in which they lie there."""
    shards: int = 1
    """Equal parts that the buffer can be divided into."""

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The whole parameters; between them is padding, which stays zero."""
        found, offset = [], 0
        for name, size in self.sizes.items():
            found.append(Piece(name, 0, offset, size))
            offset = _up(offset + size, ALIGNMENT)
        return tuple(found)

    @property
    def length(self) -> int:
        """Elements of the buffer."""
        last = self.pieces[-1]
        return _up(last.offset + last.length, ALIGNMENT * self.shards)

    def within(self, shard: range) -> Iterator[Piece]:
        """What lies in a part of the buffer; offsets are counted from the part's first element."""
        for piece in self.pieces:
            first = max(piece.offset, shard.start)
            last = min(piece.offset + piece.length, shard.stop)
            if first < last:
                yield Piece(piece.name, first - piece.offset, first - shard.start, last - first)

    def runs(self, shard: range, names: Collection[str]) -> Iterator[slice]:
        """The fewest slices of a part of the buffer that hold all elements of `names` in it, and of no others."""
        start = stop = 0
        for piece in self.within(shard):
            if piece.name not in names:
                continue
            if piece.offset != _up(stop, ALIGNMENT):
                if stop > start:
                    yield slice(start, stop)
                start = piece.offset
            stop = piece.offset + piece.length
        if stop > start:
            yield slice(start, stop)


def plan_buckets(sizes: Mapping[str, int], bucket_mb: float) -> list[dict[str, int]]:
    """Divide parameters, in reverse order, into buckets of at most `bucket_mb` MiB of fp32.

    Args:
        sizes: elements of each parameter, by name, in the model's order.
        bucket_mb: limit of a bucket, padding not counted; a parameter beyond it is a bucket of its own.
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


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
