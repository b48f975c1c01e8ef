"""Flat buffers in which parameters travel as one, and collectives over them, in place.

A distributed optimizer needs an all-reduce in two halves: reduce-scatter and all-gather.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.parallel.collectives import Pending
from megacore.parallel.mesh import ParallelGroup

ALIGNMENT = 16
"""Elements to whose multiples parameters and shards are aligned: 64 bytes of fp32, which the vector
loops of torch's fused AdamW divide, so that a parameter is updated with the same bits whole or in
pieces."""
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
            offset = _rounded_up(offset + size, ALIGNMENT)
        return tuple(found)

    @property
    def length(self) -> int:
        """Elements of the buffer."""
        last = self.pieces[-1]
        return _rounded_up(last.offset + last.length, ALIGNMENT * self.shards)

    def within(self, shard: range) -> Iterator[Piece]:
        """What lies in a part of the buffer; offsets are counted from the part's first element."""
        for piece in self.pieces:
            first = max(piece.offset, shard.start)
            last = min(piece.offset + piece.length, shard.stop)
            if first < last:
                yield Piece(piece.name, first - piece.offset, first - shard.start, last - first)

    def runs(self, shard: range, names: Collection[str]) -> Iterator[slice]:
        """The fewest slices of the buffer's part with all elements of `names` and no others."""
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
        sizes: elements of each parameter, by name, in the model's order.
        bucket_mb: limit of a bucket, padding not counted; a parameter beyond it is a bucket of its
            own.
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


def shard_of(length: int, group: ParallelGroup) -> range:
    """The part of a flat buffer that this rank of the group is responsible for."""
    part = length // group.size
    return range(group.rank * part, (group.rank + 1) * part)


def start_reduce_scatter_(buffer: Tensor, group: ParallelGroup) -> Pending:
    """Sum this rank's part of a flat buffer over the ranks.

    The other parts are undefined from now on.

    Gloo has no reduce-scatter (torch makes an all-reduce of it), so there each rank sends the
    others their parts: half the traffic of an all-reduce.
    """
    parts = buffer.chunk(group.size)
    own = parts[group.rank]
    if buffer.is_cuda:
        work = dist.reduce_scatter_tensor(own, buffer, group=group.group, async_op=True)
        return Pending(group, [work], lambda: own)
    received = {peer: torch.empty_like(own) for peer in _others(group)}
    works = [dist.irecv(part, group=group.group, group_src=peer) for peer, part in received.items()]
    works += [dist.isend(parts[peer], group=group.group, group_dst=peer) for peer in _others(group)]

    def add() -> Tensor:
        for part in received.values():
            own.add_(part)
        return own

    return Pending(group, works, add)


def start_all_gather_(buffer: Tensor, group: ParallelGroup) -> Pending:
    """Fill a flat buffer with the part of it that each rank is responsible for."""
    parts = buffer.chunk(group.size)
    own = parts[group.rank]
    if buffer.is_cuda:
        work = dist.all_gather_into_tensor(buffer, own, group=group.group, async_op=True)
        return Pending(group, [work], lambda: buffer)
    works = [dist.irecv(parts[peer], group=group.group, group_src=peer) for peer in _others(group)]
    works += [dist.isend(own, group=group.group, group_dst=peer) for peer in _others(group)]
    return Pending(group, works, lambda: buffer)


def sum_of_ranks(value: Tensor, group: ParallelGroup) -> Tensor:
    """The sum of the ranks' scalars.

    They are added in one order, so it has the same bits on every rank.
    """
    if group.size == 1:
        return value
    values = value.new_empty(group.size)
    values[group.rank] = value
    return start_all_gather_(values, group).wait().sum()


def _others(group: ParallelGroup) -> list[int]:
    return [peer for peer in range(group.size) if peer != group.rank]
