"""Probe of a micro batch: a check that it fits in memory.

The probe takes a few real optimizer steps with the longest samples, under a memory limit.
"""

import re
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megacore.errors import ConfigError, LossError
from megacore.finetune.task import FinetuneTask, build_task
from megacore.finetune.trainer import MOST_SKIPPED, Step, prepare
from megacore.hardware import resolve_precision
from megacore.jobs.finetune import ProbeJob
from megacore.train.memory import translate_memory_errors

GPU_SHARE = 0.95
"""Share of a GPU's memory that PyTorch may use if no limit is configured. The rest is for the
CUDA context, NCCL, and the fragmentation of a whole epoch, which exceeds that of a few equal
steps."""
_CHECK = re.compile(r"^\[enforce fail at [^]]*\] err == 0\. ")
"""Prefix of PyTorch's message before the failed allocation."""
_NO_PRIMITIVE = "could not create a primitive"
"""Message of oneDNN when an allocation for its code or scratch space fails."""
_ALL_THREADS = 1 << 20
"""Elements of a tensor large enough to be computed by all threads."""


def run_probe(
    job: ProbeJob, device: torch.device, beat: Callable[[int], None] = lambda step: None
) -> int:
    """Build everything as the fine-tuning does and take `job.steps` optimizer steps.

    Args:
        job: job with the micro batch in its configuration.
        device: device of this rank.
        beat: callback, called before each optimizer step with the number of steps taken.

    Returns:
        Peak memory in bytes of the rank that used the most, identical on each rank.

    Raises:
        MemoryExhaustedError: the micro batch does not fit.
        ConfigError: the limit leaves nothing for the model, or exceeds the GPU's memory.
        LossError: fp16 finds no loss scale.
    """
    _import_libraries(job)
    task = build_task(job.config, Path(job.examples_directory), Path(job.pretrained_directory))
    with memory_errors(job.config.train.micro_batch_size), limited_memory(job.memory_limit, device):
        take_steps(job, task, device, beat)
    peak = torch.tensor(peak_memory(device), device=device)
    if dist.is_initialized():
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak)


def _import_libraries(job: ProbeJob) -> None:
    """Import the libraries before the memory limit applies, so that no import fails."""
    from transformers import Trainer, TrainingArguments  # noqa: F401

    if job.config.launch.distributed.startswith("zero"):
        from megacore.engine.deepspeed.join import import_deepspeed

        import_deepspeed()


def take_steps(
    job: ProbeJob, task: FinetuneTask, device: torch.device, beat: Callable[[int], None]
) -> None:
    """Take optimizer steps of the real training loop on the longest samples.

    Steps skipped by fp16 are not counted.

    Raises:
        LossError: fp16 skipped too many steps in a row.
    """
    train = job.config.train
    precision = resolve_precision(job.precision or train.precision, device.type)
    # Skipped fp16 steps do not count, so more steps may be necessary.
    steps = job.steps * (MOST_SKIPPED if precision == "fp16" else 1)
    batches = job.ranks * train.gradient_accumulation_steps * steps
    directory = Path(job.run_directory)
    rows = Repeated(task.largest_rows(train.micro_batch_size), batches)
    trainer = prepare(
        job.config, task, precision=precision, device=device, directory=directory, rows=rows
    )
    taken = skipped = 0

    def count(step: Step) -> None:
        nonlocal taken, skipped
        skipped = skipped + 1 if step.skipped else 0
        taken += not step.skipped
        if skipped == MOST_SKIPPED:
            raise LossError(
                f"fp16 has skipped {skipped} steps in a row for gradients that overflow: set "
                "train.precision to bf16 or fp32"
            )
        if taken == job.steps:
            raise _EnoughError

    trainer.before_step, trainer.after_step = lambda: beat(taken), count
    with suppress(_EnoughError):
        trainer.train_from(None, lambda: None)


class _EnoughError(Exception):
    """Exception that leaves the Trainer's loop."""


class Repeated(Sequence[Mapping[str, Any]]):
    """Sequence that repeats rows without copying them."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], times: int) -> None:
        self._rows, self._times = rows, times

    def __len__(self) -> int:
        return len(self._rows) * self._times

    def __getitem__(self, number: Any) -> Any:
        return self._rows[number % len(self._rows)]


@contextmanager
def limited_memory(limit: int | None, device: torch.device) -> Iterator[None]:
    """Make allocations beyond a limit fail in the body, instead of exhausting the host's memory.

    On a GPU, the limit applies to PyTorch's allocations. Without a GPU, it applies to the process's
    resident memory, including what is in use already: the kernel limits private memory
    (RLIMIT_DATA) and refuses further allocations. The limit ends with the body, because reporting a
    failure needs memory, too.

    Args:
        limit: bytes; None means GPU_SHARE of the GPU, and no limit without a GPU.
        device: device of this rank.

    Raises:
        ConfigError: the limit is less than what the process uses, or more than the GPU has.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        if limit is not None and limit > total:
            raise ConfigError(
                f"the memory limit of a rank is {limit / 1e9:.2f} GB and its GPU has "
                f"{total / 1e9:.2f} GB: lower find_batch_size.memory_limit_gb"
            )
        torch.cuda.set_per_process_memory_fraction(
            GPU_SHARE if limit is None else limit / total, device
        )
    if limit is None or device.type == "cuda":
        yield
        return
    # OpenMP aborts a process that cannot start its threads, so they start before the limit.
    torch.ones(_ALL_THREADS).exp_()
    resident, private = _status("VmRSS"), _status("VmData")
    if limit <= resident:
        raise ConfigError(
            f"the memory limit of a rank is {limit / 1e9:.2f} GB, and it has {resident / 1e9:.2f} "
            "GB before the model is built: raise find_batch_size.memory_limit_gb, or free some "
            "memory"
        )
    previous = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = private + limit - resident
    resource.setrlimit(
        resource.RLIMIT_DATA,
        (
            allowed if previous[1] == resource.RLIM_INFINITY else min(allowed, previous[1]),
            previous[1],
        ),
    )
    try:
        yield
    except RuntimeError as error:
        if _NO_PRIMITIVE not in str(error):
            raise
        raise MemoryError(f"oneDNN cannot allocate memory ({_NO_PRIMITIVE})") from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, previous)


def peak_memory(device: torch.device) -> int:
    """Return this rank's peak memory in bytes: allocated on its GPU, or resident without one."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


@contextmanager
def memory_errors(batch: int) -> Iterator[None]:
    """Translate a failed allocation in the body into MemoryExhaustedError."""

    def message(reason: str) -> str:
        return f"out of memory with a micro batch of {batch} ({_CHECK.sub('', reason)})"

    with translate_memory_errors(message):
        yield


def _status(name: str) -> int:
    """Return a field of this process's status in /proc, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
