"""Rank arithmetic of 3D parallelism, without processes (Narayanan et al. 2021, arXiv:2104.04473).

Ranks are numbered as Megatron-LM numbers them: tensor parallel fastest, so that a group shares a
node's links, then data parallel, then pipeline parallel. Every group falls out of one reshaped
arange.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megacore.errors import ParallelLayoutError

AXES = ("pipeline", "data", "tensor")
"""Axes of the grid, slowest first."""


class Coordinate(NamedTuple):
    """A rank's place along each axis."""

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True)
class RankLayout:
    """How many ranks share each kind of work; the world has data x pipeline x tensor ranks."""

    data: int = 1
    """Replicas, each with its own part of the batch (dp)."""
    pipeline: int = 1
    """Stages of consecutive layers (pp)."""
    tensor: int = 1
    """Parts of each layer (tp)."""

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ParallelLayoutError(
                    f"{axis} parallel size is {getattr(self, axis)}: it counts ranks and must be "
                    "at least 1"
                )

    @classmethod
    def of_world(cls, world_size: int, *, pipeline: int = 1, tensor: int = 1) -> "RankLayout":
        """The layout of `world_size` ranks, data parallel over what `pipeline` and `tensor` leave.

        Raises ParallelLayoutError when they do not divide it.
        """
        model_ranks = pipeline * tensor
        if model_ranks < 1 or world_size < 1 or world_size % model_ranks:
            raise ParallelLayoutError(
                f"{world_size} ranks are not a multiple of tensor {tensor} x pipeline {pipeline} = "
                f"{model_ranks} ranks per replica: start "
                f"{model_ranks * max(1, world_size // max(1, model_ranks))} ranks"
            )
        return cls(data=world_size // model_ranks, pipeline=pipeline, tensor=tensor)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.data * self.pipeline * self.tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes along `AXES`."""
        return self.pipeline, self.data, self.tensor

    @property
    def grid(self) -> npt.NDArray[np.int64]:
        """Every rank at its coordinates (pp, dp, tp)."""
        return np.arange(self.world_size, dtype=np.int64).reshape(self.shape)

    def coordinate(self, rank: int) -> Coordinate:
        """Where `rank` is in the grid."""
        return Coordinate(*(int(index) for index in np.unravel_index(rank, self.shape)))

    def rank(self, coordinate: Coordinate) -> int:
        """Who is at `coordinate`."""
        return int(self.grid[coordinate])

    def groups(self, *axes: str) -> list[list[int]]:
        """The groups of ranks that differ along `axes` alone, in rank order; they partition all.

        `groups("tensor")` are the tensor-parallel groups, `groups("pipeline", "tensor")` the
        model-parallel ones.
        """
        together = [AXES.index(axis) for axis in AXES if axis in axes]
        apart = [index for index in range(len(AXES)) if index not in together]
        size = int(np.prod([self.shape[index] for index in together], dtype=np.int64))
        members: list[list[int]] = self.grid.transpose(apart + together).reshape(-1, size).tolist()
        return members
