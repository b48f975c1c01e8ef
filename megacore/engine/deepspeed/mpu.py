"""The process mesh as DeepSpeed asks for it: the methods of Megatron-LM's `mpu`."""

import torch.distributed as dist

from megacore.parallel.mesh import ParallelGroup, ProcessMesh
from megacore.parallel.rank_layout import RankLayout


class MeshUnit:
    """Model parallel here means tensor parallel: DeepSpeed wraps one pipeline stage."""

    def __init__(self, mesh: ProcessMesh) -> None:
        """Take the mesh's groups, and make those of one rank, which the mesh has none for. Collective."""
        self.data_parallel = _with_group(mesh.data_parallel, mesh.layout, "data")
        """Ranks that hold the same weights, with a process group even where there is one."""
        self.tensor_parallel = _with_group(mesh.tensor_parallel, mesh.layout, "tensor")
        """Ranks that hold the other parts of the same layers, likewise."""

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold the same weights."""
        return self.data_parallel.group

    def get_data_parallel_rank(self) -> int:
        """This rank's number among them."""
        return self.data_parallel.rank

    def get_data_parallel_world_size(self) -> int:
        """Their number."""
        return self.data_parallel.size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold the other parts of the same layers."""
        return self.tensor_parallel.group

    def get_model_parallel_rank(self) -> int:
        """This rank's number among them."""
        return self.tensor_parallel.rank

    def get_model_parallel_world_size(self) -> int:
        """Their number."""
        return self.tensor_parallel.size

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size


def _with_group(own: ParallelGroup, layout: RankLayout, axis: str) -> ParallelGroup:
    """The axis's group; where it has one rank each, a process group for every rank."""
    if own.group is not None:
        return own
    for ranks in layout.groups(axis):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own = ParallelGroup(group, 0, 1, axis)
    return own
