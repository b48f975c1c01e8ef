"""Checks, before the start, that a configuration can run on this host, with estimates of its cost.

A run that needs more memory than a rank has is refused, with advice on how to make it fit.
"""

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from megacore.config.checks import check_device
from megacore.config.deepspeed import zero_of
from megacore.config.hostfile import hosts_of
from megacore.config.launch import LaunchConfig
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec
from megacore.engine.deepspeed.operators import require_deepspeed
from megacore.errors import ConfigError
from megacore.hardware import Hardware, owner_of
from megacore.models.parameters import parameter_count
from megacore.observe.recorder import check_tensorboard, check_wandb
from megacore.parallel.rank_layout import RankLayout
from megacore.paths import is_dir
from megacore.plan.advice import COUNT, Deployment, Saving, lighter_recompute, savings
from megacore.plan.layouts import dividing_hosts, launched_ranks, layout_of, ranks_per_host
from megacore.plan.memory import (
    GIB,
    MemoryEstimate,
    engine_name,
    whole_muon_elements,
)
from megacore.plan.throughput import RunTime, planned_iteration, predict_run
from megacore.plan.vocabulary import is_on_the_hub

CPU_DAYS_LIMIT = 7.0
"""Days above which a run on CPUs is refused as meant for GPUs, unless launch.allow_cpu is true."""

CHECKPOINT_BYTES = 12
"""Bytes of a parameter in a checkpoint: the fp32 weight and Adam's two moments. Muon's matrices
have one moment less."""


@dataclass(frozen=True)
class RunEstimate:
    """Estimated needs of a run."""

    parameters: int
    """Number of parameters of the whole model."""
    layout: RankLayout
    threads_per_rank: int
    device_type: str
    precision: str
    engine: str
    """Name of the engine, with the ZeRO stage and the offload."""
    memory: MemoryEstimate
    """Memory of a rank on the pipeline stage that needs most."""
    memory_available: int
    """Bytes of one GPU, or of host memory divided by the ranks of a host."""
    host_available: int
    """Bytes of host memory divided by the ranks of a host."""
    time: RunTime
    """Predicted duration."""
    unseen: str | None = None
    """Scheduler whose hosts have hardware that is unknown here; None if this host's hardware
    applies."""
    lighter: str | None = None
    """Sentence about a lighter recomputation that fits, too; None if there is none."""
    host: str | None = None
    """Host in the hostfile whose hardware applies to all hosts; None means this host."""

    @property
    def ranks(self) -> int:
        """Number of ranks of the job."""
        return self.layout.world_size

    def report(self) -> str:
        """Return the summary, and on a second line a lighter recomputation that fits, if any."""
        return self.summary() + ("" if self.lighter is None else f"\n{self.lighter}")

    def summary(self) -> str:
        """Return all numbers on one line."""
        if self.unseen is not None:
            return (
                f"{self.parameters / 1e6:.1f} M parameters on {self.ranks} GPU "
                f"rank{'s' if self.ranks > 1 else ''} of {self.unseen}: this machine has no GPU to "
                "tell their memory and time by"
            )
        where = "GPU" if self.device_type == "cuda" else "CPU"
        threads = "" if self.device_type == "cuda" else f" x {self.threads_per_rank} threads"
        axes = self.layout
        context = f" x context {axes.context}" if axes.context > 1 else ""
        divided = f" (tensor {axes.tensor}{context} x pipeline {axes.pipeline} x data {axes.data})"
        engine = "" if self.engine == "native" else f" with {self.engine}"
        return (
            f"{self.parameters / 1e6:.1f} M parameters on {self.ranks} {where} "
            f"rank{'s' if self.ranks > 1 else ''}"
            f"{threads}{divided if axes.data < self.ranks else ''} in {self.precision}{engine}: "
            f"about {gib(self.memory.total)} of {gib(self.memory_available)} per "
            f"rank{self._offloaded()}, {self.time.duration} at a "
            f"predicted {_seconds(self.time.iteration.seconds)} per iteration on "
            f"{self.time.hardware}{'' if self.host is None else f' of host {self.host}'}"
        )

    def _offloaded(self) -> str:
        """Return text about the memory of offloaded state."""
        host = (
            f" and {gib(self.memory.host)} of {gib(self.host_available)} of host memory"
            if self.memory.host
            else ""
        )
        return host + (f" and {gib(self.memory.nvme)} on NVMe" if self.memory.nvme else "")


def preflight(config: RunConfig, vocab_size: int, hardware: Hardware) -> RunEstimate:
    """Estimate memory and time, and refuse a run that its hosts cannot execute.

    If a scheduler will provide GPUs and this host has none, only the layout and the precision are
    checked.

    Args:
        config: configuration of the run.
        vocab_size: entries of the tokenizer before padding.
        hardware: hardware of the hosts that the run uses.

    Raises:
        ParallelLayoutError: the ranks do not fit the model, its batch or the GPUs.
        ConfigError: TensorBoard or DeepSpeed is requested but not installed; fp16 or CUDA graphs
            are requested without a GPU; the precision of a scheduler's GPUs is left open; memory,
            or the disk for offloaded state, is too small; or CPUs would need more than
            CPU_DAYS_LIMIT days. `launch.allow_cpu: true` permits any duration on CPUs and, with the
            native engine, fp16.
    """
    require_deepspeed(config)
    known = not is_on_the_hub(config.data.tokenizer)
    ranks, threads = resolve_launch(config, hardware, vocab_size if known else None)
    together = ranks_per_host(config.launch, ranks)
    layout = layout_of(config, ranks)
    precision = hardware.resolve_precision(config.train.precision)
    host_available = hardware.memory // together
    deployment = Deployment(ranks, vocab_size, precision, hardware.device_type, host_available)
    estimate = RunEstimate(
        parameters=parameter_count(ModelSpec.of(config, vocab_size)),
        layout=layout,
        threads_per_rank=threads,
        device_type=hardware.device_type,
        precision=precision,
        engine=engine_name(config.engine, zero_of(config)),
        memory=deployment.estimate(config),
        memory_available=min((gpu.memory for gpu in hardware.gpus), default=host_available),
        host_available=host_available,
        time=predict_run(
            planned_iteration(
                config, vocab_size, hardware, layout, threads, ranks_per_host=together
            )
        ),
        unseen=unseen_gpus(config.launch, hardware),
        host=hardware.host,
    )
    if config.tracking.tensorboard:
        check_tensorboard()
    if config.tracking.wandb is not None:
        check_wandb()
    if estimate.unseen is not None:
        check_precision(config.train.precision, estimate.unseen)
        return estimate
    check_device(config.train, hardware.device_type, hardware.owner)
    if not hardware.gpus:
        _check_meant_for_cpu(config, estimate, hardware.owner)
    room = Room(estimate.memory_available, estimate.host_available, together, hardware.host)
    check_memory(config, estimate.memory, room, deployment)
    return replace(estimate, lighter=lighter_recompute(config, deployment, room.device))


def resolve_launch(
    config: RunConfig,
    hardware: Hardware,
    vocab_size: int | None = None,
    *,
    hosts: Mapping[str, int] | None = None,
) -> tuple[int, int]:
    """Return the number of ranks of the job and of CPU threads per rank.

    The arguments are those of `launched_ranks`, and the size of the vocabulary if it is known.
    Raises its errors, and ParallelLayoutError if the ranks cannot divide the model and its batch.
    """
    replica, launch = config.parallel.ranks_per_replica, config.launch
    if launch.elastic and not hosts:
        launch = _with_dividing_hosts(config, vocab_size)
    ranks, threads = launched_ranks(launch, hardware, without_gpu=replica, hosts=hosts)
    layout_of(config, ranks, vocab_size)
    return ranks, threads


def _with_dividing_hosts(config: RunConfig, vocab_size: int | None) -> LaunchConfig:
    """Return an elastic launch with the largest number of hosts that divide model and batch."""
    launch = config.launch
    assert launch.node_range is not None
    least, most = launch.node_range
    ranks = list(hosts_of(launch).values())
    if not ranks and launch.nproc_per_node != "auto":
        ranks = [launch.nproc_per_node] * most
    if not ranks:
        return launch
    count = dividing_hosts(config, ranks, least, vocab_size)
    return launch.model_copy(update={"nnodes": count})


def unseen_gpus(launch: LaunchConfig, hardware: Hardware) -> str | None:
    """Return the scheduler that will provide GPUs if the submitting host has none, else None."""
    return launch.kind if launch.requests_gpus and not hardware.gpus else None


def check_precision(precision: str, scheduler: str) -> None:
    """Raise ConfigError if the precision depends on the GPUs of a scheduler, unknown here.

    The stages' keys contain the precision, so it must be known before a job starts.
    """
    if precision == "auto":
        raise ConfigError(
            "train.precision is auto, and this machine has no GPU to tell by what those of "
            f"{scheduler} multiply: set train.precision to bf16 (Ampere or newer), fp16 or fp32"
        )


def _check_meant_for_cpu(config: RunConfig, estimate: RunEstimate, owner: str) -> None:
    days = estimate.time.days
    needs = f"about {gib(estimate.memory.total)} of memory per rank and {estimate.time.duration}"
    allowed, deepspeed = config.launch.allow_cpu, config.engine == "deepspeed"
    if estimate.precision == "fp16" and (deepspeed or not allowed):
        raise ConfigError(
            "train.precision is fp16, which "
            f"{'DeepSpeed has only on GPUs' if deepspeed else 'needs a GPU'}, and {owner} "
            f"has none: for {config.name} its CPUs would need {needs}: set train.precision to "
            f"auto, or {'engine to native and ' if deepspeed else ''}launch.allow_cpu to true to "
            "start it all the same"
        )
    if days > CPU_DAYS_LIMIT and not allowed:
        raise ConfigError(
            f"{config.name} is sized for GPUs and {owner} has none: its CPUs would need "
            f"{needs}: lower train.train_iters ({config.train.train_iters}) or the model, or set "
            "launch.allow_cpu to true to start it all the same"
        )


def _seconds(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


@dataclass(frozen=True)
class Room:
    """Memory available to a rank, the number of ranks on its host, and that host."""

    device: int
    """Bytes of one GPU, or of host memory divided by the ranks."""
    host: int
    """Bytes of host memory divided by the ranks."""
    ranks: int
    """Number of ranks on the host."""
    host_name: str | None = None
    """Host in the hostfile that has this memory; None means this host."""

    def holds(self, need: MemoryEstimate, share: float = 1.0) -> bool:
        """Return True if the memory suffices for `share` such ranks per rank."""
        return need.total * share <= self.device and need.host * share <= self.host


def check_memory(
    config: RunConfig, need: MemoryEstimate, room: Room, deployment: Deployment
) -> None:
    """Check that a run fits into a GPU, host memory and the disk for offloaded state.

    Args:
        config: configuration of the run.
        need: memory that a rank needs.
        room: memory available to a rank.
        deployment: ranks and hardware for which changed configurations are estimated.

    Raises:
        ConfigError: the run does not fit; the message has the numbers and the remedies.
    """
    if need.total > room.device:
        raise ConfigError(
            f"{config.name} needs about {gib(need.total)} of memory per rank "
            f"({gib(need.passes)} of it for activations) and {owner_of(room.host_name)} has "
            f"{gib(room.device)} per rank: {_advice(config, room, deployment)}"
        )
    if need.host > room.host:
        ways = [f"lower launch.nproc_per_node ({room.ranks})"] if room.ranks > 1 else []
        ways += [
            f"set {sentence}"
            for sentence, changed in _returned(config)
            if room.holds(deployment.estimate(changed))
        ]
        where = "deepspeed.config" if config.deepspeed.config is not None else "deepspeed.offload_*"
        ways.append(f"offload less or to nvme ({where})")
        raise ConfigError(
            f"{config.name} offloads about {gib(need.host)} per rank to host memory and "
            f"{owner_of(room.host_name)} has {gib(room.host)} of it per rank: {', or '.join(ways)}"
        )
    if room.host_name is None:  # another host's disk is not seen from here
        _check_nvme(config.name, zero_of(config).nvme_path, need, room)


def checkpoints_on_disk(config: RunConfig, vocab_size: int) -> tuple[int, int]:
    """Return the most checkpoints of a run that are on disk at a time, and the bytes of each.

    One more is written before the retention rules delete another.
    """
    keep = config.checkpoint
    kept = keep.keep_last + keep.keep_best
    if keep.keep_every is not None:
        kept += config.train.train_iters // math.lcm(keep.save_interval, keep.keep_every)
    size = parameter_count(ModelSpec.of(config, vocab_size)) * CHECKPOINT_BYTES
    size -= 4 * whole_muon_elements(config, vocab_size)
    return min(config.checkpoint_rounds, kept + 1), size


def gib(count: int) -> str:
    """Return a number of bytes as text in GiB."""
    return f"{count / GIB:.1f} GiB"


def _check_nvme(run: str, directory: str | None, need: MemoryEstimate, room: Room) -> None:
    if not need.nvme or directory is None:
        return
    if not is_dir(directory):
        raise ConfigError(
            f"{run} offloads to nvme but its path {directory} is no directory: make it"
        )
    free = shutil.disk_usage(directory).free
    if need.nvme * room.ranks > free:
        raise ConfigError(
            f"{run} offloads about {gib(need.nvme)} per rank to {directory}, "
            f"{gib(need.nvme * room.ranks)} of {room.ranks} rank{'s' if room.ranks > 1 else ''}, "
            f"and {gib(free)} are free there: give another path, or offload less"
        )


def _advice(config: RunConfig, room: Room, deployment: Deployment) -> str:
    """Return the settings that suffice on their own, or those that save most if none does."""

    def fits(saving: Saving) -> bool:
        return room.holds(saving.after, saving.share)

    best = savings(config, deployment, fits=fits)
    enough = [saving for saving in best if fits(saving)]
    shown = "; ".join(map(str, (enough or best)[:COUNT]))
    if enough:
        return f"{'any of these suffices' if len(enough) > 1 else 'this suffices'}: {shown}"
    return (
        f"no single setting suffices, these save most: {shown}"
        if best
        else "no setting would save any"
    )


def _returned(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield settings that undo an offload: text, and the configuration without it."""
    if config.deepspeed.config is None:
        for name in ("offload_param", "offload_optimizer"):
            if getattr(config.deepspeed, name) == "cpu":
                section = config.deepspeed.model_copy(update={name: "none"})
                changed = config.model_copy(update={"engine": "deepspeed", "deepspeed": section})
                yield f"deepspeed.{name} to none", changed
