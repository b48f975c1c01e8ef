"""Hardware of a plan: rates of devices and links, from `conf/hardware/NAME.yaml`.

The rates are the vendor's, or measured with `megacore doctor --calibrate`. The share of them that a
training reaches is fitted; `fitted_on` names the runs. docs/planning.md has the formulas.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from megacore.config.base import Section
from megacore.config.load import CONF_DIR
from megacore.errors import ConfigError
from megacore.foreign.files import nearest, read_yaml

HARDWARE_DIR = CONF_DIR / "hardware"
Precision = Literal["fp32", "bf16", "fp16"]


class Link(Section):
    """Connection of a device, in one direction while all devices of a host communicate."""

    gbs: float = Field(gt=0)
    """Rate that a ring of collectives reaches on each device, in GB/s (10^9 bytes)."""
    latency_us: float = Field(ge=0)
    """Time of an empty message, in microseconds."""


class HostTimes(Section):
    """Time that the host takes to start the operations of a micro batch, in microseconds.

    While the device is slower than the host, these times are hidden.
    """

    layer_forward_us: float = Field(ge=0)
    """Forward pass of a layer."""
    layer_backward_us: float = Field(ge=0)
    """Backward pass of a layer, without a recomputation."""
    collective_us: float = Field(ge=0)
    """One collective operation."""
    head_us: float = Field(ge=0)
    """Output layer and loss, in each direction."""
    embedding_us: float = Field(ge=0)
    """Embedding, in each direction."""


class OffloadRates(Section):
    """Rates of state outside the device, of each device while all of a host use it, in GB/s."""

    transfer_gbs: float = Field(gt=0)
    """Copies between device and host memory."""
    memory_gbs: float = Field(gt=0)
    """Host memory, for the optimizer on the host."""
    nvme_gbs: float = Field(gt=0)
    """Disk for offloaded state and checkpoints."""


class Machine(Section):
    """Equal hosts of equal devices."""

    name: str = Field(min_length=1)
    """Name of the device."""
    sources: tuple[str, ...] = Field(min_length=1)
    """Origin of the rates: data sheets, papers, or the measurement."""
    fitted_on: str = Field(min_length=1)
    """Runs on which efficiencies and host times were fitted; "measured" if they were measured."""
    device: Literal["cuda", "cpu"]
    """Type of the device. A device of type cpu is one core."""
    devices_per_node: int = Field(gt=0)
    """Number of devices of a host."""
    memory_gib: float = Field(gt=0)
    """Memory of a device in GiB."""
    processors: int = Field(gt=0)
    """Multiprocessors of a device, which compute the tiles of a matrix product; 1 for a core."""
    tflops: dict[Precision, float] = Field(min_length=1)
    """Peak rates of dense matrix products by data type, in TFLOP/s."""
    product_efficiency: float = Field(gt=0, le=1)
    """Share of the peak rate that a large matrix product reaches."""
    half_depth: float = Field(ge=0)
    """Inner dimension k at which a matrix product reaches half of that rate."""
    traffic: float = Field(ge=0)
    """Share of the operands' transfer that a matrix product does not hide."""
    memory_gbs: float = Field(gt=0)
    """Rate of the device's memory, in GB/s."""
    memory_efficiency: float = Field(gt=0, le=1)
    """Share of that rate that elementwise operations reach."""
    operation_us: float = Field(ge=0)
    """Time of a matrix product besides its work."""
    attention_efficiency: tuple[float, float] = Field()
    """Share of the peak rate that fused attention reaches, forward and backward."""
    node: Link
    """Link between the devices of a host."""
    network: Link
    """Link of a device to the devices of other hosts: the host's rate divided by its devices."""
    pipeline_gbs: float = Field(gt=0)
    """Rate of a message between pipeline stages inside a host, in GB/s."""
    straggler: float = Field(ge=0)
    """Additional time of an iteration for each doubling of the number of hosts, as a share."""
    offload: OffloadRates
    """Rates of offloaded state and of checkpoints."""
    host: HostTimes
    """Time that the host needs to start operations."""

    def peak(self, precision: str) -> float:
        """Return the peak FLOP/s of a device. Raises ConfigError for an unknown rate."""
        for name, rate in self.tflops.items():
            if name == precision:
                return rate * 1e12
        raise ConfigError(
            f"hardware {self.name} has no tflops.{precision}: add the rate to its file, or use one "
            f"of {', '.join(self.tflops)}"
        )


def load_machine(name: str, directory: Path = HARDWARE_DIR) -> Machine:
    """Read the hardware file that `name` names: a path, or the stem of a file in `directory`.

    Raises ConfigError with what is wrong in the file, or with the most similar name.
    """
    for candidate in (Path(name), directory / f"{name.lower()}.yaml"):
        if candidate.is_file():
            break
    else:
        known = sorted(path.stem for path in directory.glob("*.yaml"))
        raise ConfigError(
            f"no hardware named {name!r}: neither that file nor {directory / name.lower()}.yaml "
            f"exists{nearest(name, known)}"
        )
    try:
        return Machine.model_validate(read_yaml(candidate))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"]) or "the file"
        raise ConfigError(
            f"{candidate}: {key} is {problem['input']!r}: {problem['msg'].lower()}"[:400]
        ) from error
