"""Gradient summation over data-parallel ranks during the backward pass (Li et al. 2020).

Flat buffers combine several parameters, and collectives work in place on them. If the replicas
divide the optimizer state, a reduce-scatter replaces the all-reduce (`GradSync`); if they also
divide the gradients, buffers exist only until they are reduced (`DividedGradSync`).
"""

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.config.parallel import ParallelConfig
from megacore.data_parallel.sharding import BucketLayout, Sharding, plan_buckets
from megacore.kernels.weight_gradient import WeightGradient, reference
from megacore.parallel.collectives import Pending, start_all_reduce
from megacore.parallel.mesh import ParallelGroup, ProcessMesh


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
    shard: range
    """Part of the buffer that this rank updates: all of it, or its shard."""
    reduced: Tensor
    """Sum over the replicas of that part after the reduction, fp32: a view of the buffer, or, if
    replicas divide the gradients, all that is kept of it."""
    extra: tuple[ParallelGroup, ...]
    """Additional groups over which that part is summed."""
    unit: int = 0
    """Number of the unit whose parameters these are."""
    buffer: Tensor | None = None
    """Flat fp32 buffer of the gradients of this rank's samples; None while that of divided
    gradients does not exist or is being reduced."""
    expected: int | None = None
    """Number of contributions of one backward pass; None before the first pass has ended."""
    arrived: int = 0
    """Number of contributions so far in the last backward pass that is reduced."""
    pending: Pending | None = None
    """Sum in progress."""


Contributions = deque[Callable[[], None]]
"""Functions that add delayed weight gradients to main gradients, in the order of the layers."""


class _Sink:
    """Implementation of `megacore.tensor_parallel.linear.GradSink` for one parameter."""

    def __init__(self, sync: "GradSync", name: str) -> None:
        self._sync, self._name = sync, name
        self.add_product = sync.add_product

    @property
    def main_grad(self) -> Tensor:
        """Sum of all contributions since the last reduction."""
        return self._sync.main_grad(self._name)

    @property
    def delays(self) -> bool:
        """True if `contribute` keeps functions for later."""
        return self._sync.delayed is not None

    def contribute(self, add: Callable[[], None]) -> None:
        """Call a function that adds one contribution to the main gradient, now or later."""
        if self._sync.delayed is None:
            add()
            self._sync.contributed(self._name)
            return

        def contribute() -> None:
            add()
            self._sync.contributed(self._name)

        self._sync.delayed.append(contribute)


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
        units: Sequence[Collection[str]] = (),
        add_product: WeightGradient = reference,
    ) -> None:
        """Allocate the buckets and register hooks in autograd.

        Args:
            parameters: parameters of one model chunk by global name, each tied parameter once; all
                on one device.
            mesh: this process's groups; a group of one rank communicates nothing.
            config: size and type of the communicated buckets, and the state that replicas divide.
            partial: parameters whose gradient is partial on each tensor-parallel rank (sequence
                parallelism).
            shared: for parameters shared with other pipeline stages (tied embeddings), the group of
                `mesh.copies` over which their gradients are summed.
            units: names of parameters that share no bucket with others; the parameters that are
                not named are one more unit.
            add_product: function that adds the weight gradients of linear layers to main gradients.
        """
        self.parameters = dict(parameters)
        self.mesh = mesh
        self.shared = shared or {}
        self.add_product = add_product
        self.replicas = mesh.data_context_parallel.size
        """Number of ranks over which `finish` sums: replicas x parts of a sequence. The optimizer,
        which scales gradients anyway, computes the mean over the replicas."""
        self.sharding = Sharding.of(config.data_parallel_sharding, self.replicas)
        """Division of the state over these ranks."""
        self.sharded = self.sharding.divides("optimizer")
        """True if each replica keeps only its shard of the sum."""
        self.after_backward: Callable[[], None] = lambda: None
        """Function called after every `micro_step`."""
        self.delayed: Contributions | None = None
        """Contributions that layers leave for later; None if they add them at once."""
        self._dtype = _DTYPES[config.grad_reduce_dtype]
        self._reduces = False
        self._order: list[Bucket] | None = None
        self._filled: list[str] = []
        self._sums: deque[Bucket] = deque()
        self.launched = 0
        """Number of buckets whose communication has started in this iteration, or, with divided
        gradients, in this backward pass."""
        self.buckets = self._plan(config.grad_reduce_bucket_mb, partial, units)
        self._places = {
            piece.name: (number, piece)
            for number, bucket in enumerate(self.buckets)
            for piece in bucket.layout.pieces
        }
        self.gradients = {
            name: piece.of(buffer).view(self.parameters[name].shape)
            for name, (number, piece) in self._places.items()
            if (buffer := self.buckets[number].buffer) is not None
        }
        """Main gradients by name: fp32 views in the shapes of the parameters. Divided gradients
        have none."""
        for name in self._places:
            self._hook(name)

    def main_grad(self, name: str) -> Tensor:
        """Return the main gradient of a parameter, to which a contribution is added."""
        return self.gradients[name]

    def zero(self) -> None:
        """Start a new iteration, after the `finish` of the last one, with gradients of zero."""
        torch._foreach_zero_(
            [bucket.reduced if bucket.buffer is None else bucket.buffer for bucket in self.buckets]
        )
        for name, parameter in self.parameters.items():
            parameter.grad = self.gradients.get(name) if parameter.dtype == torch.float32 else None
        self._start_counting()

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Surround one backward pass, or the weight gradients that it has delayed.

        Only the last one of an iteration sends full buckets, or every one if gradients are divided.
        """
        self._reduces = last
        try:
            yield
        finally:
            self._reduces = False
        self.after_backward()

    @contextmanager
    def delayed_contributions(self) -> Iterator[Contributions]:
        """Surround one backward pass whose layers leave what they add to sinks to functions.

        The functions are called in their order, within another `micro_step`.
        """
        self.delayed = Contributions()
        try:
            yield self.delayed
        finally:
            self.delayed = None

    def finish(self) -> None:
        """Wait until every main gradient is the sum over the replicas.

        Parameters without a gradient count as zero. Each rank has the sum only of the part
        `reduced` of each bucket.
        """
        if self.replicas > 1:
            self._send_rest()
        self._collect_all()
        self._sum_extra()

    def contributed(self, name: str) -> None:
        """Count a contribution of a pass that is reduced and send the buckets that it completes."""
        if not self._reduces or self.replicas == 1:
            return
        bucket = self.buckets[self._places[name][0]]
        assert bucket.pending is None, _late(bucket)
        bucket.arrived += 1
        if self._order is None:
            self._filled.append(name)
            return
        while self.launched < len(self._order):
            following = self._order[self.launched]
            if following.arrived != following.expected:
                break
            self._send(following)

    def _plan(
        self, bucket_mb: float, partial: frozenset[str], units: Sequence[Collection[str]]
    ) -> list[Bucket]:
        """Return buckets of parameters of the same unit that are summed over the same groups."""
        unit_of = {name: number for number, names in enumerate(units) for name in names}
        kinds: dict[tuple[int, tuple[ParallelGroup, ...]], dict[str, int]] = {}
        for name, parameter in self.parameters.items():
            groups = [self.mesh.tensor_parallel] if name in partial else []
            groups += [self.shared[name]] if name in self.shared else []
            kind = unit_of.get(name, len(units)), tuple(group for group in groups if group.size > 1)
            kinds.setdefault(kind, {})[name] = parameter.numel()
        return [
            self._bucket(planned, groups, unit)
            for (unit, groups), sizes in kinds.items()
            for planned in plan_buckets(sizes, bucket_mb)
        ]

    def _bucket(
        self, sizes: Mapping[str, int], extra: tuple[ParallelGroup, ...], unit: int
    ) -> Bucket:
        layout = self.sharding.bucket(sizes)
        shard = self.sharding.updated(layout, self.mesh.data_context_parallel.rank)
        reduced, buffer = self._memory(layout, shard, self.parameters[next(iter(sizes))].device)
        return Bucket(layout, shard, reduced, extra, unit, buffer)

    def _memory(
        self, layout: BucketLayout, shard: range, device: torch.device
    ) -> tuple[Tensor, Tensor | None]:
        """Return the memory of a bucket's `reduced`, and of its buffer."""
        buffer = torch.zeros(layout.length, dtype=torch.float32, device=device)
        return buffer[shard.start : shard.stop], buffer

    def _hook(self, name: str) -> None:
        """Register hooks for gradients from autograd and from layers with a sink."""
        parameter = self.parameters[name]
        # Python's garbage collector does not look into such hooks: with a reference to this object
        # they would keep it, and the parameters, forever.
        weak = weakref.proxy(self)

        def accumulated(parameter: Tensor) -> None:
            if parameter.grad is None:  # a layer has added it to the sink
                return
            if parameter.grad is not weak.gradients.get(name):
                weak.main_grad(name).add_(parameter.grad)
                parameter.grad = None
            weak.contributed(name)

        parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
        parameter.grad_sink = _Sink(self, name)  # type: ignore[attr-defined]

    def _start_counting(self) -> None:
        for bucket in self.buckets:
            bucket.arrived = 0
        self.launched = 0

    def _send_rest(self) -> None:
        """Send the buckets that were not sent during backward passes."""
        if self._order is None:
            self._learn()
        for bucket in (self._order or self.buckets)[self.launched :]:
            self._send(bucket)

    def _learn(self) -> None:
        """Store the number of contributions to each bucket and the order of the buckets.

        The order is that in which the first replica's buckets became full. Without contributions
        nothing is learned.
        """
        if not self._filled:
            return
        completed = {self._places[name][0]: moment for moment, name in enumerate(self._filled)}
        self._filled.clear()
        for bucket in self.buckets:
            bucket.expected = bucket.arrived
        order = sorted(range(len(self.buckets)), key=lambda number: completed.get(number, -1))
        agreed = torch.tensor(order, device=self.buckets[0].reduced.device)
        with self.mesh.time("data-parallel wait"):
            dist.broadcast(agreed, group=self.mesh.data_context_parallel.group, group_src=0)
        self._order = [self.buckets[number] for number in agreed.tolist()]

    def _send(self, bucket: Bucket) -> None:
        """Start summing a bucket over the replicas, in the configured communication type."""
        assert bucket.buffer is not None
        start = start_reduce_scatter_ if self.sharded else start_all_reduce
        bucket.pending = start(bucket.buffer.to(self._dtype), self.mesh.data_context_parallel)
        self._sums.append(bucket)
        self.launched += 1

    def _collect(self) -> None:
        """Wait for the sum of the bucket that was sent first."""
        bucket = self._sums.popleft()
        assert bucket.pending is not None
        total = bucket.pending.wait()
        bucket.pending = None
        self._store(bucket, total)

    def _collect_all(self) -> None:
        while self._sums:
            self._collect()

    def _store(self, bucket: Bucket, total: Tensor) -> None:
        """Store the sum of a bucket, which is in place unless it has another type."""
        if total.dtype != bucket.reduced.dtype:
            bucket.reduced.copy_(total)

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


class DividedGradSync(GradSync):
    """Main gradients of which each replica keeps only its shards.

    Every backward pass is reduced instead of an iteration's last one, and each rank adds the sums
    to its shards. The buffer of a bucket is allocated for its first contribution and freed when its
    sum is added. Before another one is allocated, all sums but the newest are added: apart from
    buckets that wait for a second use of a parameter, two or, where a layer fills two buckets in
    turn, three buffers exist. In the first pass, which counts, the oldest buffer is reduced when a
    third one is needed, unless a parameter in it may be used again. So a first pass, as after a
    resume, gives the same bits as a later one.
    """

    def __init__(self, *arguments: Any, repeated: frozenset[str], **options: Any) -> None:
        """Allocate the shards and register hooks in autograd; other arguments as in `GradSync`.

        A backward pass may add to the parameters `repeated` more than once (tied embeddings).
        """
        self._repeated = repeated
        self._filling: list[Bucket] = []
        super().__init__(*arguments, **options)

    def main_grad(self, name: str) -> Tensor:
        """Return the view of a parameter in its bucket's buffer, which is allocated for it."""
        number, piece = self._places[name]
        buffer = self._buffer(self.buckets[number])
        return piece.of(buffer).view(self.parameters[name].shape)

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Surround one backward pass, or the weight gradients that it has delayed; reduce it."""
        self._start_counting()
        with super().micro_step(last=True):
            yield
        self._send_rest()

    def finish(self) -> None:
        """Wait until each shard has the sums of all backward passes."""
        self._collect_all()
        self._sum_extra()

    def contributed(self, name: str) -> None:
        """Count a contribution and send the buckets that it completes."""
        if self._order is None and name not in self._repeated:
            assert name not in self._filled, f"{name} has a second gradient and is not repeated"
        super().contributed(name)

    def _memory(
        self, layout: BucketLayout, shard: range, device: torch.device
    ) -> tuple[Tensor, Tensor | None]:
        return torch.zeros(len(shard), dtype=torch.float32, device=device), None

    def _buffer(self, bucket: Bucket) -> Tensor:
        """Return the buffer of a bucket, which is allocated if there is none."""
        if bucket.buffer is not None:
            return bucket.buffer
        if self._order is None:
            complete = [
                each for each in self._filling if self._repeated.isdisjoint(each.layout.sizes)
            ]
            if len(complete) > 1:
                self._send(complete[0])
        else:  # a sum in progress is one of the pass before
            assert bucket.pending is None or bucket.arrived == 0, _late(bucket)
        while len(self._sums) > 1 or bucket.pending is not None:
            self._collect()
        bucket.buffer = torch.zeros(
            bucket.layout.length, dtype=torch.float32, device=bucket.reduced.device
        )
        self._filling.append(bucket)
        return bucket.buffer

    def _send_rest(self) -> None:
        if self._order is not None:
            super()._send_rest()
            return
        self._learn()
        for bucket in tuple(self._filling):  # the others are already sent, or have no gradients
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        self._buffer(bucket)
        super()._send(bucket)
        self._filling.remove(bucket)
        bucket.buffer = None  # the sum holds it

    def _store(self, bucket: Bucket, total: Tensor) -> None:
        bucket.reduced.add_(total)


def build_grad_sync(
    parameters: Mapping[str, nn.Parameter],
    mesh: ProcessMesh,
    config: ParallelConfig,
    *,
    repeated: frozenset[str] = frozenset(),
    **options: Any,
) -> GradSync:
    """Return the main gradients for `config.data_parallel_sharding`.

    The arguments are those of `GradSync` and, for divided gradients, of `DividedGradSync`.
    """
    sharding = Sharding.of(config.data_parallel_sharding, mesh.data_context_parallel.size)
    if sharding.divides("gradients"):
        return DividedGradSync(parameters, mesh, config, repeated=repeated, **options)
    return GradSync(parameters, mesh, config, **options)


def _late(bucket: Bucket) -> str:
    return f"a gradient came after its bucket was full: {list(bucket.layout.sizes)}"
