"""Count of the bytes of a model's state in an engine's tensors, each storage once."""

import ctypes
import gc
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.config.deepspeed import ZeroSettings
from megacore.engine.base import Engine
from megacore.engine.native import NativeEngine

PARAMETERS, GRADIENTS, MAIN, MOMENTS = "parameters", "gradients", "main weights", "moments"
BUCKETS, PERSISTED, GATHERED = "buckets", "persisted", "gathered"
STEP_GRADIENTS, LEFT_GRADIENTS = "gradients for the step", "gradients as backward left them"
STAGING, LARGEST = "updated weights on their way", "room for one gradient"

_ATTRIBUTES = {
    # DeepSpeedZeroOptimizer: stages 1 and 2
    "bit16_groups_flat": PARAMETERS,
    "averaged_gradients": GRADIENTS,
    "all_grad_tensors": GRADIENTS,
    "accumulated_grads_in_cpu": GRADIENTS,
    "single_partition_of_fp32_groups": MAIN,
    "temp_grad_buffer_for_cpu_offload": LARGEST,
    "temp_grad_buffer_for_gpu_offload": LARGEST,
    "param_buffer_of_bit16_for_cpu_offload_groups": STAGING,
    # BF16_Optimizer: stage 1
    "bf16_groups_flat": PARAMETERS,
    "fp32_groups_gradients_flat": GRADIENTS,
    "fp32_groups_flat_partition": MAIN,
    # FP16_UnfusedOptimizer: stage 0
    "fp32_groups": MAIN,
    # DeepSpeedZeroOptimizer_Stage3
    "lp_param_buffer": PARAMETERS,
    "param_groups_fp16_flat_cpu_memory": PARAMETERS,
    "grad_partitions_flat_buffer": GRADIENTS,
    "fp32_partitioned_groups_flat": MAIN,
    # both
    "ipg_buckets": BUCKETS,
    "extra_large_param_to_reduce": GRADIENTS,
}
"""Content of the attributes of DeepSpeed's optimizers. If several attributes share a storage, the
first in this order counts."""

_MALLINFO2 = (
    "arena",
    "ordblks",
    "smblks",
    "hblks",
    "hblkhd",
    "usmblks",
    "fsmblks",
    "uordblks",
    "fordblks",
    "keepcost",
)
"""Fields of glibc's `struct mallinfo2`."""


@dataclass
class Census:
    """Bytes of one process by kind of storage, and of storages of unknown kind."""

    kinds: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Bytes by kind of content."""
    hosted: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Bytes of each kind in host memory instead of the device's; on a CPU, the bytes that would be
    there, judged by their kind."""
    unknown: int = 0
    """Bytes of live tensors that are not a known part of the state."""
    largest_unknown: list[str] = field(default_factory=list)
    allocated: int = 0
    """Bytes that the allocator has handed out since before the model was built."""


def take(engine: Engine, zero: ZeroSettings, allocated_before: int) -> Census:
    """Count the bytes, between the last backward pass and the step."""
    gc.collect()
    census, claimed = Census(), set[int]()
    tensors = _native(engine) if isinstance(engine, NativeEngine) else _deepspeed(engine)
    for kind, tensor in tensors:
        if _new(tensor, claimed):
            bytes_ = tensor.untyped_storage().nbytes()
            census.kinds[kind] += bytes_
            on_host = (
                tensor.device.type == "cpu"
                if engine.device.type == "cuda"
                else _offloaded(kind, zero)
            )
            census.hosted[kind] += bytes_ * on_host
    for kind in (STEP_GRADIENTS, LEFT_GRADIENTS):
        if GRADIENTS not in census.kinds and kind in census.kinds:  # no other gradients
            census.kinds[GRADIENTS], census.hosted[GRADIENTS] = (
                census.kinds.pop(kind),
                census.hosted.pop(kind),
            )
    unknown = []
    for tensor in _live():
        if _new(tensor, claimed):
            unknown.append(
                (tensor.untyped_storage().nbytes(), f"{tensor.dtype} {list(tensor.shape)}")
            )
    unknown.sort(reverse=True)
    census.unknown = sum(count for count, _ in unknown)
    census.largest_unknown = [
        f"{count / 1e6:.2f} MB {description}" for count, description in unknown[:5]
    ]
    census.allocated = allocated_bytes(engine.device) - allocated_before
    return census


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes given out by the device's allocator, or on a CPU by glibc's malloc.

    They include more than tensors.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)

    class Mallinfo2(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO2]

    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def resident_mb(name: str) -> float:
    """Return VmRSS, or its peak VmHWM, of this process in 10^6 bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024 / 1e6


def reset_peak() -> None:
    """Reset VmHWM to the current memory."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def _offloaded(kind: str, zero: ZeroSettings) -> bool:
    """Return True if DeepSpeed keeps this kind on the CPU when it computes on a GPU."""
    if kind == PARAMETERS:
        return zero.offload_param != "none"
    if kind == GRADIENTS and zero.stage < 2:
        return False
    return zero.offload_optimizer != "none" and kind in (
        GRADIENTS,
        MAIN,
        MOMENTS,
        STEP_GRADIENTS,
        STAGING,
    )


def _new(tensor: Tensor, claimed: set[int]) -> bool:
    """Return True if the tensor's storage was not claimed before, and claim it."""
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        return False
    storage = tensor.untyped_storage()
    if not storage.nbytes() or storage.data_ptr() in claimed:
        return False
    claimed.add(storage.data_ptr())
    return True


def _native(engine: Any) -> Iterator[tuple[str, Tensor]]:
    for weights in engine._optimizer.divided.values():
        for flat in weights:
            yield PARAMETERS, flat.shard
            yield GATHERED, flat.buffer
    for parameter in engine._stage.named_parameters.values():
        yield PARAMETERS, parameter.data
    for sync in engine._syncs:
        for bucket in sync.buckets:
            yield GRADIENTS, bucket.reduced
            if bucket.pending is not None:  # receives the sums of other ranks
                for cell in bucket.pending._finish.__closure__ or ():
                    for tensor in _tensors(cell.cell_contents):
                        yield BUCKETS, tensor
    for part in engine._optimizer._parts:
        for weight in part.weights:
            yield MAIN, weight.weight
            yield MOMENTS, weight.exp_avg
            if weight.exp_avg_sq is not None:
                yield MOMENTS, weight.exp_avg_sq


def _deepspeed(engine: Any) -> Iterator[tuple[str, Tensor]]:
    optimizer = engine._engine.optimizer
    for parameter in engine._stage.named_parameters.values():
        if hasattr(parameter, "ds_tensor"):
            yield PARAMETERS, parameter.ds_tensor
            yield PERSISTED if parameter.ds_persist else GATHERED, parameter.data
        else:
            yield PARAMETERS, parameter.data
    mains = []
    for name, kind in _ATTRIBUTES.items():
        for tensor in _tensors(getattr(optimizer, name, None)):
            yield kind, tensor
            if kind == MAIN:
                mains.append(tensor)
    for main in mains:
        if main.grad is not None:
            yield STEP_GRADIENTS, main.grad
    for state in engine._adam.state.values():
        for tensor in _tensors(state):
            yield MOMENTS, tensor
    for parameter in engine._stage.named_parameters.values():
        for gradient in _tensors([getattr(parameter, "grad_accum", None), parameter.grad]):
            yield LEFT_GRADIENTS, gradient


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested containers, including dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif is_dataclass(value) and not isinstance(value, type):
        # Only a bucket's `buffer`: its other fields refer to parameters and gradients that are
        # already counted.
        yield from _tensors(vars(value).get("buffer"))


def _live() -> Iterator[Tensor]:
    """Yield every tensor that Python's garbage collector tracks, and their gradients."""
    for each in gc.get_objects():
        if issubclass(type(each), Tensor):
            yield each
            if each.is_leaf and each.grad is not None:
                yield each.grad
