"""What needs torch: which kernels a run would have here, whether CUDA works, and how fast this machine computes."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from megacore.plan.hardware import Hardware

_CPU_SIZE = 1024
_GPU_SIZE = 4096
_COPY_BYTES = 2**26
_SECONDS = 0.5
"""Of each measurement."""
_LEAST, _MOST = 3, 50
_GIGA = 1e9


def look_at_torch(precision: str, kernels: str, compile_layers: str) -> dict[str, Any]:
    """The build of torch, the precision and the kernels of a run, by operation.

    Args:
        precision: `train.precision`.
        kernels: `train.kernels`.
        compile_layers: `train.compile`; that what it asks for works is seen when a run begins.
    """
    import torch

    from megacore.engine.precision import resolve_precision
    from megacore.kernels.choice import choose_kernels, plain_kernels

    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    resolved = resolve_precision(precision, device.type)
    compiled = compile_layers == "on" or (compile_layers == "auto" and cuda)
    plain = kernels == "plain"
    chosen = plain_kernels() if plain else choose_kernels(device, types[resolved], compiled=compiled)
    return {
        "cuda_build": torch.version.cuda,
        "cuda_works": cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,  # type: ignore[no-untyped-call]
        "threads": torch.get_num_threads(),
        "device": device.type,
        "precision": resolved,
        "kernels": dict(chosen.names),
    }


def measure_speed() -> dict[str, Any]:
    """Rates of a matrix product (GFLOP/s) and of a copy in memory (GB/s): of the CPU, or of each GPU."""
    import torch

    if not torch.cuda.is_available():
        return {"device": "cpu", "devices": [_rates(torch.device("cpu"), torch.float32, _CPU_SIZE)]}
    bf16 = torch.cuda.is_bf16_supported()
    devices: list[dict[str, Any]] = []
    for number in range(torch.cuda.device_count()):
        try:
            place = torch.device("cuda", number)
            devices.append(_rates(place, torch.bfloat16 if bf16 else torch.float16, _GPU_SIZE))
        except RuntimeError as error:  # a GPU that does not run must not hide the others
            devices.append({"problem": " ".join(str(error).split())[:300]})
    return {"device": "cuda", "devices": devices, "expected": len(Hardware.detect().gpus)}


def _rates(device: Any, dtype: Any, size: int) -> dict[str, float]:
    import torch

    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.ones(_COPY_BYTES, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    multiply = _median_seconds(lambda: torch.mm(left, right, out=product), wait)
    copy = _median_seconds(lambda: target.copy_(source), wait)
    return {
        "gflops": round(2 * size**3 / multiply / _GIGA, 1),
        "copy_gb_s": round(2 * _COPY_BYTES / copy / _GIGA, 2),
    }


def _median_seconds(work: Callable[[], object], wait: Callable[[], None]) -> float:
    """The median of repetitions, after one that warms up."""
    work()
    wait()
    times: list[float] = []
    ends = time.perf_counter() + _SECONDS
    while len(times) < _LEAST or (len(times) < _MOST and time.perf_counter() < ends):
        started = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
