"""Prerequisites of a DeepSpeed engine, with and without a pipeline.

`import_deepspeed` is the only way to import DeepSpeed: it selects the available hardware, silences
the log, and prevents compilation on the ranks. `MeshUnit` is the process mesh with the interface of
Megatron-LM's `mpu`.
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
"""Operator for sums on one host's CPUs, which DeepSpeed otherwise compiles when it initializes its
communication."""
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
    """Import DeepSpeed, configured for CPUs and gloo if there is no GPU.

    An existing value of DS_ACCELERATOR is kept.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed's own calls cause one of these warnings for each kind and rank.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed

    package: ModuleType = deepspeed
    package.utils.logger.setLevel(logging.WARNING)
    package.ops.__compatible_ops__[_COMPILED_ON_THE_WAY] = False
    # DeepSpeed prints its memory at this point, whatever `memory_breakdown` is.
    package.runtime.bf16_optimizer.see_memory_usage = lambda *_, **__: None
    return package


class MeshUnit:
    """Process groups of a mesh in the form of Megatron-LM's `mpu`.

    Model parallel here means tensor parallel: DeepSpeed wraps one pipeline stage.
    """

    def __init__(self, mesh: ProcessMesh) -> None:
        """Create process groups for the groups of one rank, for which the mesh has none.

        Collective.
        """
        self.data_parallel = _with_group(mesh.data_parallel, mesh.layout, "data")
        """Ranks with the same weights, with a process group even for a single rank."""
        self.tensor_parallel = _with_group(mesh.tensor_parallel, mesh.layout, "tensor")
        """Ranks with the other parts of the same layers, with a process group even for a single
        rank."""

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the ranks with the same weights."""
        return self.data_parallel.group

    def get_data_parallel_rank(self) -> int:
        """Return this rank's number in the data-parallel group."""
        return self.data_parallel.rank

    def get_data_parallel_world_size(self) -> int:
        """Return the size of the data-parallel group."""
        return self.data_parallel.size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the process group of the ranks with the other parts of the same layers."""
        return self.tensor_parallel.group

    def get_model_parallel_rank(self) -> int:
        """Return this rank's number in the tensor-parallel group."""
        return self.tensor_parallel.rank

    def get_model_parallel_world_size(self) -> int:
        """Return the size of the tensor-parallel group."""
        return self.tensor_parallel.size

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size


def _with_group(axis_group: ParallelGroup, layout: RankLayout, axis: str) -> ParallelGroup:
    """Return the axis's group; if it has one rank, create a process group for every rank."""
    if axis_group.group is not None:
        return axis_group
    for ranks in layout.groups(axis):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            axis_group = ParallelGroup(group, 0, 1, axis)
    return axis_group


def join_ranks() -> None:
    """Let DeepSpeed use the existing process group.

    A process that runs without other ranks gets its own group.
    """
    os.environ.setdefault("LOCAL_RANK", "0")  # required by a pipeline
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    import_deepspeed().comm.init_distributed(verbose=False, timeout=timedelta(minutes=30))


def show_log(settings: Mapping[str, Any]) -> None:
    """Show DeepSpeed's log lines if a setting requests any."""
    requested = settings["steps_per_print"] != NEVER or any(
        value.get("enabled") if isinstance(value, Mapping) else value
        for value in (settings.get(name) for name in _REPORTS)
        if value
    )
    import_deepspeed().utils.logger.setLevel(logging.INFO if requested else logging.WARNING)


def prepare_parameters(model: nn.Module, mesh: ProcessMesh) -> None:
    """Mark the parameters divided over tensor-parallel ranks, and sum partial gradients.

    DeepSpeed counts an unmarked parameter in the gradient norm only on the first rank.
    """
    divided, partial, tensor = partitions(model), partial_gradients(model), mesh.tensor_parallel
    for name, parameter in model.named_parameters():
        parameter.model_parallel = name in divided and tensor.size > 1  # type: ignore[attr-defined]
        if name in partial and tensor.size > 1:
            parameter.register_hook(lambda gradient: all_reduce(gradient, tensor))  # type: ignore[no-untyped-call]


def checkpoint_activations(
    model: nn.Module, family: Family, settings: dict[str, Any], mpu: Any
) -> None:
    """Use DeepSpeed's activation checkpointing in layers that recompute everything.

    It can partition the saved activations or move them to host memory. T5 is excluded: DeepSpeed
    would lose the gradients of the relative bias and the encoder's output, which its layers share.
    """
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    if family == "t5" or not any(layer.recompute == "full" for layer in layers):
        return
    checkpointing = import_deepspeed().checkpointing
    # Activations in host memory must not be moved there: that would empty them.
    leaves = {} if torch.cuda.is_available() else {"checkpoint_in_cpu": False}
    checkpointing.configure(mpu, deepspeed_config=settings, **leaves)
    for layer in layers:
        layer.recomputed = checkpointing.checkpoint
