"""Gradient summation over data-parallel ranks during the backward pass (Li et al. 2020).

Flat buffers combine several parameters, and collectives work in place on them. A distributed
optimizer splits the all-reduce into a reduce-scatter and an all-gather.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.config.parallel import ParallelConfig
from megacore.kernels.weight_gradient import WeightGradient, reference
from megacore.parallel.collectives import Pending, start_all_reduce
from megacore.parallel.mesh import ParallelGroup, ProcessMesh

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


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Bucket:
    """Main gradients that are communicated together."""

    layout: BucketLayout
    """Layout of the parameters in the buffer."""
    buffer: Tensor
    """Flat fp32 buffer of the gradients."""
    shard: range
    """Part of the buffer that contains the sum over the replicas after the reduction: all of it, or
    this rank's shard."""
    extra: tuple[ParallelGroup, ...]
    """Additional groups over which that part is summed."""
    expected: int | None = None
    """Number of contributions of one backward pass; None before the first pass has ended."""
    arrived: int = 0
    """Number of contributions so far in the iteration's last backward pass."""
    pending: Pending | None = None
    """Sum in progress."""

    @property
    def reduced(self) -> Tensor:
        """Part of the buffer that contains the sum over the replicas after the reduction."""
        return self.buffer[self.shard.start : self.shard.stop]


class _Sink:
    """Implementation of `megacore.tensor_parallel.linear.GradSink`."""

    def __init__(
        self, main_grad: Tensor, add_product: WeightGradient, contributed: Callable[[], None]
    ) -> None:
        self.main_grad = main_grad
        self.add_product = add_product
        self.accumulated = contributed


class GradSync:
    """Main gradients in fp32, summed over replicas by bucket while backward fills them.

    There are two sources of gradients. A layer that supports `grad_sink` adds to the main gradient
    directly. All other gradients are from autograd: the `.grad` of an fp32 parameter is a view of
    the bucket, into which autograd accumulates without a copy; a gradient of lower precision is
    added to its view and dropped.

    The first iteration counts the contributions to each bucket and sends all buckets at its end.
    From then on, a bucket is full when it has as many contributions. Every rank sends the buckets
    in the order in which the first iteration filled them on the first replica. So parameters that
    are used twice (tied weights) or not at all cause no delay, and collectives match on all ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mesh: ProcessMesh,
        config: ParallelConfig,
        *,
        partial: frozenset[str] = frozenset(),
        shared: Mapping[str, ParallelGroup] | None = None,
        add_product: WeightGradient = reference,
    ) -> None:
        """Allocate the buckets and register hooks in autograd.

        Args:
            parameters: parameters of one model chunk by global name, each tied parameter once; all
                on one device.
            mesh: this process's groups; a group of one rank communicates nothing.
            config: size and type of the communicated buckets, and the choice of a distributed
                optimizer, with which each replica keeps only its shard of the sum.
            partial: parameters whose gradient is partial on each tensor-parallel rank (sequence
                parallelism).
            shared: for parameters shared with other pipeline stages (tied embeddings), the group of
                `mesh.copies` over which their gradients are summed.
            add_product: function that adds the weight gradients of linear layers to main gradients.
        """
        self.parameters = dict(parameters)
        self.mesh = mesh
        self.shared = shared or {}
        self.replicas = mesh.data_context_parallel.size
        """Number of ranks over which `finish` sums: replicas x parts of a sequence. The optimizer,
        which scales gradients anyway, computes the mean over the replicas."""
        self.sharded = config.use_distributed_optimizer and self.replicas > 1
        """True if each replica keeps only its shard of the sum (ZeRO-1)."""
        self._dtype = _DTYPES[config.grad_reduce_dtype]
        self._add_product = add_product
        self._last_micro_step = False
        self._order: list[Bucket] | None = None
        self._filled: list[int] = []
        self.launched = 0
        """Number of buckets whose communication has started in this iteration."""
        self.buckets = self._plan(config.grad_reduce_bucket_mb, partial)
        self.gradients = {
            piece.name: piece.of(bucket.buffer).view(self.parameters[piece.name].shape)
            for bucket in self.buckets
            for piece in bucket.layout.pieces
        }
        """Main gradients by name: fp32 views in the shapes of the parameters."""
        for number, bucket in enumerate(self.buckets):
            for name in bucket.layout.sizes:
                self._hook(name, number)

    def zero(self) -> None:
        """Start a new iteration with gradients of zero."""
        torch._foreach_zero_([bucket.buffer for bucket in self.buckets])
        for name, parameter in self.parameters.items():
            parameter.grad = self.gradients[name] if parameter.dtype == torch.float32 else None
        for bucket in self.buckets:
            bucket.arrived = 0
        self.launched = 0

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Surround one backward pass; only the last one of an iteration sends full buckets."""
        self._last_micro_step = last
        try:
            yield
        finally:
            self._last_micro_step = False

    def finish(self) -> None:
        """Wait until every main gradient is the sum over the replicas.

        Parameters without a gradient count as zero. With a distributed optimizer, only this rank's
        shard of each bucket has the sum.
        """
        if self.replicas > 1:
            if self._filled:
                self._order = self._learn()
            self._launch((self._order or self.buckets)[self.launched :])
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
                bucket.pending = None
        self._sum_extra()

    def _plan(self, bucket_mb: float, partial: frozenset[str]) -> list[Bucket]:
        """Return buckets of parameters that are summed over the same groups."""
        kinds: dict[tuple[ParallelGroup, ...], dict[str, int]] = {}
        for name, parameter in self.parameters.items():
            groups = [self.mesh.tensor_parallel] if name in partial else []
            groups += [self.shared[name]] if name in self.shared else []
            kinds.setdefault(tuple(group for group in groups if group.size > 1), {})[name] = (
                parameter.numel()
            )
        return [
            self._bucket(planned, groups)
            for groups, sizes in kinds.items()
            for planned in plan_buckets(sizes, bucket_mb)
        ]

    def _bucket(self, sizes: Mapping[str, int], extra: tuple[ParallelGroup, ...]) -> Bucket:
        layout = BucketLayout(sizes, self.replicas if self.sharded else 1)
        device = self.parameters[next(iter(sizes))].device
        buffer = torch.zeros(layout.length, dtype=torch.float32, device=device)
        shard = (
            shard_of(layout.length, self.mesh.data_context_parallel)
            if self.sharded
            else range(layout.length)
        )
        return Bucket(layout, buffer, shard, extra)

    def _hook(self, name: str, number: int) -> None:
        """Register hooks for gradients from autograd and from layers with a sink."""
        parameter, view = self.parameters[name], self.gradients[name]

        def accumulated(parameter: Tensor) -> None:
            if parameter.grad is not None and parameter.grad is not view:
                view.add_(parameter.grad)
                parameter.grad = None
            self._contributed(number)

        parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
        parameter.grad_sink = _Sink(view, self._add_product, lambda: self._contributed(number))  # type: ignore[attr-defined]

    def _contributed(self, number: int) -> None:
        """Count a contribution of the last backward pass and send the buckets that it completes."""
        if not self._last_micro_step or self.replicas == 1:
            return
        bucket = self.buckets[number]
        assert bucket.pending is None, (
            f"a gradient came after its bucket was full: {list(bucket.layout.sizes)}"
        )
        bucket.arrived += 1
        if self._order is None:
            self._filled.append(number)
            return
        full = self.launched
        while full < len(self._order) and self._order[full].arrived == self._order[full].expected:
            full += 1
        self._launch(self._order[self.launched : full])

    def _learn(self) -> list[Bucket]:
        """Store the number of contributions to each bucket and return the order of the buckets.

        The order is that in which the first replica's buckets became full.
        """
        completed = {number: moment for moment, number in enumerate(self._filled)}
        self._filled.clear()
        for bucket in self.buckets:
            bucket.expected = bucket.arrived
        order = sorted(range(len(self.buckets)), key=lambda number: completed.get(number, -1))
        agreed = torch.tensor(order, device=self.buckets[0].buffer.device)
        with self.mesh.time("data-parallel wait"):
            dist.broadcast(agreed, group=self.mesh.data_context_parallel.group, group_src=0)
        return [self.buckets[number] for number in agreed.tolist()]

    def _launch(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            bucket.pending = self._reduce(bucket)
        self.launched += len(buckets)

    def _reduce(self, bucket: Bucket) -> Pending:
        """Start summing a bucket over the replicas, in the configured communication type."""
        start = start_reduce_scatter_ if self.sharded else start_all_reduce
        if self._dtype == bucket.buffer.dtype:
            return start(bucket.buffer, self.mesh.data_context_parallel)
        converted = bucket.buffer.to(self._dtype)
        total = start(converted, self.mesh.data_context_parallel)
        return Pending(
            self.mesh.data_context_parallel, (), lambda: bucket.reduced.copy_(total.wait())
        )

    def _sum_extra(self) -> None:
        """Sum partial gradients over tensor-parallel ranks, then shared gradients over stages.

        All ranks take the groups in the mesh's order, so that the collectives cannot deadlock.
        """
        for groups in ((self.mesh.tensor_parallel,), tuple(self.mesh.copies.values())):
            pending = [
                start_all_reduce(bucket.reduced, group)
                for group in groups
                for bucket in self.buckets
                if group in bucket.extra
            ]
            for work in pending:
                work.wait()
