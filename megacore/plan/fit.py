"""Whether a rank has the memory that a run needs, and what would make it fit."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore.config.deepspeed_json import asked_of
from megacore.config.run import RunConfig
from megacore.config.zero import zero_of
from megacore.errors import ConfigError
from megacore.plan.memory import GIB, MemoryEstimate


@dataclass(frozen=True)
class Room:
    """What a rank may use, and how many ranks share the machine."""

    device: int
    """Bytes of one GPU, or of main memory divided by the ranks."""
    host: int
    """Bytes of main memory, divided by the ranks."""
    device_type: str
    """cpu or cuda."""
    ranks: int
    """On this machine."""
    replicas: int
    """Data-parallel ranks."""

    def holds(self, need: MemoryEstimate) -> bool:
        """Whether it suffices."""
        return need.total <= self.device and need.host <= self.host


def check_memory(
    config: RunConfig, need: MemoryEstimate, room: Room, estimate: Callable[[RunConfig], MemoryEstimate]
) -> None:
    """Refuse what does not fit into a GPU, into main memory or onto the disk that takes what is offloaded.

    Args:
        config: the run.
        need: of its ranks.
        room: of its ranks.
        estimate: what a changed configuration needs.

    Raises:
        ConfigError: it does not fit; the message has the numbers and what would help.
    """
    if need.total > room.device:
        raise ConfigError(
            f"{config.name} needs about {gib(need.total)} of memory per rank "
            f"({gib(need.activations + need.logits)} of it for activations) and this machine has "
            f"{gib(room.device)} per rank: {', or '.join(_advice(config, need, room, estimate))}"
        )
    if need.host > room.host:
        ways = [f"lower launch.nproc_per_node ({room.ranks})"] if room.ranks > 1 else []
        ways += [f"set {sentence}" for sentence, changed in _returned(config) if room.holds(estimate(changed))]
        where = "deepspeed.config" if config.deepspeed.config is not None else "deepspeed.offload_*"
        ways.append(f"offload less or to nvme ({where})")
        raise ConfigError(
            f"{config.name} offloads about {gib(need.host)} per rank to main memory and this machine has "
            f"{gib(room.host)} of it per rank: {', or '.join(ways)}"
        )
    _check_nvme(config, need, room)


def gib(count: int) -> str:
    """Bytes for people."""
    return f"{count / GIB:.1f} GiB"


def _check_nvme(config: RunConfig, need: MemoryEstimate, room: Room) -> None:
    directory = zero_of(config).nvme_path
    if not need.nvme or directory is None:
        return
    if not Path(directory).is_dir():
        raise ConfigError(f"{config.name} offloads to nvme but its path {directory} is no directory: make it")
    free = shutil.disk_usage(directory).free
    if need.nvme * room.ranks > free:
        raise ConfigError(
            f"{config.name} offloads about {gib(need.nvme)} per rank to {directory}, {gib(need.nvme * room.ranks)} of "
            f"{room.ranks} rank{'s' if room.ranks > 1 else ''}, and {gib(free)} are free there: give another path, or "
            "offload less"
        )


def _advice(
    config: RunConfig, need: MemoryEstimate, room: Room, estimate: Callable[[RunConfig], MemoryEstimate]
) -> Iterator[str]:
    train, parallel, gpu = config.train, config.parallel, room.device_type == "cuda"
    yield f"lower train.micro_batch_size ({train.micro_batch_size})"
    if train.recompute != "full" or train.recompute_num_layers is not None:
        yield "set train.recompute to full for all layers"
    if config.engine == "native" and room.replicas > 1 and not parallel.use_distributed_optimizer:
        yield "set parallel.use_distributed_optimizer to true"
    zero = [(sentence, estimate(changed)) for sentence, changed in _divided_further(config, room)]
    if config.engine == "deepspeed" and config.deepspeed.config is not None:
        asked = asked_of(config)
        yield f"raise {asked.named('zero_optimization.stage')} ({asked.stage}), or offload more there"
    elif helps := [way for way in zero if way[1].total < need.total]:
        # The least that suffices, else the most that there is.
        enough = [sentence for sentence, changed in helps if room.holds(changed)]
        if enough or config.engine == "deepspeed":
            yield f"set {enough[0] if enough else helps[-1][0]}"
    if room.replicas > 1 and gpu:
        yield (
            f"raise parallel.tensor_model_parallel_size ({parallel.tensor_model_parallel_size}) or "
            f"parallel.pipeline_model_parallel_size ({parallel.pipeline_model_parallel_size})"
        )
    if room.replicas > 1 and not gpu:
        yield f"lower launch.nproc_per_node ({room.ranks})"


def _divided_further(config: RunConfig, room: Room) -> Iterator[tuple[str, RunConfig]]:
    """What of ZeRO a configuration does not use yet, from little to much: a sentence, and the configuration with it."""
    if config.deepspeed.config is not None:
        return
    zero, stages = zero_of(config), config.parallel.pipeline_model_parallel_size
    most = 3 if stages == 1 else 1
    prefix = "" if config.engine == "deepspeed" else "engine to deepspeed, "
    first = zero.stage + 1 if config.engine == "deepspeed" else max(2, zero.stage + 1)
    for stage in range(first, most + 1) if room.replicas > 1 else ():
        yield f"{prefix}deepspeed.zero_stage to {stage}", _with(config, zero_stage=stage)
    if room.device_type == "cpu":
        return
    divided = max(most, zero.stage)
    prefix += f"deepspeed.zero_stage to {divided} and " if divided > zero.stage or prefix else ""
    if zero.offload_optimizer == "none":
        changed = _with(config, zero_stage=divided, offload_optimizer="cpu")
        yield f"{prefix}deepspeed.offload_optimizer to cpu", changed
    if zero.offload_param == "none" and divided == 3:
        both = {"offload_optimizer": zero.offload_optimizer if zero.offload_optimizer != "none" else "cpu"}
        changed = _with(config, zero_stage=divided, offload_param="cpu", **both)
        optimizer = "deepspeed.offload_optimizer and " if zero.offload_optimizer == "none" else ""
        yield f"{prefix}{optimizer}deepspeed.offload_param to cpu", changed


def _returned(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """What of the offloading could be left out: a sentence, and the configuration without it."""
    if config.deepspeed.config is None:
        for name in ("offload_param", "offload_optimizer"):
            if getattr(config.deepspeed, name) == "cpu":
                yield f"deepspeed.{name} to none", _with(config, **{name: "none"})


def _with(config: RunConfig, **values: Any) -> RunConfig:
    """The configuration with engine deepspeed and these values of its section."""
    return config.model_copy(update={"engine": "deepspeed", "deepspeed": config.deepspeed.model_copy(update=values)})
