"""What the replicas of a run divide among themselves, whichever engine does it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from megacore.config.deepspeed import OffloadDevice
from megacore.foreign.deepspeed import asked_of

if TYPE_CHECKING:
    from megacore.config.run import RunConfig


@dataclass(frozen=True)
class ZeroSettings:
    """How far weights, gradients and the optimizer's state are divided, and where they lie."""

    stage: int = 0
    """0 divides nothing, 1 the optimizer's state, 2 gradients too, 3 weights too."""
    offload_optimizer: OffloadDevice = "none"
    """Where the optimizer's state lies."""
    offload_param: OffloadDevice = "none"
    """Where weights lie while they are not used."""
    nvme_path: str | None = None
    """Directory of what is offloaded to NVMe."""


def zero_of(config: "RunConfig") -> ZeroSettings:
    """What the configuration asks for: its section `deepspeed`, the user's JSON, or the native engine's stage 1.

    Raises ValueError when the user's JSON is not one that can be read.
    """
    if config.engine == "native":
        return ZeroSettings(stage=int(config.parallel.use_distributed_optimizer))
    asked, nvme_path = asked_of(config), None
    devices = {what: cast(OffloadDevice, asked.device(what)) for what in ("offload_optimizer", "offload_param")}
    for what, device in devices.items():
        if device == "nvme":
            nvme_path = nvme_path or asked.values.get(f"zero_optimization.{what}.nvme_path")
    return ZeroSettings(asked.stage, devices["offload_optimizer"], devices["offload_param"], nvme_path)
