"""Gradient summation over data-parallel ranks during the backward pass (Li et al. 2020)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.config.parallel import ParallelConfig
from megacore.data_parallel.buckets import (
    BucketLayout,
    plan_buckets,
    shard_of,
    start_reduce_scatter_,
)
from megacore.kernels.weight_gradient import WeightGradient, reference
from megacore.parallel.collectives import Pending, start_all_reduce
from megacore.parallel.mesh import ParallelGroup, ProcessMesh

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
