"""Weights that replicas divide, gathered unit by unit while they are used (ZeRO stage 3).

A unit is a module, such as a layer, whose weights are used only in its forward and backward pass.
Its weights are gathered before either, and freed after it; meanwhile those of the next unit are
gathered. The other weights, the root, stay gathered during the passes of an iteration. So a rank
has, besides its shards, the root and the weights of two units.

Autograd keeps references to weights. Freeing therefore empties the storage of a flat buffer, of
which parameters and saved tensors are views, and gathering fills it again, as in FairScale's and
PyTorch's FullyShardedDataParallel (Zhao et al. 2023, arXiv:2304.11277).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megacore.data_parallel.grad_sync import start_all_gather_
from megacore.parallel.collectives import Pending
from megacore.parallel.mesh import ParallelGroup


class FlatWeights:
    """Weights of a bucket in a flat buffer, whose views are the parameters."""

    def __init__(
        self,
        length: int,
        shard: range,
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate a buffer of zeros.

        Args:
            length: number of elements.
            shard: elements that this rank updates.
            group: the replicas.
            dtype: type of the weights.
            device: device of the weights.
        """
        self._group, self._range = group, shard
        self.buffer = torch.zeros(length, dtype=dtype, device=device)
        """Weights of all shards; without storage while they are freed."""
        self._bytes = self.buffer.nbytes
        self.shard = self.buffer[shard.start : shard.stop]
        """This rank's shard, which the optimizer updates: a view of the buffer, or a tensor of its
        own after `divide`."""
        self.divided = False
        """True if the buffer can be freed."""

    def divide(self) -> None:
        """Keep only this rank's shard of the buffer's content, in a tensor of its own."""
        self.shard, self.divided = self.shard.clone(), True
        self.free()

    def start_gather(self) -> Pending:
        """Start filling the buffer with all shards."""
        if self.divided:
            self.buffer.untyped_storage().resize_(self._bytes)
            self.buffer[self._range.start : self._range.stop].copy_(self.shard)
        return start_all_gather_(self.buffer, self._group)

    def free(self) -> None:
        """Free the memory of the buffer."""
        self.buffer.untyped_storage().resize_(0)


@dataclass
class Unit:
    """Weights that are gathered together."""

    module: nn.Module | None
    """Module that uses them; None for the root."""
    weights: list[FlatWeights] = field(default_factory=list)
    """Flat buffers of the weights."""
    in_backward: bool = True
    """True if the backward pass needs the weights too."""
    pending: list[Pending] | None = None
    """Gathering in progress."""
    gathered: bool = False
    """True if the weights are gathered, or being gathered."""

    def start(self) -> None:
        """Start gathering the weights, if they are not gathered."""
        if not self.gathered:
            self.pending = [weights.start_gather() for weights in self.weights]
            self.gathered = True

    def need(self) -> None:
        """Wait until the weights are gathered."""
        self.start()
        for work in self.pending or ():
            work.wait()
        self.pending = None

    def free(self) -> None:
        """Free the weights."""
        if self.gathered:
            self.need()
            for weights in self.weights:
                weights.free()
            self.gathered = False


class WeightGatherer:
    """Gathers and frees the weights of units at hooks of their modules and of autograd.

    On a GPU, a collective runs on NCCL's stream after the work that was queued before it, and the
    computation waits for it only when a unit needs its weights: the next unit's are gathered while
    the present one computes. In the order of autograd, every operation of a unit's backward pass
    precedes those of the unit before it, because it was recorded later.
    """

    def __init__(self, units: Sequence[Unit], root: Unit) -> None:
        """Register the hooks.

        Args:
            units: units in the order of their forward passes; their weights are freed.
            root: the other weights.
        """
        self._units, self._root = units, root
        self._backward: int | None = None
        for number, unit in enumerate(units):
            assert unit.module is not None
            unit.module.register_forward_pre_hook(self._before_forward(number))
            unit.module.register_forward_hook(self._after_forward(number))

    @contextmanager
    def gathered_root(self) -> Iterator[None]:
        """Keep the root gathered, and free everything at the end."""
        self._root.start()
        self._start(0)
        self._root.need()
        try:
            yield
        finally:
            self._backward = None
            for unit in (*self._units, self._root):
                unit.free()

    def forward_without_samples(self) -> None:
        """Take part in the gathering of a forward pass that other replicas compute."""
        for number, unit in enumerate(self._units):
            unit.need()
            self._start(number + 1)
            unit.free()

    def after_backward(self) -> None:
        """Free the weights of the last unit of a backward pass."""
        if self._backward is not None:
            self._units[self._backward].free()
            self._backward = None

    def _start(self, number: int) -> None:
        if 0 <= number < len(self._units):
            self._units[number].start()

    def _before_forward(self, number: int) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            self._units[number].need()
            self._start(number + 1)

        return hook

    def _after_forward(self, number: int) -> Any:
        unit = self._units[number]

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            trains = torch.is_grad_enabled() and output.requires_grad
            if trains and unit.in_backward:
                output.register_hook(self._before_backward(number))  # type: ignore[no-untyped-call]
            # The backward pass begins with the last unit, which therefore stays.
            if not (trains and unit.in_backward and number == len(self._units) - 1):
                unit.free()

        return hook

    def _before_backward(self, number: int) -> Any:
        def hook(gradient: Tensor) -> None:
            if self._backward not in (None, number):
                self.after_backward()
            self._units[number].need()
            self._backward = number
            if number and self._units[number - 1].in_backward:
                self._start(number - 1)

        return hook
