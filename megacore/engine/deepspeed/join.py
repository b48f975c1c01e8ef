"""What a DeepSpeed engine needs before it can be made, with and without a pipeline.

`import_deepspeed` is the one way to import it: for the hardware that is here, quietly, and so that
no rank compiles anything. `MeshUnit` is the process mesh with the methods of Megatron-LM's `mpu`.
"""

import logging
import os
import warnings
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megacore.config.model import Family
from megacore.engine.deepspeed.settings import NEVER
from megacore.models.layers.transformer import TransformerLayer
from megacore.parallel.collectives import all_reduce
from megacore.parallel.mesh import ParallelGroup, ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.tensor_parallel import partial_gradients, partitions

_COMPILED_ON_THE_WAY = "deepspeed_shm_comm"
"""An operator for sums on one host's CPUs, which DeepSpeed otherwise compiles when it joins the
ranks."""
_REPORTS = (
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "flops_profiler",
    "comms_logger",
)
"""Settings that write to DeepSpeed's log."""


@cache
def import_deepspeed() -> ModuleType:
    """The package, for CPUs and gloo where there is no GPU.

    A DS_ACCELERATOR that is set already stays.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Of DeepSpeed's own calls, one for each kind and rank.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed

    package: ModuleType = deepspeed
    package.utils.logger.setLevel(logging.WARNING)
    package.ops.__compatible_ops__[_COMPILED_ON_THE_WAY] = False
    # It prints its memory while it is made, whatever `memory_breakdown` says.
    package.runtime.bf16_optimizer.see_memory_usage = lambda *_, **__: None
    return package


class MeshUnit:
    """Model parallel here means tensor parallel: DeepSpeed wraps one pipeline stage."""

    def __init__(self, mesh: ProcessMesh) -> None:
        """Take the mesh's groups, and make those of one rank, which the mesh has none for.

        Collective.
        """
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


def join_ranks() -> None:
    """Let DeepSpeed use the process group that is there.

    A process that works alone gets one of its own.
    """
    os.environ.setdefault("LOCAL_RANK", "0")  # a pipeline asks for it
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    import_deepspeed().comm.init_distributed(verbose=False, timeout=timedelta(minutes=30))


def show_log(settings: Mapping[str, Any]) -> None:
    """Let DeepSpeed's lines through where the settings ask for some."""
    asked = settings["steps_per_print"] != NEVER or any(
        value.get("enabled") if isinstance(value, Mapping) else value
        for value in (settings.get(name) for name in _REPORTS)
        if value
    )
    import_deepspeed().utils.logger.setLevel(logging.INFO if asked else logging.WARNING)


def prepare_parameters(model: nn.Module, mesh: ProcessMesh) -> None:
    """Say which parameters are divided over tensor-parallel ranks.

    Gradients that are a part on each of them are summed.

    DeepSpeed counts a parameter in the gradient's norm on the first rank alone unless it says that
    it is divided.
    """
    divided, partial, tensor = partitions(model), partial_gradients(model), mesh.tensor_parallel
    for name, parameter in model.named_parameters():
        parameter.model_parallel = name in divided and tensor.size > 1  # type: ignore[attr-defined]
        if name in partial and tensor.size > 1:
            parameter.register_hook(lambda gradient: all_reduce(gradient, tensor))  # type: ignore[no-untyped-call]


def checkpoint_activations(
    model: nn.Module, family: Family, settings: dict[str, Any], mpu: Any
) -> None:
    """Let layers that recompute all do it DeepSpeed's way.

    That can divide what is kept or move it to main memory.

    Not T5's: it would lose the gradients of what layers share, the relative bias and the encoder's
    output.
    """
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    if family == "t5" or not any(layer.recompute == "full" for layer in layers):
        return
    checkpointing = import_deepspeed().checkpointing
    # What lies in main memory already must stay: moving it there would empty it.
    leaves = {} if torch.cuda.is_available() else {"checkpoint_in_cpu": False}
    checkpointing.configure(mpu, deepspeed_config=settings, **leaves)
    for layer in layers:
        layer.recomputed = checkpointing.checkpoint
