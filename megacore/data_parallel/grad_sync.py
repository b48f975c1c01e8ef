"""Averaging gradients over data-parallel ranks while backward still runs (Li et al. 2020, PyTorch Distributed)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacore.parallel.mesh import ParallelGroup

_MIB = 1 << 20


@dataclass
class _Bucket:
    """Gradients that travel together."""

    buffer: Tensor
    """Flat, fp32."""
    names: tuple[str, ...]
    """Parameters whose gradients it holds."""
    missing: set[str] = field(default_factory=set)
    """Those whose gradient of this iteration is not complete yet."""


class GradSync:
    """Main gradients in fp32, all-reduced bucket by bucket as soon as backward has filled them.

    Buckets are filled in reverse order of the parameters, roughly the order in which backward reaches them. Where
    a parameter is fp32 its `.grad` is a view of the bucket, and autograd accumulates into it without a copy; a
    gradient of lower precision is added to its view and dropped. A parameter that is used twice (tied weights)
    gets one complete gradient from autograd, hence one place.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: ParallelGroup, bucket_mb: float) -> None:
        """Allocate the buckets and hook into autograd.

        Args:
            parameters: by global name, each tied parameter once; all on one device.
            group: data-parallel ranks; with one rank nothing is communicated.
            bucket_mb: size of a bucket in MiB of fp32; a larger parameter gets a bucket of its own.
        """
        self._parameters = dict(parameters)
        self._group = group
        self._buckets = [
            _Bucket(_buffer([self._parameters[name] for name in names]), names)
            for names in plan_buckets({name: p.numel() for name, p in self._parameters.items()}, bucket_mb)
        ]
        self.gradients = {name: view for bucket in self._buckets for name, view in self._views(bucket)}
        """Main gradients by name: fp32 views shaped like the parameters."""
        self._last_micro_step = False
        self._launched = 0
        self._works: list[dist.Work] = []
        for bucket in self._buckets:
            for name in bucket.names:
                self._hook(name, bucket)

    @property
    def buffers(self) -> list[Tensor]:
        """The flat fp32 buffers, which together hold every gradient element once."""
        return [bucket.buffer for bucket in self._buckets]

    def zero(self) -> None:
        """Start a new iteration with gradients of zero."""
        torch._foreach_zero_(self.buffers)
        for name, parameter in self._parameters.items():
            parameter.grad = self.gradients[name] if parameter.dtype == torch.float32 else None
        for bucket in self._buckets:
            bucket.missing = set(bucket.names)
        self._launched = 0

    @contextmanager
    def micro_step(self, *, last: bool) -> Iterator[None]:
        """Around one backward pass: only the last of an iteration lets full buckets travel."""
        self._last_micro_step = last
        try:
            yield
        finally:
            self._last_micro_step = False

    def finish(self) -> None:
        """Wait until every main gradient is the mean over the ranks; parameters without a gradient count as zero."""
        self._launch(len(self._buckets))
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._group.size > 1 and not self._averages:
            torch._foreach_div_(self.buffers, float(self._group.size))

    @property
    def _averages(self) -> bool:
        """Whether the back end divides by itself."""
        return self._buckets[0].buffer.is_cuda

    def _views(self, bucket: _Bucket) -> Iterator[tuple[str, Tensor]]:
        sizes = [self._parameters[name].numel() for name in bucket.names]
        for name, part in zip(bucket.names, torch.split(bucket.buffer, sizes), strict=True):
            yield name, part.view(self._parameters[name].shape)

    def _hook(self, name: str, bucket: _Bucket) -> None:
        view = self.gradients[name]

        def accumulated(parameter: Tensor) -> None:
            if parameter.grad is not None and parameter.grad is not view:
                view.add_(parameter.grad)
                parameter.grad = None
            if self._last_micro_step:
                bucket.missing.discard(name)
                self._launch(self._complete())

        self._parameters[name].register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]

    def _complete(self) -> int:
        """Number of leading buckets that are full: every rank launches them in the same order."""
        complete = self._launched
        while complete < len(self._buckets) and not self._buckets[complete].missing:
            complete += 1
        return complete

    def _launch(self, end: int) -> None:
        if self._group.size > 1:
            operation = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
            for bucket in self._buckets[self._launched : end]:
                work = dist.all_reduce(bucket.buffer, operation, group=self._group.group, async_op=True)
                assert work is not None
                self._works.append(work)
        self._launched = max(self._launched, end)


def plan_buckets(sizes: Mapping[str, int], bucket_mb: float) -> list[tuple[str, ...]]:
    """Divide parameters, in reverse order, into buckets of at most `bucket_mb` MiB of fp32.

    Args:
        sizes: elements of each parameter, by name, in the model's order.
        bucket_mb: limit of a bucket; a parameter beyond it is a bucket of its own.
    """
    limit = bucket_mb * _MIB / 4
    buckets: list[list[str]] = []
    filled = 0
    for name, size in reversed(list(sizes.items())):
        if not buckets or filled + size > limit:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += size
    return [tuple(names) for names in buckets]


def _buffer(parameters: list[nn.Parameter]) -> Tensor:
    elements = sum(parameter.numel() for parameter in parameters)
    return torch.zeros(elements, dtype=torch.float32, device=parameters[0].device)
