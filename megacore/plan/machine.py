"""Hardware of a plan: rates of devices and links, from `conf/hardware/NAME.yaml`.

The rates are the vendor's, or measured with `megacore doctor --calibrate`. The share of them that a
training reaches is fitted; `fitted_on` names the runs. docs/planning.md has the formulas.
"""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from megacore.config.base import Section
from megacore.errors import ConfigError
from megacore.foreign.files import first_file, nearest, read_yaml, shortened
from megacore.hardware import Hardware
from megacore.observe.flops import PEAK_TFLOPS, peak_by_name
from megacore.paths import glob, is_file

HARDWARE_DIR = Path("conf/hardware")
MEASURED = "measured"
"""`Machine.fitted_on` of a calibration."""
LOCAL_FILE = "local.yaml"
"""Name of the file of this host's own devices."""
_PROJECT_FILES = Path(__file__).parents[2] / HARDWARE_DIR
Precision = Literal["fp32", "bf16", "fp16"]
_FILES = {
    "B200": "b200",
    "GB200": "b200",
    "H200": "h200",
    "GH200": "h100",
    "H100": "h100",
    "A100": "a100-80gb",
    "L40S": "l40s",
}
"""Hardware files by a word of the GPU's name."""
_FP16_FLAGS = frozenset({"avx512_fp16", "amx_fp16"})
_LARGE_A100 = 60 * 2**30
"""Bytes that tell an A100 of 80 GB from one of 40 GB."""


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


class CoreTimes(Section):
    """Work of a CPU core that the rates of products and memory do not determine.

    A pair is for the forward and the backward pass. Nothing hides these times on a CPU.
    """

    elementwise_gbs: tuple[float, float]
    """Rate of elementwise operations in a layer, in GB/s of operands and results that the forward
    pass has."""
    hidden_passes: float = Field(ge=0)
    """Hidden states that norms and residual additions read or write in the time in which the
    activation, which computes more, reads or writes one. Not measured by a calibration."""
    score_ns: tuple[float, float]
    """Time of an attention score besides the products, in nanoseconds."""
    logit_ns: tuple[float, float]
    """Time of a logit in the loss, in nanoseconds."""
    parameter_ns: float = Field(ge=0)
    """Time of a parameter in an update, with its norm and the zeroed gradient, in nanoseconds."""
    layer_update_us: float = Field(ge=0)
    """Time of a layer in an update besides its parameters, in microseconds."""
    iteration_us: float = Field(ge=0)
    """Time of an iteration besides all other work, in microseconds."""
    together: float = Field(default=1.0, ge=1)
    """Time of computation if ranks that wait for each other compute on several cores, relative to
    the processor's time of one."""
    gradients_gbs: float | None = Field(default=None, gt=0)
    """Rate of two ranks that sum gradients in shared memory, in GB/s: unlike activations, gradients
    come from the main memory. None means that of `node`."""
    sockets: Link
    """Collectives through sockets: a distributed optimizer, and gradients of more than four
    replicas. `node` is shared memory."""


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
    """Memory of a device in GiB, as its programs see it: a driver keeps some of the vendor's."""
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
    """Time that the host needs to start operations; a core has no host, and its time is added."""
    core: CoreTimes | None = None
    """Times of a core; only of the device cpu, which must have them."""

    @model_validator(mode="after")
    def _has_core(self) -> Self:
        if (self.core is None) == (self.device == "cpu"):
            problem = "lacks core" if self.device == "cpu" else "has core, which only a CPU has"
            raise ValueError(f"device {self.device} {problem}")
        return self

    @property
    def native_bf16(self) -> bool:
        """True if the device computes in bf16 at least as fast as in fp32."""
        return self.tflops.get("bf16", 0.0) >= self.tflops.get("fp32", 0.0)

    def peak(self, precision: str) -> float:
        """Return the peak FLOP/s of a device. Raises ConfigError for an unknown rate."""
        for name, rate in self.tflops.items():
            if name == precision:
                return rate * 1e12
        raise ConfigError(
            f"hardware {self.name} has no tflops.{precision}: add the rate to its file, or use one "
            f"of {', '.join(self.tflops)}"
        )


def load_machine(name: str) -> Machine:
    """Read the hardware file that `name` names: a path, or a stem such as `h100`.

    A stem is that of a file in `conf/hardware` of the current directory, or else of this project.
    Raises ConfigError if there is no such file, or a value in it is wrong.
    """
    directories = [HARDWARE_DIR, _PROJECT_FILES]
    file = f"{name.lower()}.yaml"
    candidate = first_file((Path(name), *(each / file for each in directories)))
    if candidate is None:
        known = sorted({path.stem for each in directories for path in glob(each, "*.yaml")})
        raise ConfigError(
            f"no hardware named {shortened(repr(name))}: neither that file nor "
            f"{shortened(str(directories[0] / file))} exists{nearest(name, known)}"
        )
    content = read_yaml(candidate)
    if not isinstance(content, dict):
        raise ConfigError(
            f"{candidate} is no mapping of hardware values: give a file such as those of "
            f"{HARDWARE_DIR}"
        )
    try:
        return Machine.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"])) or "the file"
        raise ConfigError(
            f"{candidate}: {key} is {shortened(str(problem['input']))}: {problem['msg'].lower()}"
        ) from error


def machine_of(hardware: Hardware, precision: str) -> Machine:
    """Return the measured file of this host, or else the generic one of its devices.

    Raises ConfigError if the files are missing or damaged.
    """
    return _measured(hardware, precision) or generic_machine_of(hardware, precision)


def generic_machine_of(hardware: Hardware, precision: str) -> Machine:
    """Return the hardware file of this host's GPUs, or that of its cores without a GPU.

    A GPU without a file, or a slice of one, gets A100's shares of its own peak rate, memory that is
    slower in proportion, and A100's links. Raises ConfigError if the files are missing or damaged.
    """
    if not hardware.gpus:
        return _core(hardware)
    gpu = min(hardware.gpus, key=lambda each: each.memory)
    words = gpu.name.upper().replace("-", " ").split()
    stem = next((stem for word, stem in _FILES.items() if word in words), None)
    if stem == "a100-80gb" and gpu.memory < _LARGE_A100:
        stem = "a100-40gb"
    machine = load_machine(stem or "a100-80gb")
    changes: dict[str, Any] = {
        "memory_gib": gpu.memory / 2**30,
        "devices_per_node": len(hardware.gpus),
    }
    if stem is None or (gpu.multiprocessors or machine.processors) < machine.processors:
        peak = peak_by_name(gpu.name, precision, gpu.multiprocessors) or _slowest(precision)
        changes |= {
            "name": gpu.name,
            "tflops": {precision: peak},
            "processors": gpu.multiprocessors or machine.processors,
            "memory_gbs": machine.memory_gbs * peak / machine.peak(precision) * 1e12,
        }
    return machine.model_copy(update=changes)


def _core(hardware: Hardware) -> Machine:
    """Return the generic file of this host's cores, with its number of cores and its memory."""
    machine = load_machine("cpu-bf16" if hardware.native_bf16 else "cpu")
    rates: dict[Precision, float] = dict(machine.tflops)
    if not _FP16_FLAGS.isdisjoint(hardware.cpu_flags):
        rates["fp16"] = rates["bf16"]
    if not hardware.native_bf16:
        # The file is that of a core with AVX2, whose registers have half the width of AVX-512's.
        if "avx512f" in hardware.cpu_flags:
            rates["fp32"] *= 2
        elif "avx2" not in hardware.cpu_flags:
            rates["fp32"] /= 4
    cores = hardware.cores
    memory = hardware.memory / cores / 2**30
    return machine.model_copy(
        update={"devices_per_node": cores, "memory_gib": memory, "tflops": rates}
    )


def _measured(hardware: Hardware, precision: str) -> Machine | None:
    """Return the file of `megacore doctor --calibrate` for such devices, or None."""
    if not is_file(HARDWARE_DIR / LOCAL_FILE):
        return None
    machine = load_machine(str(HARDWARE_DIR / LOCAL_FILE))
    fits = machine.device == hardware.device_type and precision in machine.tflops
    return machine if fits else None


def _slowest(precision: str) -> float:
    """Return the lowest peak rate of a known GPU, in TFLOP/s."""
    return min(rate.fp32 if precision == "fp32" else rate.low for rate in PEAK_TFLOPS.values())
