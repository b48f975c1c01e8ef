"""Whether a rank has the memory that a run needs, and what would make it fit."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megacore.config.deepspeed import zero_of
from megacore.config.run import RunConfig
from megacore.errors import ConfigError
from megacore.plan.advice import COUNT, Place, Saving, savings
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

    def holds(self, need: MemoryEstimate) -> bool:
        """Whether it suffices."""
        return need.total <= self.device and need.host <= self.host


def check_memory(config: RunConfig, need: MemoryEstimate, room: Room, place: Place) -> None:
    """Refuse what does not fit into a GPU, into main memory or onto the disk that takes what is offloaded.

    Args:
        config: the run.
        need: of its ranks.
        room: of its ranks.
        place: what a changed configuration is estimated for.

    Raises:
        ConfigError: it does not fit; the message has the numbers and what would help.
    """
    if need.total > room.device:
        raise ConfigError(
            f"{config.name} needs about {gib(need.total)} of memory per rank "
            f"({gib(need.activations + need.logits)} of it for activations) and this machine has "
            f"{gib(room.device)} per rank: {_advice(config, room, place)}"
        )
    if need.host > room.host:
        ways = [f"lower launch.nproc_per_node ({room.ranks})"] if room.ranks > 1 else []
        ways += [f"set {sentence}" for sentence, changed in _returned(config) if room.holds(place.estimate(changed))]
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


def _advice(config: RunConfig, room: Room, place: Place) -> str:
    """What suffices by itself, or, where nothing does, what saves most."""

    def fits(saving: Saving) -> bool:
        return saving.after.total * saving.share <= room.device and saving.after.host * saving.share <= room.host

    best = savings(config, place, fits=fits)
    enough = [saving for saving in best if fits(saving)]
    shown = "; ".join(map(str, (enough or best)[:COUNT]))
    if enough:
        return f"{'any of these suffices' if len(enough) > 1 else 'this suffices'}: {shown}"
    return f"no single setting suffices, these save most: {shown}" if best else "no setting would save any"


def _returned(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """What of the offloading could be left out: a sentence, and the configuration without it."""
    if config.deepspeed.config is None:
        for name in ("offload_param", "offload_optimizer"):
            if getattr(config.deepspeed, name) == "cpu":
                yield f"deepspeed.{name} to none", _with(config, **{name: "none"})


def _with(config: RunConfig, **values: Any) -> RunConfig:
    """The configuration with engine deepspeed and these values of its section."""
    return config.model_copy(update={"engine": "deepspeed", "deepspeed": config.deepspeed.model_copy(update=values)})
