"""What this machine has: cores, memory, GPUs, and the type in which a run computes on them.

Imports no torch: a command line and the key of a stage ask too.
"""

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_NO_LIMIT = 2**62
"""What version 1 of control groups says where there is none, in whole pages."""
BF16_CAPABILITY = 80
"""First CUDA compute capability (times 10) with bf16 tensor cores: Ampere."""
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
_CUDA_CAPABILITY_MAJOR = 75
_CUDA_CAPABILITY_MINOR = 76


@dataclass(frozen=True)
class Gpu:
    """One visible GPU."""

    name: str
    memory: int
    """Bytes."""


@dataclass(frozen=True)
class Hardware:
    """Cores, memory and GPUs that a run may use."""

    cores: int
    """CPU cores this process may run on."""
    memory: int
    """Bytes of main memory, the container's limit included."""
    gpus: tuple[Gpu, ...] = ()
    cpu_flags: frozenset[str] = frozenset()
    """Instruction sets, as in /proc/cpuinfo."""
    native_bf16: bool = False
    """Whether the device that trains multiplies bf16 by itself."""

    @property
    def device_type(self) -> str:
        """Where a run computes: cuda or cpu."""
        return "cuda" if self.gpus else "cpu"

    def resolve_precision(self, precision: str) -> str:
        """fp32, bf16 or fp16 for `train.precision`.

        auto is bf16 where that is native, else fp32.
        """
        if precision != "auto":
            return precision
        return "bf16" if self.native_bf16 else "fp32"

    @classmethod
    def detect(cls) -> "Hardware":
        """This machine, as this process sees it.

        CUDA_VISIBLE_DEVICES, affinity and container limits count.
        """
        return _detect()


def resolve_precision(precision: str, device_type: str) -> str:
    """Compute type of a run: "fp32", "bf16" or "fp16".

    Args:
        precision: `train.precision`; "auto" means bf16 where the hardware multiplies it natively,
            else fp32.
        device_type: "cpu" or "cuda".
    """
    if precision != "auto":
        return precision
    native = (
        cuda_capability() >= BF16_CAPABILITY if device_type == "cuda" else cpu_multiplies_bf16()
    )
    return "bf16" if native else "fp32"


@cache
def cpu_multiplies_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has instructions for products of bf16.

    Without them bf16 is slower than fp32.
    """
    return not _BF16_FLAGS.isdisjoint(_cpu_flags(cpuinfo))


@cache
def cuda_capability() -> int:
    """Compute capability of the first visible GPU times 10 (80 is Ampere), 0 without one.

    The driver is asked directly: no context is made, so no GPU memory is taken.
    """
    driver = _cuda_driver()
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver is None or driver.cuDeviceGet(ctypes.byref(device), 0):
        return 0
    for value, attribute in ((major, _CUDA_CAPABILITY_MAJOR), (minor, _CUDA_CAPABILITY_MINOR)):
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return 0
    return major.value * 10 + minor.value


@cache
def _detect() -> Hardware:
    gpus = _visible_gpus()
    native = resolve_precision("auto", "cuda" if gpus else "cpu") == "bf16"
    return Hardware(len(os.sched_getaffinity(0)), _main_memory(), gpus, _cpu_flags(), native)


def _visible_gpus() -> tuple[Gpu, ...]:
    """Return name and memory of each GPU; no context is made, so no GPU memory is taken."""
    driver = _cuda_driver()
    count = ctypes.c_int()
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    gpus = []
    for index in range(count.value):
        device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(128)
        failed = (
            driver.cuDeviceGet(ctypes.byref(device), index)
            or driver.cuDeviceGetName(name, len(name), device)
            or driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        )
        if not failed:
            gpus.append(Gpu(name.value.decode("utf-8", errors="replace"), memory.value))
    return tuple(gpus)


def _cuda_driver() -> ctypes.CDLL | None:
    """Return the initialised driver; None where there is none, or no GPU that it may use."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if driver.cuInit(0) else driver


def _cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def _main_memory() -> int:
    """Bytes of RAM, or of the container's limit where that is lower."""
    limit = memory_limit()
    total = memory_info()["MemTotal"]
    return total if limit is None else min(total, limit)


def memory_info() -> dict[str, int]:
    """What /proc/meminfo says of main memory, in bytes: MemTotal, MemAvailable and others."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = (line.split(":", 1) for line in lines)
    return {
        name: int(value.split()[0]) * 1024 for name, value in fields if value.strip().endswith("kB")
    }


def memory_limit(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes that the kernel lets this process's control groups have.

    The least of them counts; None without a limit.
    """
    limits = []
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.exists() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            tree, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            tree, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        own = tree / path.lstrip("/")
        # Those around it limit a group too; in a container the tree begins with its own.
        for folder in (own, *own.parents[: len(own.parents) - len(tree.parents)]):
            try:
                limits.append(int((folder / name).read_text(encoding="ascii")))
            except (OSError, ValueError):  # not seen from here, or no limit ("max")
                continue
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)
