"""Inspection of a host: packages, limits, memory, GPUs, kernels and speed.

torch is imported only by the functions that need it.
"""

import csv
import fcntl
import hashlib
import mmap
import os
import platform
import random
import resource
import secrets
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import megacore
from megacore.errors import one_line
from megacore.hardware import (
    SHARED_PACKAGES,
    Hardware,
    installed_version,
    memory_info,
    memory_limit,
    refuse_unsupported_accelerator,
    unsupported_accelerator,
)
from megacore.paths import is_dir, rglob

PACKAGES = (
    "torch",
    "numpy",
    "deepspeed",
    "transformers",
    "tokenizers",
    "safetensors",
    "pydantic",
    "triton",
)
"""Packages, besides megacore and Python, that affect the results of a run and the communication
of its ranks."""
APEX_MODULES = ("amp_C", "fused_layer_norm_cuda", "fused_weight_gradient_mlp_cuda")
"""Modules of NVIDIA apex that megacore uses, as `scripts/install_apex.sh` builds them."""
REQUIRED = ("python", *SHARED_PACKAGES, "numpy")
"""Packages that must have the same version on every host."""
_GIT_SECONDS = 5.0
"""Time limit of git."""
_LIMITS = {
    "memlock": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
}
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_MIB = 2**20
_SMI_SECONDS = 15.0
"""Time limit of nvidia-smi."""
_FIELDS = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.free",
    "driver_version",
    "ecc.errors.uncorrected.volatile.total",
    "temperature.gpu",
    "utilization.gpu",
)
_QUERIES = {
    "--query-gpu": _FIELDS,
    "--query-compute-apps": ("gpu_uuid", "pid", "process_name", "used_memory"),
}
_CPU_SIZE = 1024
_GPU_SIZE = 4096
_COPY_BYTES = 2**26
_RATE_SECONDS = 0.5
"""Duration of a speed measurement, within the limits of repetitions below."""
_LEAST, _MOST = 3, 50
"""Minimum and maximum number of repetitions of a speed measurement."""
_GIGA = 1e9
_LEAST_FREE = 2**30
"""Free bytes below which the workspace is not measured."""
_STORAGE_SECONDS = 0.6
"""Duration of each of the four measurements of the workspace."""
_STORAGE_BYTES = 2**28
"""Largest file of these measurements."""
_READ_BYTES = 2**22
"""Bytes of a sequential read."""
_PAGE_BYTES = 2**12
"""Bytes of a random read, as of a page fault in a memory-mapped file."""


def look_at_packages() -> dict[str, Any]:
    """Return the version of each package, None if it is missing; no package is imported.

    megacore's version includes a digest of its sources.
    """
    root = Path(megacore.__file__).parent
    versions = {
        "python": platform.python_version(),
        "megacore": f"{megacore.__version__} ({sources_digest(root)})",
    }
    return {
        "versions": versions | {package: installed_version(package) for package in PACKAGES},
        "commit": git_commit(root),
        "executable": sys.executable,
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
    }


def sources_digest(root: Path) -> str:
    """Return the first digits of a hash of names and contents of a package's Python files."""
    digest = hashlib.sha256()
    for path in sorted(rglob(root, "*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def git_commit(root: Path) -> str | None:
    """Return the commit of the git work tree that contains `root`; None outside of git."""
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None


def look_at_limits() -> dict[str, Any]:
    """Return soft limits (None: unlimited), the kernel's overcommit mode and RDMA devices."""
    limits: dict[str, Any] = {}
    for name, number in _LIMITS.items():
        soft, _ = resource.getrlimit(number)
        limits[name] = None if soft == resource.RLIM_INFINITY else soft
    try:
        limits["overcommit"] = int(_OVERCOMMIT.read_text(encoding="ascii"))
    except (OSError, ValueError):
        limits["overcommit"] = None
    devices = Path("/sys/class/infiniband")
    limits["rdma"] = sorted(path.name for path in devices.iterdir()) if is_dir(devices) else []
    return limits


def look_at_memory() -> dict[str, Any]:
    """Return host memory, its limit and shared memory in bytes, the cores and the load."""
    info = memory_info()
    shared = Path("/dev/shm")
    usage = shutil.disk_usage(shared) if is_dir(shared) else None
    return {
        "total": info["MemTotal"],
        "available": info.get("MemAvailable", info["MemTotal"]),
        "limit": memory_limit(),
        "shared_total": usage.total if usage else None,
        "shared_free": usage.free if usage else None,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
    }


def look_at_gpus() -> dict[str, Any]:
    """Return visible GPUs and nvidia-smi's report; no CUDA context is created."""
    gpus: dict[str, Any] = {
        "visible": [],
        "restricted": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "smi": None,
        "problem": None,
    }
    if unsupported_accelerator() is not None:
        return gpus  # `toolchain` names it
    gpus["visible"] = [{"name": gpu.name, "memory": gpu.memory} for gpu in Hardware.detect().gpus]
    program = shutil.which("nvidia-smi")
    if program is None:
        return gpus
    try:
        # In parallel, because without persistence mode the driver initializes all GPUs for each
        # query.
        with ThreadPoolExecutor(2) as pool:
            listed, running = pool.map(lambda query: _ask(program, *query), _QUERIES.items())
    except (OSError, subprocess.SubprocessError) as error:
        gpus["problem"] = f"nvidia-smi failed: {_output_of(error)}"
        return gpus
    gpus["smi"] = parse_smi(listed, running)
    return gpus


def _ask(program: str, query: str, fields: tuple[str, ...]) -> str:
    command = [program, f"{query}={','.join(fields)}", "--format=csv,noheader,nounits"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True
    ).stdout


def _output_of(error: Exception) -> str:
    text = getattr(error, "stdout", None) or getattr(error, "stderr", None) or str(error)
    return one_line(text, 300)


def parse_smi(listed: str, running: str) -> list[dict[str, Any]]:
    """Parse nvidia-smi's CSV into a dict for each GPU: memory in bytes, None if unknown."""
    gpus: dict[str, dict[str, Any]] = {}
    for row in _rows(listed):
        values = dict(zip(_FIELDS, row, strict=False))
        gpus[values["uuid"]] = {
            "index": _number(values.get("index")),
            "name": values.get("name"),
            "total": _bytes(values.get("memory.total")),
            "free": _bytes(values.get("memory.free")),
            "driver": values.get("driver_version"),
            "uncorrected": _number(values.get("ecc.errors.uncorrected.volatile.total")),
            "temperature": _number(values.get("temperature.gpu")),
            "utilization": _number(values.get("utilization.gpu")),
            "processes": [],
        }
    for row in _rows(running):
        if len(row) >= 4 and row[0] in gpus:
            gpus[row[0]]["processes"].append(
                {"pid": _number(row[1]), "name": row[2], "used": _bytes(row[3])}
            )
    return list(gpus.values())


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _bytes(text: str | None) -> int | None:
    mebibytes = _number(text)
    return None if mebibytes is None else mebibytes * _MIB


def look_at_torch(
    precision: str, kernels: str | Mapping[str, str], compile_layers: str
) -> dict[str, Any]:
    """Return torch's build, and the precision and the kernels (by operation) of a run here.

    Args:
        precision: `train.precision`.
        kernels: `train.kernels`.
        compile_layers: `train.compile`; compilation itself is only tested when a run starts.

    Raises:
        ConfigError: a kernel that the configuration names cannot run here.
        LaunchError: torch is for ROCm or MPS.
    """
    refuse_unsupported_accelerator()
    import torch

    from megacore.config.train import KernelsConfig
    from megacore.hardware import resolve_precision
    from megacore.kernels.choice import choose_kernels
    from megacore.kernels.implementation import DTYPES, Setting, has_apex

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    resolved = resolve_precision(precision, device.type)
    compiled = compile_layers == "on" or (compile_layers == "auto" and cuda)
    config = KernelsConfig.model_validate(kernels)
    chosen = choose_kernels(Setting(device, DTYPES[resolved], compiled=compiled), config=config)
    nccl = torch.cuda.nccl.version() if cuda else None  # type: ignore[no-untyped-call]
    return {
        "cuda_build": torch.version.cuda,
        "cuda_works": cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "threads": torch.get_num_threads(),
        "device": device.type,
        "precision": resolved,
        "kernels": dict(chosen.names),
        "apex": [name for name in APEX_MODULES if has_apex(name)],
    }


def measure_speed() -> dict[str, Any]:
    """Measure a matrix product (GFLOP/s) and a memory copy (GB/s) on the CPU, or on each GPU."""
    import torch

    if not torch.cuda.is_available():
        return {"device": "cpu", "devices": [_rates(torch.device("cpu"), torch.float32, _CPU_SIZE)]}
    bf16 = torch.cuda.is_bf16_supported()
    devices: list[dict[str, Any]] = []
    for number in range(torch.cuda.device_count()):
        try:
            dtype = torch.bfloat16 if bf16 else torch.float16
            devices.append(_rates(torch.device("cuda", number), dtype, _GPU_SIZE))
        except RuntimeError as error:  # a broken GPU must not hide the others
            devices.append({"problem": one_line(error, 300)})
    return {"device": "cuda", "devices": devices, "expected": len(Hardware.detect().gpus)}


def _rates(device: Any, dtype: Any, size: int) -> dict[str, float]:
    import torch

    from megacore.kernels.matmul import multiply

    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.ones(_COPY_BYTES, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    product = _median_seconds(lambda: multiply(left, right), wait)
    copy = _median_seconds(lambda: target.copy_(source), wait)
    return {
        "gflops": round(2 * size**3 / product / _GIGA, 1),
        "copy_gb_s": round(2 * _COPY_BYTES / copy / _GIGA, 2),
    }


def _median_seconds(work: Callable[[], object], wait: Callable[[], None]) -> float:
    """Return the median time of `work`, after one warm-up call."""
    work()
    wait()
    times: list[float] = []
    ends = time.perf_counter() + _RATE_SECONDS
    while len(times) < _LEAST or (len(times) < _MOST and time.perf_counter() < ends):
        started = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure_storage(workspace: Path) -> dict[str, Any]:
    """Measure the rates of the workspace with a file that has no name, so that none is left over.

    Reads avoid the page cache by O_DIRECT. Where the file system lacks it, the cache is emptied
    before them.

    Returns:
        Bytes per second of sequential writes with an fsync, and of reads; random reads per second;
        the median seconds of an fsync; and whether reads avoided the page cache. Or `skipped`, the
        reason why nothing was measured.
    """
    if not is_dir(workspace):
        return {"skipped": "the workspace is not there yet"}
    if shutil.disk_usage(workspace).free < _LEAST_FREE:
        return {"skipped": f"less than {_LEAST_FREE / 2**30:g} GiB free"}
    path = workspace / f".doctor-{secrets.token_hex(8)}"
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(number, "r+b", buffering=0), mmap.mmap(-1, _READ_BYTES) as buffer:
        path.unlink()
        # An anonymous map is aligned, as O_DIRECT requires; random bytes cannot be compressed.
        buffer[:] = random.Random(0).randbytes(_READ_BYTES)
        size, write = _write_rate(number, buffer)
        syncs = _durations(lambda: _write_and_sync(number))
        direct = _avoid_cache(number)
        positions = random.Random(0)
        with memoryview(buffer) as view, view[:_PAGE_BYTES] as page:
            pages = size // _PAGE_BYTES
            reads = _durations(
                lambda: os.preadv(number, [page], positions.randrange(pages) * _PAGE_BYTES)
            )
        _avoid_cache(number)
        offsets = range(0, size, _READ_BYTES)
        remaining = iter(offsets)
        chunks = _durations(lambda: os.preadv(number, [buffer], next(remaining)), len(offsets))
    return {
        "direct": direct,
        "write": write,
        "read": min(size, len(chunks) * _READ_BYTES) / sum(chunks),
        "random_reads": len(reads) / sum(reads),
        "fsync": statistics.median(syncs),
    }


def _write_rate(file: int, buffer: mmap.mmap) -> tuple[int, float]:
    """Write until the time is up, each time twice as much followed by an fsync.

    Returns the size of the file, and the bytes per second of the last and largest part.
    """
    size, part, rate = 0, _MIB, 0.0
    ends = time.monotonic() + _STORAGE_SECONDS
    while size == 0 or (size + part <= _STORAGE_BYTES and time.monotonic() < ends):
        started = time.perf_counter()
        with memoryview(buffer) as view:
            goal = size + part
            while size < goal:
                with view[: goal - size] as piece:
                    size += os.pwrite(file, piece, size)
        os.fsync(file)
        rate = part / (time.perf_counter() - started)
        part *= 2
    return size, rate


def _write_and_sync(file: int) -> None:
    os.pwrite(file, b"x", 0)
    os.fsync(file)


def _avoid_cache(file: int) -> bool:
    """Empty a file's page cache, and return True if reads of the file no longer use it."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def _durations(work: Callable[[], object], most: int = 10_000) -> list[float]:
    """Return the seconds of each of the calls that fit into the time of a measurement."""
    times: list[float] = []
    ends = time.monotonic() + _STORAGE_SECONDS
    while not times or (len(times) < most and time.monotonic() < ends):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return times
