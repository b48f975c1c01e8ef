"""What a DeepSpeed engine needs before it can be made, with and without a pipeline."""

import logging
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megacore.config.run import RunConfig
from megacore.engine.deepspeed.settings import NEVER
from megacore.engine.deepspeed.setup import import_deepspeed
from megacore.models.layers.transformer import TransformerLayer
from megacore.parallel.collectives import all_reduce
from megacore.parallel.mesh import ProcessMesh
from megacore.tensor_parallel import partial_gradients, partitions

_REPORTS = ("wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler", "comms_logger")
"""Settings that write to DeepSpeed's log."""


def join_ranks() -> None:
    """Let DeepSpeed use the process group that is there; a process that works alone gets one of its own."""
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
    """Say which parameters are divided over tensor-parallel ranks, and sum gradients that are a part on each.

    DeepSpeed counts a parameter in the gradient's norm on the first rank alone unless it says that it is divided.
    """
    divided, partial, tensor = partitions(model), partial_gradients(model), mesh.tensor_parallel
    for name, parameter in model.named_parameters():
        parameter.model_parallel = name in divided and tensor.size > 1  # type: ignore[attr-defined]
        if name in partial and tensor.size > 1:
            parameter.register_hook(lambda gradient: all_reduce(gradient, tensor))  # type: ignore[no-untyped-call]


def checkpoint_activations(model: nn.Module, config: RunConfig, settings: dict[str, Any], mpu: Any) -> None:
    """Let layers that recompute all do it DeepSpeed's way, which can divide what is kept or move it to main memory.

    Not T5's: it would lose the gradients of what layers share, the relative bias and the encoder's output.
    """
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    if config.family == "t5" or not any(layer.recompute == "full" for layer in layers):
        return
    checkpointing = import_deepspeed().checkpointing
    # What lies in main memory already must stay: moving it there would empty it.
    leaves = {} if torch.cuda.is_available() else {"checkpoint_in_cpu": False}
    checkpointing.configure(mpu, deepspeed_config=settings, **leaves)
    for layer in layers:
        layer.recomputed = checkpointing.checkpoint
