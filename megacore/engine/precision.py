"""Which type a run computes in; imports no torch, since a stage's key asks."""

import ctypes
from functools import cache
from pathlib import Path

BF16_CAPABILITY = 80
"""First CUDA compute capability (times 10) with bf16 tensor cores: Ampere."""
_CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
_CUDA_CAPABILITY_MAJOR = 75
_CUDA_CAPABILITY_MINOR = 76


def resolve_precision(precision: str, device_type: str) -> str:
    """Compute type of a run: "fp32", "bf16" or "fp16".

    Args:
        precision: `train.precision`; "auto" means bf16 where the hardware multiplies it natively, else fp32.
        device_type: "cpu" or "cuda".
    """
    if precision != "auto":
        return precision
    native = cuda_capability() >= BF16_CAPABILITY if device_type == "cuda" else cpu_multiplies_bf16()
    return "bf16" if native else "fp32"


@cache
def cpu_multiplies_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has instructions for products of bf16; without them bf16 is slower than fp32."""
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "")
    return not _CPU_FLAGS.isdisjoint(flags.split())


@cache
def cuda_capability() -> int:
    """Compute capability of the first visible GPU times 10 (80 is Ampere), 0 without one.

    The driver is asked directly: no context is made, so no GPU memory is taken.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return 0
    for value, attribute in ((major, _CUDA_CAPABILITY_MAJOR), (minor, _CUDA_CAPABILITY_MINOR)):
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return 0
    return major.value * 10 + minor.value
