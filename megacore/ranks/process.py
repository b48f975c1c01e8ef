"""Setup of a rank before its work: threads, device and process groups."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megacore.errors import ConfigError, LaunchError, ParallelLayoutError, TrainingStoppedError
from megacore.hardware import (
    BF16_CAPABILITY,
    DEVICE_VARIABLE,
    cuda_capability,
    refuse_unsupported_accelerator,
    resolve_precision,
)
from megacore.jobs.run import Job, RankJob
from megacore.kernels.implementation import DTYPES
from megacore.observe.heartbeat import ENDED, Heartbeat
from megacore.observe.timers import Timers
from megacore.parallel.mesh import ProcessMesh, gpu_queues
from megacore.parallel.rank_layout import RankLayout
from megacore.pipeline_parallel.partition import shared_stages
from megacore.plan.layouts import layout_of
from megacore.ranks.rank import begin_heartbeat

if TYPE_CHECKING:
    from megacore.jobs.model import ModelJob
    from megacore.models.base import Model

_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Variable with the number of a GPU's hardware queues. CUDA reads it when it starts."""
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Time limit of a collective, with torch's default for the groups of the mesh. It is above the
default of `launch.stall_limit`, so that the supervisor, which names the stuck rank, comes first."""
_FIXED_WORKSPACES = (":4096:8", ":16:8")
"""Values of CUBLAS_WORKSPACE_CONFIG with which cuBLAS computes the same bits each time."""


def choose_device() -> torch.device:
    """Return the GPU with the number LOCAL_RANK, or the CPU if there is no GPU.

    Raises:
        LaunchError: torch is for ROCm or MPS, or the job is for GPUs and this host has none that
            can be used.
        ParallelLayoutError: there are fewer GPUs than ranks on this host.
    """
    refuse_unsupported_accelerator()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    host = socket.gethostname() + (
        "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
    )
    if not torch.cuda.is_available():
        if os.environ.get(DEVICE_VARIABLE) == "cuda":
            from megacore.doctor.toolchain import cuda_problem, driver_release

            problem = cuda_problem(
                f"host {socket.gethostname()}", driver_release(), torch.version.cuda, None, []
            )
            raise LaunchError(
                f"the job is for GPUs: {problem}"
                if problem
                else f"the job is for GPUs, and torch can use none of host {host}: see nvidia-smi "
                "and the Xid messages in its kernel log (dmesg) there; in a container, pass the "
                "GPUs on"
            )
        return torch.device("cpu")
    local_rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= gpus:
        raise ParallelLayoutError(
            f"local rank {local_rank} has no GPU of its own, torch can use {gpus} of host {host}: "
            f"set launch.nproc_per_node to {gpus}, or see nvidia-smi there if it should have more"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def started_ranks(job: RankJob) -> int:
    """Return the number of started ranks.

    Raises:
        ParallelLayoutError: the job is for another number of ranks.
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

    A rank that fails does not leave: it ends, and the others notice.

    The mesh contains the step timer, which also measures how long a rank waits for others. The
    timer contains the heartbeat of this rank, a file in the job's `exit_directory`. The phases
    before the body are start, rendezvous and build. After the body they are leave and ended, or
    only ended if training was stopped on request.

    Raises:
        ConfigError: a variable of the environment contradicts the configuration.
        ParallelLayoutError: the number of started ranks differs from the job's, or they cannot
            share the model and its batch.
        WorkspaceError: the heartbeat cannot be written.
    """
    world_size = started_ranks(job)
    layout = layout_of(job.config, world_size, job.vocab_size)
    heartbeat = begin_heartbeat(job)
    shared = shared_stages(job.config, job.vocab_size)
    queues = gpu_queues(layout, shared)
    os.environ.setdefault(_QUEUES, str(queues))
    train = job.config.train
    set_up_arithmetic(job.threads_per_rank, deterministic=train.deterministic, tf32=train.tf32)
    device = choose_device()
    if device.type == "cuda" and job.config.engine == "native":
        _refuse_few_queues(layout, queues)
    timers = Timers(device, heartbeat)
    if world_size == 1:
        mesh = ProcessMesh(timers=timers)
    else:
        heartbeat.beat("rendezvous")
        bound = job.config.engine == "native" and layout.pipeline == 1
        join_group(device, bound=bound)
        mesh = ProcessMesh.build(
            layout, shared_stages=shared, device_type=device.type, timers=timers
        )
    heartbeat.beat("build")
    with leaving(heartbeat):
        yield mesh, device


def join_group(device: torch.device, *, bound: bool) -> None:
    """Create the default process group: gloo, and NCCL for tensors on a GPU.

    `bound` binds the group to the GPU. NCCL then connects the ranks at once, so that an error
    appears here, and splits this group into those of the mesh. Not with a pipeline: torch would
    send all messages of a bound group through one stream, in which two stages that send to each
    other wait forever. Not with DeepSpeed, whose many groups would each take GPU memory.
    """
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=_COLLECTIVE_TIMEOUT,
        device_id=device if bound and device.type == "cuda" else None,
    )


def _refuse_few_queues(layout: RankLayout, queues: int) -> None:
    """Raise ConfigError if a pipeline's streams would share the GPU's hardware queues.

    In a shared queue the second of two posted receives, which waits for the first, would hold up
    the computation that the sender waits for.
    """
    value = os.environ[_QUEUES]
    if layout.pipeline > 1 and (not value.isdecimal() or int(value) < queues):
        raise ConfigError(
            f"{_QUEUES} is {value}, and the {queues} streams of a rank in a pipeline would wait "
            f"for each other in so few queues: unset it, or set it to {queues} or more"
        )


@contextmanager
def leaving(heartbeat: Heartbeat) -> Iterator[None]:
    """Leave the other ranks and write the last heartbeat after the body.

    Training that stopped on request only writes the heartbeat. A rank that fails does neither: the
    others notice its absence.
    """
    try:
        yield
    except TrainingStoppedError:
        heartbeat.beat(ENDED)
        raise
    if dist.is_initialized():  # DeepSpeed needs a group even for one process
        heartbeat.beat("leave")
        dist.destroy_process_group()
    heartbeat.beat(ENDED)


def set_up_arithmetic(threads: int, *, deterministic: bool = False, tf32: bool = False) -> None:
    """Set the number of CPU threads, and how kernels compute.

    Call this before CUDA and the process groups start.

    Args:
        threads: number of CPU threads.
        deterministic: True to replace or refuse nondeterministic operations of GPUs. torch then
            computes the backward pass of FlashAttention and of its own fused attention in a fixed
            order, leaves out cuDNN's attention, and excludes NCCL's NVLS, whose sums have no fixed
            order.
        tf32: True for matrix products of fp32 in TF32.

    Raises:
        ConfigError: a variable of the environment contradicts `deterministic`, or there is no GPU
            with TF32.
    """
    if tf32 and not (torch.cuda.is_available() and cuda_capability() >= BF16_CAPABILITY):
        raise ConfigError(
            "train.tf32 is true, and this host has no GPU that multiplies in TF32 (Ampere or "
            "newer): set train.tf32 to false"
        )
    if torch.cuda.is_available():  # containers may set TF32 by a variable
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.set_num_threads(threads)
    # Adam's moments of rare tokens decay to denormals, which are many times slower on a CPU.
    torch.set_flush_denormal(True)
    if deterministic and torch.cuda.is_available():
        _refuse_nondeterministic_variables()
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _FIXED_WORKSPACES[0])
        # Inductor otherwise chooses among kernels by measuring them in each process.
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _refuse_nondeterministic_variables() -> None:
    """Raise ConfigError for a variable with which a GPU's results differ from run to run."""
    why = "with which runs on GPUs differ, and train.deterministic is true"
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG", _FIXED_WORKSPACES[0])
    if workspace not in _FIXED_WORKSPACES:
        raise ConfigError(
            f"CUBLAS_WORKSPACE_CONFIG is {workspace}, {why}: unset it, or set it to "
            f"{' or '.join(_FIXED_WORKSPACES)}"
        )
    algorithms = os.environ.get("NCCL_ALGO", "")
    for names in filter(None, algorithms.lower().split(";")):  # such as "allreduce:^nvls,tree"
        names = names.rpartition(":")[2]
        if ("nvls" in names.removeprefix("^").split(",")) != names.startswith("^"):
            raise ConfigError(
                f"NCCL_ALGO is {algorithms}, {why}: unset it, or set it to ^NVLS,NVLSTree"
            )
    if os.environ.get("TORCHINDUCTOR_DETERMINISTIC", "1") != "1":
        raise ConfigError(
            f"TORCHINDUCTOR_DETERMINISTIC is {os.environ['TORCHINDUCTOR_DETERMINISTIC']}, {why}: "
            "unset it"
        )


@contextmanager
def joined_model(job: "ModelJob") -> "Iterator[tuple[Model, ProcessMesh, torch.device]]":
    """Join the job's other ranks and yield this rank's part of the model, the mesh and the device.

    The rank leaves the others when the body has succeeded.

    Raises:
        ParallelLayoutError: the number of started ranks differs from the job's, or they cannot
            share the model.
        CheckpointError: the weights are damaged or of another model.
        MemoryExhaustedError: the memory does not suffice for the model, or for the body.
    """
    from megacore.generate.weights import load_model
    from megacore.train.memory import translate_memory_errors

    world_size, layout = started_ranks(job), job.layout
    set_up_arithmetic(job.threads_per_rank)
    device = choose_device()
    mesh = ProcessMesh.serial()
    if world_size > 1:
        join_group(device, bound=True)
        mesh = ProcessMesh.build(layout, device_type=device.type)
    dtype = DTYPES[resolve_precision(job.precision, device.type)]
    with translate_memory_errors(
        lambda reason: (
            f"out of memory ({reason}): lower the batch size or the number of tokens, or divide "
            "the model over more GPUs"
        )
    ):
        yield load_model(job.source, mesh, device=device, dtype=dtype), mesh, device
    if world_size > 1:
        dist.destroy_process_group()
