"""What a rank does before its work: its threads, its device, its place among the others."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megacore.engine.native import DTYPES
from megacore.errors import ParallelLayoutError, TrainingStoppedError
from megacore.hardware import resolve_precision
from megacore.jobs.run import Job, RankJob
from megacore.observe.heartbeat import ENDED, Heartbeat
from megacore.observe.timers import Timers
from megacore.parallel.mesh import ProcessMesh
from megacore.pipeline_parallel.partition import shared_stages
from megacore.plan.layouts import layout_of
from megacore.ranks.rank import begin_heartbeat

if TYPE_CHECKING:
    from megacore.jobs.model import ModelJob
    from megacore.models.base import Model


def choose_device() -> torch.device:
    """This rank's GPU, by LOCAL_RANK, else the CPU.

    Raises ParallelLayoutError for a rank without a GPU of its own.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= gpus:
        raise ParallelLayoutError(
            f"local rank {local_rank} has no GPU of its own, this machine has {gpus}: "
            f"set launch.nproc_per_node to {gpus}"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def started_ranks(job: RankJob) -> int:
    """Number of processes of this job.

    Raises ParallelLayoutError when the job is for another number.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != job.ranks:
        raise ParallelLayoutError(
            f"the job is for {job.ranks} ranks and {world_size} were started: "
            f"start it with --nproc-per-node {job.ranks}"
        )
    return world_size


@contextmanager
def joined(job: Job) -> Iterator[tuple[ProcessMesh, torch.device]]:
    """Join the job's other ranks and leave them when the body has succeeded.

    A failed rank just ends.

    The mesh carries the step timer, which takes the time that a rank waits for others, and with it
    the heartbeat of this rank, a file in the job's `exit_directory`. Its phases here are start,
    rendezvous, build from then on, and ended once the body has succeeded or training was stopped on
    request.

    Raises:
        ParallelLayoutError: another number of processes was started than the job says, or they
            cannot share the model and its batch.
        WorkspaceError: the heartbeat cannot be written.
    """
    world_size = started_ranks(job)
    layout = layout_of(job.config, world_size, job.vocab_size)
    heartbeat = begin_heartbeat(job)
    set_up_arithmetic(job.threads_per_rank)
    device = choose_device()
    timers = Timers(device, heartbeat)
    if world_size == 1:
        mesh = ProcessMesh(timers=timers)
    else:
        heartbeat.beat("rendezvous")
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        shared = shared_stages(job.config, job.vocab_size)
        mesh = ProcessMesh.build(
            layout, shared_stages=shared, device_type=device.type, timers=timers
        )
    heartbeat.beat("build")
    with leaving(heartbeat):
        yield mesh, device


@contextmanager
def leaving(heartbeat: Heartbeat) -> Iterator[None]:
    """Leave the other ranks, and say so, once the body has succeeded or stopped on request.

    A rank that failed just ends: the others learn of it by its absence.
    """
    try:
        yield
    except TrainingStoppedError:
        heartbeat.beat(ENDED)
        raise
    if dist.is_initialized():  # DeepSpeed wants a group even of one process
        heartbeat.beat("leave")
        dist.destroy_process_group()
    heartbeat.beat(ENDED)


def set_up_arithmetic(threads: int) -> None:
    """Threads, and the same bits for the same input."""
    torch.set_num_threads(threads)
    # Moments of rare tokens decay into denormals, on which a CPU is many times slower.
    torch.set_flush_denormal(True)
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def joined_model(job: "ModelJob") -> "Iterator[tuple[Model, ProcessMesh, torch.device]]":
    """This rank's part of the job's model, among the others; left when the body has succeeded.

    Raises:
        ParallelLayoutError: another number of processes was started than the job says, or they
            cannot share the model.
        CheckpointError: the weights are damaged or of another model.
    """
    from megacore.generate.weights import load_model

    world_size, layout = started_ranks(job), job.layout
    set_up_arithmetic(job.threads_per_rank)
    device = choose_device()
    mesh = ProcessMesh.serial()
    if world_size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        mesh = ProcessMesh.build(layout, device_type=device.type)
    dtype = DTYPES[resolve_precision(job.precision, device.type)]
    yield load_model(job.source, mesh, device=device, dtype=dtype), mesh, device
    if world_size > 1:
        dist.destroy_process_group()
