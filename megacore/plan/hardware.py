"""What this machine has, found out without importing torch."""

import ctypes
import functools
import os
from dataclasses import dataclass
from pathlib import Path

from megacore.engine.precision import resolve_precision


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
        """fp32, bf16 or fp16 for `train.precision`; auto is bf16 where that is native, else fp32."""
        if precision != "auto":
            return precision
        return "bf16" if self.native_bf16 else "fp32"

    @classmethod
    def detect(cls) -> "Hardware":
        """This machine, as this process sees it (CUDA_VISIBLE_DEVICES, affinity and container limits counted)."""
        return _detect()


@functools.cache
def _detect() -> Hardware:
    gpus = _visible_gpus()
    native = resolve_precision("auto", "cuda" if gpus else "cpu") == "bf16"
    return Hardware(len(os.sched_getaffinity(0)), _main_memory(), gpus, _cpu_flags(), native)


def _main_memory() -> int:
    """Bytes of RAM, or of the container's limit where that is lower."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    total = int(fields["MemTotal"].split()[0]) * 1024
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            total = min(total, int(limit.read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such cgroup version, or no limit ("max")
            continue
    return total


def _cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def _visible_gpus() -> tuple[Gpu, ...]:
    """Name and memory of each GPU, from the driver; no context is made, so no GPU memory is taken."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
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
