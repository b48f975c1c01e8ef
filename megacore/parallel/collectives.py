"""Communication among the ranks of a group.

Nothing here is differentiable (see `tensor_parallel.mappings`).

Every function leaves its input to a group of one as it is. The time that a rank waits is added to
the group's timers under `wait_phase(group)`. Ranks must start the same collectives in the same
order.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.parallel.mesh import ParallelGroup

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


class Pending:
    """A collective that is under way.

    What it was given must not be changed before `wait`, which is called once.
    """

    def __init__(
        self, group: ParallelGroup, works: Sequence[dist.Work | None], finish: Callable[[], Tensor]
    ) -> None:
        """`finish` makes the result of what `works` have brought."""
        self._group, self._works, self._finish = group, works, finish

    def wait(self) -> Tensor:
        """The result; on a GPU the current stream waits, not the process."""
        if not self._works:
            return self._finish()
        with _waiting(self._group):
            for work in self._works:
                assert work is not None
                work.wait()
            return self._finish()


def wait_phase(group: ParallelGroup) -> str:
    """What the step timer calls the time that a rank waits for the group."""
    return f"{group.name}-parallel wait"


def all_reduce(x: Tensor, group: ParallelGroup, op: dist.ReduceOp.RedOpType = SUM) -> Tensor:
    """The reduction of `x` over the ranks as a new tensor, the same bits on every rank."""
    return (
        x
        if group.size == 1
        else all_reduce_(x.clone(memory_format=torch.contiguous_format), group, op)
    )


def all_reduce_(x: Tensor, group: ParallelGroup, op: dist.ReduceOp.RedOpType = SUM) -> Tensor:
    """The same in place; `x` is contiguous."""
    return start_all_reduce(x, group, op).wait()


def start_all_reduce(x: Tensor, group: ParallelGroup, op: dist.ReduceOp.RedOpType = SUM) -> Pending:
    """`all_reduce_` that other work can run beside."""
    if group.size == 1:
        return Pending(group, (), lambda: x)
    if op == SUM and (
        shared := _start_shared(x, group, lambda parts: _sum_into(x, parts, group.rank))
    ):
        return shared
    # Of gloo's collectives this one is as fast as two ranks that swap and add (measured at 0.5–8
    # MiB).
    return Pending(group, [dist.all_reduce(x, op, group=group.group, async_op=True)], lambda: x)


def all_gather(x: Tensor, group: ParallelGroup, dim: int) -> Tensor:
    """The ranks' tensors joined along `dim`, in rank order, as a new tensor."""
    return start_all_gather(x, group, dim).wait()


def start_all_gather(x: Tensor, group: ParallelGroup, dim: int) -> Pending:
    """`all_gather` that other work can run beside."""
    if group.size == 1:
        return Pending(group, (), lambda: x)
    if shared := _start_shared(x, group, lambda parts: torch.cat(list(parts), dim)):
        return shared
    own, dim = x.contiguous(), dim % x.dim()
    if _swaps(x, group):
        other, works = _swap(own, group)
        pair = (own, other) if group.rank == 0 else (other, own)
        return Pending(group, works, lambda: torch.cat(pair, dim))
    parts = own.new_empty(group.size, *own.shape)
    work = dist.all_gather_into_tensor(parts.flatten(0, 1), own, group=group.group, async_op=True)
    return Pending(group, [work], lambda: parts.movedim(0, dim).flatten(dim, dim + 1))


def reduce_scatter(x: Tensor, group: ParallelGroup, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum of `x` over the ranks, as a new tensor.

    The ranks divide `dim`.
    """
    return start_reduce_scatter(x, group, dim).wait()


def start_reduce_scatter(x: Tensor, group: ParallelGroup, dim: int) -> Pending:
    """`reduce_scatter` that other work can run beside."""
    if group.size == 1:
        return Pending(group, (), lambda: x)
    assert x.shape[dim] % group.size == 0
    if shared := _start_shared(x, group, lambda parts: _sum_of_parts(parts, group.rank, dim)):
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
    """What `read` makes of every rank's `x` in memory that they share; None where they do not."""
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


def _sum_into(x: Tensor, parts: Sequence[Tensor], rank: int) -> Tensor:
    """The sum in rank order, so that all ranks get the same bits.

    `x`, this rank's part, becomes the sum.
    """
    first, second = (x if number == rank else parts[number] for number in (0, 1))
    torch.add(first, second, out=x)
    for part in parts[2:]:
        x.add_(part)
    return x


def _sum_of_parts(parts: Sequence[Tensor], rank: int, dim: int) -> Tensor:
    own = [part.chunk(len(parts), dim)[rank] for part in parts]
    total = own[0] + own[1]
    for part in own[2:]:
        total.add_(part)
    return total


def _swaps(x: Tensor, group: ParallelGroup) -> bool:
    """Whether two ranks exchange plain messages.

    gloo's gather and scatter take twice as long (measured at 1–8 MiB).
    """
    return group.size == 2 and x.device.type == "cpu"


def _swap(x: Tensor, group: ParallelGroup) -> tuple[Tensor, list[dist.Work | None]]:
    """Send `x` to the other of two ranks, and where what it sends is going to be."""
    received, other = torch.empty_like(x), 1 - group.rank
    works = [
        dist.irecv(received, group=group.group, group_src=other),
        dist.isend(x, group=group.group, group_dst=other),
    ]
    return received, works


def _waiting(group: ParallelGroup) -> AbstractContextManager[None]:
    return group.timers(wait_phase(group)) if group.timers else nullcontext()
