"""Which part of a global parameter a rank holds."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from megacore.errors import ParallelLayoutError
from megacore.parallel.mesh import ParallelGroup


@dataclass(frozen=True)
class Partition:
    """An even division of a tensor along one dimension."""

    dim: int
    """The dimension that is divided."""
    rank: int
    """Which part this is."""
    size: int
    """Number of parts."""

    def shard(self, whole: Tensor) -> Tensor:
        """This part of the whole tensor, as a view."""
        return whole.chunk(self.size, dim=self.dim)[self.rank]

    def global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the whole tensor of which `shape` is one part."""
        return tuple(
            length * self.size if dim == self.dim else length for dim, length in enumerate(shape)
        )


@runtime_checkable
class Partitioned(Protocol):
    """A module that holds parts of parameters."""

    def partitions(self) -> dict[str, Partition]:
        """How its own parameters are divided, by name; those not named are whole on every rank."""
        ...


def partitions(model: nn.Module) -> dict[str, Partition]:
    """The division of every divided parameter below `model`, by global name."""
    return {
        f"{prefix}.{name}" if prefix else name: partition
        for prefix, module in model.named_modules()
        if isinstance(module, Partitioned)
        for name, partition in module.partitions().items()
        if partition.size > 1
    }


def divide(length: int, tp: ParallelGroup, what: str) -> int:
    """`length / tp.size`. Raises ParallelLayoutError naming `what` when it is not whole."""
    if length % tp.size:
        raise ParallelLayoutError(
            f"{what} {length} is not a multiple of the tensor parallel size {tp.size}: "
            f"use {(length // tp.size + 1) * tp.size} or another size"
        )
    return length // tp.size


@runtime_checkable
class PartialGradients(Protocol):
    """A module with replicated parameters that each rank uses on its part of the sequence alone."""

    def partial_gradients(self) -> frozenset[str]:
        """Names below this module of parameters whose gradients tensor-parallel ranks must sum."""
        ...


def partial_gradients(model: nn.Module) -> frozenset[str]:
    """Every parameter below `model`, by global name, whose gradient each rank has a part of.

    Ranks are the tensor-parallel ones.

    With sequence parallelism norms and position embeddings; none without.
    """
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, PartialGradients)
        for name in module.partial_gradients()
    )
