"""Division of global parameters over tensor-parallel ranks."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from megacore.errors import ParallelLayoutError
from megacore.parallel.mesh import ParallelGroup


@dataclass(frozen=True)
class Partition:
    """Even division of a tensor along one dimension."""

    dim: int
    """Dimension that is divided."""
    rank: int
    """Number of this part."""
    size: int
    """Number of parts."""

    def shard(self, whole: Tensor) -> Tensor:
        """Return this part of the whole tensor, as a view."""
        return whole.chunk(self.size, dim=self.dim)[self.rank]

    def global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole tensor of which `shape` is one part."""
        return tuple(
            length * self.size if dim == self.dim else length for dim, length in enumerate(shape)
        )


@runtime_checkable
class Partitioned(Protocol):
    """Module with divided parameters."""

    def partitions(self) -> dict[str, Partition]:
        """Return the division of its own parameters, by name; others are whole on every rank."""
        ...


def partitions(model: nn.Module) -> dict[str, Partition]:
    """Return the division of every divided parameter in `model`, by global name."""
    return {
        f"{prefix}.{name}" if prefix else name: partition
        for prefix, module in model.named_modules()
        if isinstance(module, Partitioned)
        for name, partition in module.partitions().items()
        if partition.size > 1
    }


def divide(length: int, tp: ParallelGroup, what: str) -> int:
    """Return `length / tp.size`. Raises ParallelLayoutError with `what` if it is not an integer."""
    if length % tp.size:
        raise ParallelLayoutError(
            f"{what} {length} is not a multiple of the tensor parallel size {tp.size}: "
            f"use {(length // tp.size + 1) * tp.size} or another size"
        )
    return length // tp.size


@runtime_checkable
class PartialGradients(Protocol):
    """Module with replicated parameters that each rank uses only on its part of the sequence."""

    def partial_gradients(self) -> frozenset[str]:
        """Return the names of this module's parameters with partial gradients.

        The tensor-parallel ranks must sum these gradients.
        """
        ...


def partial_gradients(model: nn.Module) -> frozenset[str]:
    """Return the global names of parameters whose gradients are partial on tensor-parallel ranks.

    With sequence parallelism these are norms and position embeddings; without it there are none.
    """
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, PartialGradients)
        for name in module.partial_gradients()
    )
