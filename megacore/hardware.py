"""Hardware of this host: cores, memory, GPUs, and the compute type of a run on them.

`python -m megacore.hardware` writes them as JSON, which the host that starts a run reads through
ssh. This module does not import torch, because the command line and stage keys use it too.
"""

import ast
import ctypes
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from megacore.errors import LaunchError
from megacore.paths import exists

DEVICE_VARIABLE = "MEGACORE_DEVICE"
"""Variable that tells a rank the device of its job: "cuda", or unset for the one that it finds."""
SHARED_PACKAGES = ("megacore", "torch")
"""Packages that must have the same version on all hosts of a run."""
_NO_LIMIT = 2**62
"""Bound in bytes. Version 1 of control groups reports "no limit" as a larger value."""
BF16_CAPABILITY = 80
"""Lowest CUDA compute capability (times 10) with bf16 tensor cores: Ampere."""
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
_MULTIPROCESSOR_COUNT = 16
_CUDA_CAPABILITY_MAJOR = 75
_CUDA_CAPABILITY_MINOR = 76


@dataclass(frozen=True)
class Gpu:
    """One visible GPU."""

    name: str
    memory: int
    """GPU memory in bytes."""
    multiprocessors: int | None = None
    """Number of multiprocessors, for a MIG slice those of the slice; None if it is unknown."""


@dataclass(frozen=True)
class Hardware:
    """Cores, memory and GPUs that a run may use."""

    cores: int
    """Number of CPU cores on which this process may run."""
    memory: int
    """Bytes of host memory, at most the container's limit."""
    gpus: tuple[Gpu, ...] = ()
    cpu_flags: frozenset[str] = frozenset()
    """Instruction sets as named in /proc/cpuinfo."""
    native_bf16: bool = False
    """True if the training device multiplies bf16 natively."""
    host: str | None = None
    """Host in the hostfile that has this hardware; None means this host."""

    @property
    def device_type(self) -> str:
        """Device type of a run: "cuda" or "cpu"."""
        return "cuda" if self.gpus else "cpu"

    @property
    def owner(self) -> str:
        """Name of the host in a sentence."""
        return owner_of(self.host)

    def resolve_precision(self, precision: str) -> str:
        """Return the compute type ("fp32", "bf16" or "fp16") for `train.precision`.

        "auto" means bf16 where the hardware supports it natively, else fp32.
        """
        if precision != "auto":
            return precision
        return "bf16" if self.native_bf16 else "fp32"

    @classmethod
    def detect(cls) -> "Hardware":
        """Return the hardware that is visible to this process.

        CUDA_VISIBLE_DEVICES, CPU affinity and container limits are taken into account.

        Raises LaunchError if torch is for an accelerator that megacore does not support.
        """
        refuse_unsupported_accelerator()
        return _detect()

    def to_json(self) -> dict[str, Any]:
        """Return the fields as values for JSON."""
        return asdict(self) | {"cpu_flags": sorted(self.cpu_flags)}

    @classmethod
    def from_json(cls, values: dict[str, Any], *, host: str) -> "Hardware":
        """Build the hardware of `host` from its `to_json`."""
        gpus = tuple(Gpu(**gpu) for gpu in values["gpus"])
        flags = frozenset(values["cpu_flags"])
        return cls(**values | {"gpus": gpus, "cpu_flags": flags, "host": host})


def owner_of(host: str | None) -> str:
    """Return the name of a host of the hostfile in a sentence; None means this host."""
    return "this machine" if host is None else f"host {host}"


def refuse_unsupported_accelerator() -> None:
    """Raise LaunchError if torch is for an accelerator that megacore does not support."""
    problem = unsupported_accelerator()
    if problem is not None:
        raise LaunchError(problem)


def unsupported_accelerator() -> str | None:
    """Return the sentence about an accelerator that megacore does not support, or None.

    torch calls AMD's GPUs "cuda" too, and Apple's would be left idle without a word.
    """
    hip = torch_build().get("hip")
    if hip:
        return (
            f"torch is built for AMD's ROCm {hip}, which megacore does not support: use NVIDIA "
            "GPUs or CPUs, with a torch for CUDA or for CPUs"
        )
    if sys.platform == "darwin":
        return (
            "the accelerator of macOS is Apple's MPS, which megacore does not support: use Linux "
            "with NVIDIA GPUs or CPUs"
        )
    return None


def installed_version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed; it is not imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def shared_versions() -> dict[str, str]:
    """Return the versions of Python and packages that hosts compare; "none" for a missing one."""
    packages = (*SHARED_PACKAGES, "deepspeed")
    versions = {package: installed_version(package) or "none" for package in packages}
    return {"Python": platform.python_version()} | versions


def check_versions(
    packages: Iterable[str],
    host: str,
    versions: Mapping[str, str],
    other: str,
    other_versions: Mapping[str, str],
) -> None:
    """Raise LaunchError if two hosts have different versions of Python or of one of `packages`."""
    for name in ("Python", *packages):
        if versions.get(name) != other_versions.get(name):
            raise LaunchError(
                f"{host} has {name} {versions.get(name)} and {other} has "
                f"{other_versions.get(name)}: install the same environment on both"
            )


@cache
def torch_build() -> dict[str, str | None]:
    """Return the constants of torch/version.py, such as "cuda" and "hip"; torch is not imported.

    The result is empty without torch.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        tree = ast.parse(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return {}
    constants: dict[str, str | None] = {}
    for line in tree.body:
        if isinstance(line, ast.Assign | ast.AnnAssign) and isinstance(line.value, ast.Constant):
            target = line.targets[0] if isinstance(line, ast.Assign) else line.target
            if isinstance(target, ast.Name):
                constants[target.id] = line.value.value  # type: ignore[assignment]
    return constants


def driver_cuda() -> int | None:
    """Return the newest CUDA that the NVIDIA driver runs: 12080 is 12.8; None without a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if failed or not version.value else version.value


def resolve_precision(precision: str, device_type: str) -> str:
    """Return the compute type of a run: "fp32", "bf16" or "fp16".

    Args:
        precision: value of `train.precision`; "auto" means bf16 where the hardware multiplies it
            natively, else fp32.
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
    """Return True if this CPU has instructions for products of bf16.

    Without them bf16 is slower than fp32.
    """
    return not _BF16_FLAGS.isdisjoint(_cpu_flags(cpuinfo))


@cache
def cuda_capability() -> int:
    """Return the compute capability of the first visible GPU times 10; 0 without a GPU.

    80 is Ampere. The function queries the driver directly: it creates no context, so it takes no
    GPU memory.
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
    """Return name and memory of each GPU without a context, so without GPU memory."""
    driver = _cuda_driver()
    count = ctypes.c_int()
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    gpus = []
    for index in range(count.value):
        device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(128)
        multiprocessors = ctypes.c_int()
        failed = (
            driver.cuDeviceGet(ctypes.byref(device), index)
            or driver.cuDeviceGetName(name, len(name), device)
            or driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
            or driver.cuDeviceGetAttribute(
                ctypes.byref(multiprocessors), _MULTIPROCESSOR_COUNT, device
            )
        )
        if not failed:
            text = name.value.decode("utf-8", errors="replace")
            gpus.append(Gpu(text, memory.value, multiprocessors.value))
    return tuple(gpus)


def _cuda_driver() -> ctypes.CDLL | None:
    """Return the initialized driver, or None without a driver or a usable GPU."""
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
    """Return the bytes of host memory, or the container's limit if that is lower."""
    limit = memory_limit()
    total = memory_info()["MemTotal"]
    return total if limit is None else min(total, limit)


def memory_info() -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes: MemTotal, MemAvailable and others."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = (line.split(":", 1) for line in lines)
    return {
        name: int(value.split()[0]) * 1024 for name, value in fields if value.strip().endswith("kB")
    }


def resident_memory() -> int | None:
    """Return the bytes of this process's resident memory; None if this is not Linux."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory_limit(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the lowest memory limit of this process's control groups, in bytes.

    Args:
        groups: file that lists the control groups of the process.
        root: mount point of the control group file systems.

    Returns:
        The limit, or None if there is none.
    """
    limits = []
    for line in groups.read_text(encoding="utf-8").splitlines() if exists(groups) else ():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            tree, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            tree, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = tree / path.lstrip("/")
        # Parent groups limit a group too. In a container the tree begins at the container's group.
        for folder in (group, *group.parents[: len(group.parents) - len(tree.parents)]):
            try:
                limits.append(int((folder / name).read_text(encoding="ascii")))
            except (OSError, ValueError):  # not visible from here, or no limit ("max")
                continue
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def main() -> None:
    """Write this host's hardware as JSON, or its problem, with exit code 1."""
    try:
        hardware = Hardware.detect()
    except LaunchError as error:
        sys.exit(str(error))
    sys.stdout.write(json.dumps(hardware.to_json()) + "\n")


if __name__ == "__main__":
    main()
