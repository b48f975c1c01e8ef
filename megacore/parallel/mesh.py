"""The one description of who works with whom: built at launch, passed explicitly, global nowhere."""

from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megacore.errors import ParallelLayoutError
from megacore.parallel.rank_layout import AXES, RankLayout


@dataclass(frozen=True)
class ParallelGroup:
    """This rank's place among the ranks that share one kind of work."""

    group: dist.ProcessGroup | None = None
    """The process group; None when this rank works alone, and then nothing is communicated."""
    rank: int = 0
    """This rank's number within the group."""
    size: int = 1
    """Ranks in the group."""


ALONE = ParallelGroup()
"""A group of one."""


@dataclass(frozen=True)
class ProcessMesh:
    """This rank's groups along each axis of the layout (dp x pp x tp)."""

    layout: RankLayout = field(default_factory=RankLayout)
    """Sizes of the axes."""
    rank: int = 0
    """This process's number in the world."""
    data_parallel: ParallelGroup = ALONE
    """Ranks that hold the same weights and see other samples."""
    pipeline_parallel: ParallelGroup = ALONE
    """Ranks that hold the other stages of this replica."""
    tensor_parallel: ParallelGroup = ALONE
    """Ranks that hold the other parts of the same layers."""

    @classmethod
    def serial(cls) -> "ProcessMesh":
        """One process that works alone; needs no process group."""
        return cls()

    @classmethod
    def build(cls, layout: RankLayout, *, device_type: str = "cpu") -> "ProcessMesh":
        """This process's mesh; every rank of the default process group calls it.

        Args:
            layout: sizes of the axes; their product is the number of processes.
            device_type: "cpu" (gloo) or "cuda" (NCCL).

        Raises:
            ParallelLayoutError: the layout has another number of ranks than the default process group.
        """
        if layout.world_size != dist.get_world_size():
            raise ParallelLayoutError(
                f"the layout data {layout.data} x pipeline {layout.pipeline} x tensor {layout.tensor} needs "
                f"{layout.world_size} ranks, {dist.get_world_size()} were started: start {layout.world_size}"
            )
        mesh = init_device_mesh(device_type, layout.shape, mesh_dim_names=AXES)
        groups = {
            axis: ParallelGroup(mesh.get_group(axis), mesh.get_local_rank(axis), size) if size > 1 else ALONE
            for axis, size in zip(AXES, layout.shape, strict=True)
        }
        return cls(
            layout=layout,
            rank=dist.get_rank(),
            data_parallel=groups["data"],
            pipeline_parallel=groups["pipeline"],
            tensor_parallel=groups["tensor"],
        )

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.layout.world_size
