"""Flat buffers that combine several parameters, and in-place collectives over them.

A distributed optimizer splits the all-reduce into a reduce-scatter and an all-gather.
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

    def of(self, flat: Tensor) -> Tensor:
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


def shard_of(length: int, group: ParallelGroup) -> range:
    """Return the part of a flat buffer that belongs to this rank of the group."""
    part = length // group.size
    return range(group.rank * part, (group.rank + 1) * part)


def start_reduce_scatter_(buffer: Tensor, group: ParallelGroup) -> Pending:
    """Start summing this rank's part of a flat buffer over the ranks.

    The other parts become undefined. Since gloo has no reduce-scatter (torch uses an all-reduce
    instead), each rank on a CPU sends the others their parts: half the traffic of an all-reduce.
    """
    parts = buffer.chunk(group.size)
    local_part = parts[group.rank]
    if buffer.is_cuda:
        work = dist.reduce_scatter_tensor(local_part, buffer, group=group.group, async_op=True)
        return Pending(group, [work], lambda: local_part)
    received = {peer: torch.empty_like(local_part) for peer in _others(group)}
    works = [dist.irecv(part, group=group.group, group_src=peer) for peer, part in received.items()]
    works += [dist.isend(parts[peer], group=group.group, group_dst=peer) for peer in _others(group)]

    def add() -> Tensor:
        for part in received.values():
            local_part.add_(part)
        return local_part

    return Pending(group, works, add)


def start_all_gather_(buffer: Tensor, group: ParallelGroup) -> Pending:
    """Start filling a flat buffer with each rank's part of it."""
    parts = buffer.chunk(group.size)
    local_part = parts[group.rank]
    if buffer.is_cuda:
        work = dist.all_gather_into_tensor(buffer, local_part, group=group.group, async_op=True)
        return Pending(group, [work], lambda: buffer)
    works = [dist.irecv(parts[peer], group=group.group, group_src=peer) for peer in _others(group)]
    works += [dist.isend(local_part, group=group.group, group_dst=peer) for peer in _others(group)]
    return Pending(group, works, lambda: buffer)


def sum_of_ranks(value: Tensor, group: ParallelGroup) -> Tensor:
    """Return the sum of the ranks' scalars.

    They are added in the same order and give the same bits on every rank.
    """
    if group.size == 1:
        return value
    values = value.new_empty(group.size)
    values[group.rank] = value
    return start_all_gather_(values, group).wait().sum()


def _others(group: ParallelGroup) -> list[int]:
    return [peer for peer in range(group.size) if peer != group.rank]
