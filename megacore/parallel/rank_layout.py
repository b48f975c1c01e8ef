"""Rank arithmetic of parallelism, without processes (Narayanan et al. 2021, arXiv:2104.04473).

Ranks are numbered as in Megatron-LM: the tensor axis varies fastest, so that a tensor-parallel
group shares a host's links, then the context axis, the data axis and the pipeline axis. Every group
is a slice of one reshaped arange.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megacore.config.layouts import ParallelLayout
from megacore.errors import ParallelLayoutError

AXES = ("pipeline", "data", "context", "tensor")
"""Axes of the grid, slowest first."""


class Coordinate(NamedTuple):
    """Position of a rank along each axis."""

    pipeline: int
    data: int
    context: int
    tensor: int


@dataclass(frozen=True, kw_only=True)
class RankLayout(ParallelLayout):
    """Sizes of a parallel layout, and the place of each rank in it.

    `parallel.mesh.ProcessMesh` has their process groups.
    """

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ParallelLayoutError(
                    f"{axis} parallel size is {getattr(self, axis)}: it counts ranks and must be "
                    "at least 1"
                )

    @classmethod
    def of_world(
        cls, world_size: int, *, pipeline: int = 1, tensor: int = 1, context: int = 1
    ) -> "RankLayout":
        """Return the layout of `world_size` ranks; data parallelism gets the ranks that remain.

        Raises ParallelLayoutError if `pipeline` x `tensor` x `context` does not divide
        `world_size`.
        """
        model_ranks = pipeline * tensor * context
        if model_ranks < 1 or world_size < 1 or world_size % model_ranks:
            raise ParallelLayoutError(
                f"{world_size} ranks are not a multiple of tensor {tensor}"
                f"{f' x context {context}' if context > 1 else ''} x pipeline {pipeline} = "
                f"{model_ranks} ranks per replica: start "
                f"{model_ranks * max(1, world_size // max(1, model_ranks))} ranks"
            )
        return cls(
            data=world_size // model_ranks, pipeline=pipeline, tensor=tensor, context=context
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.data * self.pipeline * self.tensor * self.context

    @property
    def copies(self) -> int:
        """Number of ranks with the same weights, which sum gradients: data x context."""
        return self.data * self.context

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes along `AXES`."""
        return self.pipeline, self.data, self.context, self.tensor

    @property
    def grid(self) -> npt.NDArray[np.int64]:
        """Array of the ranks at their coordinates (pp, dp, cp, tp)."""
        return np.arange(self.world_size, dtype=np.int64).reshape(self.shape)

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinate of `rank` in the grid."""
        return Coordinate(*(int(index) for index in np.unravel_index(rank, self.shape)))

    def rank(self, coordinate: Coordinate) -> int:
        """Return the rank at `coordinate`."""
        return int(self.grid[coordinate])

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks that differ only along `axes`.

        Every rank is in one group, and the ranks of a group are in order. `groups("tensor")` are
        the tensor-parallel groups, `groups("pipeline", "tensor")` the model-parallel groups.
        """
        together = [AXES.index(axis) for axis in AXES if axis in axes]
        apart = [index for index in range(len(AXES)) if index not in together]
        size = int(np.prod([self.shape[index] for index in together], dtype=np.int64))
        members: list[list[int]] = self.grid.transpose(apart + together).reshape(-1, size).tolist()
        return members
