"""Collectives over flat buffers, in place: an all-reduce in two halves, which a distributed optimizer needs."""

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.parallel.collectives import Pending
from megacore.parallel.mesh import ParallelGroup


def shard_of(length: int, group: ParallelGroup) -> range:
    """The part of a flat buffer that this rank of the group is responsible for."""
    part = length // group.size
    return range(group.rank * part, (group.rank + 1) * part)


def start_reduce_scatter_(buffer: Tensor, group: ParallelGroup) -> Pending:
    """Sum this rank's part of a flat buffer over the ranks; the other parts are undefined from now on.

    Gloo has no reduce-scatter (torch makes an all-reduce of it), so there each rank sends the others their parts:
    half the traffic of an all-reduce.
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
    """The sum of the ranks' scalars: they are added in one order, so it has the same bits on every rank."""
    if group.size == 1:
        return value
    values = value.new_empty(group.size)
    values[group.rank] = value
    return start_all_gather_(values, group).wait().sum()


def _others(group: ParallelGroup) -> list[int]:
    return [peer for peer in range(group.size) if peer != group.rank]
