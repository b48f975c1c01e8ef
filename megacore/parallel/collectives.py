"""Collectives among the ranks of a group.

They are not differentiable (see `tensor_parallel.mappings`). In a group of one rank every function
returns its input unchanged. The time that a rank waits is added to the group's timers under
`wait_phase(group)`. Ranks must start the same collectives in the same order.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.parallel.mesh import ParallelGroup

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


class Pending:
    """Collective in progress.

    Its input must not be changed before `wait`, which must be called once.
    """

    def __init__(
        self, group: ParallelGroup, works: Sequence[dist.Work | None], finish: Callable[[], Tensor]
    ) -> None:
        """Store the asynchronous `works`; `finish` computes the result after they are complete."""
        self._group, self._works, self._finish = group, works, finish

    def wait(self) -> Tensor:
        """Wait for the result and return it; on a GPU only the current stream waits."""
        if not self._works:
            return self._finish()
        with _waiting(self._group):
            for work in self._works:
                assert work is not None
                work.wait()
            return self._finish()


def wait_phase(group: ParallelGroup) -> str:
    """Return the step timer's name for the time that a rank waits for the group."""
    return f"{group.name}-parallel wait"


def all_reduce(x: Tensor, group: ParallelGroup) -> Tensor:
    """Return the sum of `x` over the ranks in a new tensor, bitwise equal on all ranks."""
    return (
        x if group.size == 1 else all_reduce_(x.clone(memory_format=torch.contiguous_format), group)
    )


def all_reduce_(x: Tensor, group: ParallelGroup, op: dist.ReduceOp.RedOpType = SUM) -> Tensor:
    """Reduce the contiguous tensor `x` over the ranks in place."""
    return start_all_reduce(x, group, op).wait()


def start_all_reduce(x: Tensor, group: ParallelGroup, op: dist.ReduceOp.RedOpType = SUM) -> Pending:
    """Start `all_reduce_` asynchronously."""
    if group.size == 1:
        return Pending(group, (), lambda: x)
    if op == SUM and group.shared and group.shared.piece:
        # Only when it is waited for, whatever its size: which sums find the memory free, and so the
        # order of additions, would otherwise depend on the order in which they were started.
        return Pending(group, (), lambda: _sum_pieces(x, group))
    return _start_sum(x, group, op)


def _start_sum(x: Tensor, group: ParallelGroup, op: dist.ReduceOp.RedOpType) -> Pending:
    """Start a reduction, in shared memory if possible and if it is a sum."""
    if op == SUM and (
        shared := _start_shared(x, group, lambda parts: _sum_into(x, parts, group.rank))
    ):
        return shared
    # For gloo this collective is as fast as two ranks that swap and add (measured at 0.5–8 MiB).
    return Pending(group, [dist.all_reduce(x, op, group=group.group, async_op=True)], lambda: x)


def all_gather(x: Tensor, group: ParallelGroup, dim: int) -> Tensor:
    """Concatenate the ranks' tensors along `dim`, in rank order, in a new tensor."""
    return start_all_gather(x, group, dim).wait()


def start_all_gather(x: Tensor, group: ParallelGroup, dim: int) -> Pending:
    """Start `all_gather` asynchronously."""
    if group.size == 1:
        return Pending(group, (), lambda: x)
    if not _is_for_sums(group) and (
        shared := _start_shared(x, group, lambda parts: torch.cat(list(parts), dim))
    ):
        return shared
    local, dim = x.contiguous(), dim % x.dim()
    if _swaps(x, group):
        other, works = _swap(local, group)
        pair = (local, other) if group.rank == 0 else (other, local)
        return Pending(group, works, lambda: torch.cat(pair, dim))
    parts = local.new_empty(group.size, *local.shape)
    work = dist.all_gather_into_tensor(parts.flatten(0, 1), local, group=group.group, async_op=True)
    return Pending(group, [work], lambda: parts.movedim(0, dim).flatten(dim, dim + 1))


def reduce_scatter(x: Tensor, group: ParallelGroup, dim: int) -> Tensor:
    """Return this rank's part along `dim` of the sum of `x` over the ranks, in a new tensor.

    The size of `dim` must be a multiple of the number of ranks.
    """
    return start_reduce_scatter(x, group, dim).wait()


def start_reduce_scatter(x: Tensor, group: ParallelGroup, dim: int) -> Pending:
    """Start `reduce_scatter` asynchronously."""
    if group.size == 1:
        return Pending(group, (), lambda: x)
    assert x.shape[dim] % group.size == 0
    if not _is_for_sums(group) and (
        shared := _start_shared(x, group, lambda parts: _sum_of_parts(parts, group.rank, dim))
    ):
        return shared
    parts = x.chunk(group.size, dim)
    if _swaps(x, group):
        received, works = _swap(parts[1 - group.rank].contiguous(), group)
        return Pending(group, works, lambda: received.add_(parts[group.rank]))
    joined = torch.cat(parts)
    total = joined.new_empty(parts[0].shape)
    return Pending(
        group,
        [dist.reduce_scatter_tensor(total, joined, group=group.group, async_op=True)],
        lambda: total,
    )


def _start_shared(
    x: Tensor, group: ParallelGroup, read: Callable[[Sequence[Tensor]], Tensor]
) -> Pending | None:
    """Start a collective that applies `read` to every rank's `x` in shared memory.

    Return None if the ranks cannot use shared memory.
    """
    memory = group.shared
    parts = memory.put(x) if memory else None
    if memory is None or parts is None:
        return None

    def finish() -> Tensor:
        result = read(parts)
        memory.done()
        return result

    token = torch.zeros(1, dtype=torch.uint8)
    if group.size == 2:
        return Pending(group, _swap(token, group)[1], finish)
    return Pending(group, [dist.all_reduce(token, group=group.group, async_op=True)], finish)


def _is_for_sums(group: ParallelGroup) -> bool:
    """Return True if the group's shared memory is for sums only, which are made in pieces."""
    return group.shared is not None and group.shared.piece is not None


def _sum_pieces(x: Tensor, group: ParallelGroup) -> Tensor:
    """Sum the contiguous `x` over the ranks piece by piece, and return it."""
    assert group.shared is not None
    assert group.shared.piece is not None
    for piece in torch.split(x.view(-1), group.shared.piece // x.element_size()):
        _start_sum(piece, group, SUM).wait()
    return x


def _sum_into(x: Tensor, parts: Sequence[Tensor], rank: int) -> Tensor:
    """Sum in rank order, so that all ranks get the same bits.

    `x`, this rank's part, is overwritten with the sum.
    """
    first, second = (x if number == rank else parts[number] for number in (0, 1))
    torch.add(first, second, out=x)
    for part in parts[2:]:
        x.add_(part)
    return x


def _sum_of_parts(parts: Sequence[Tensor], rank: int, dim: int) -> Tensor:
    local_parts = [part.chunk(len(parts), dim)[rank] for part in parts]
    total = local_parts[0] + local_parts[1]
    for part in local_parts[2:]:
        total.add_(part)
    return total


def _swaps(x: Tensor, group: ParallelGroup) -> bool:
    """Return True if the group's two ranks should exchange plain messages.

    gloo's gather and scatter take twice as long (measured at 1–8 MiB).
    """
    return group.size == 2 and x.device.type == "cpu"


def _swap(x: Tensor, group: ParallelGroup) -> tuple[Tensor, list[dist.Work | None]]:
    """Start exchanging `x` with the other of two ranks; return receive buffer and works."""
    received, other = torch.empty_like(x), 1 - group.rank
    works = [
        dist.irecv(received, group=group.group, group_src=other),
        dist.isend(x, group=group.group, group_dst=other),
    ]
    return received, works


def _waiting(group: ParallelGroup) -> AbstractContextManager[None]:
    return group.timers(wait_phase(group)) if group.timers else nullcontext()
