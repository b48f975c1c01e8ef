"""Whether a micro batch fits.

Makes some real optimizer steps with the longest samples, under a limit of memory.
"""

import re
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megacore.errors import ConfigError, LossError
from megacore.finetune.task import FinetuneTask, Scorer, Split, build_task
from megacore.finetune.trainer import MOST_SKIPPED, Step, prepare
from megacore.hardware import Hardware
from megacore.jobs.finetune import ProbeJob
from megacore.train.memory import reworded

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

GPU_SHARE = 0.95
"""Of a GPU's memory that PyTorch may take where no limit is asked for: an epoch's memory is more
fragmented than that of a few equal steps, and the rest is also the CUDA context's and NCCL's."""
_CHECK = re.compile(r"^\[enforce fail at [^]]*\] err == 0\. ")
"""What PyTorch says before it names the allocation."""
_NO_PRIMITIVE = "could not create a primitive"
"""What oneDNN says when memory for its code or its scratch space is denied to it."""
_ALL_THREADS = 1 << 20
"""Numbers of a tensor that is surely computed by all threads."""


def run_probe(
    job: ProbeJob, device: torch.device, beat: Callable[[int], None] = lambda step: None
) -> int:
    """Build everything as the fine-tuning does and take `job.steps` optimizer steps.

    Args:
        job: with the micro batch in its configuration.
        device: this rank's.
        beat: called before each optimizer step with the number of those that are taken.

    Returns:
        Bytes that the rank with most of them had at the most; the same on each rank.

    Raises:
        MemoryExhaustedError: the micro batch does not fit.
        ConfigError: the limit leaves nothing for the model, or is beyond the GPU.
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
    """What a rank has before the model: nothing of it is to fail for want of memory."""
    from transformers import Trainer, TrainingArguments  # noqa: F401

    if job.config.launch.distributed.startswith("zero"):
        from megacore.engine.deepspeed.join import import_deepspeed

        import_deepspeed()


def take_steps(
    job: ProbeJob, task: FinetuneTask, device: torch.device, beat: Callable[[int], None]
) -> None:
    """Optimizer steps of the real loop on the longest samples.

    Those that fp16 skips are not counted.

    Raises:
        LossError: fp16 skipped too many in a row.
    """
    train = job.config.train
    precision = Hardware.detect().resolve_precision(train.precision)
    # what fp16 skips is taken again
    steps = job.steps * (MOST_SKIPPED if precision == "fp16" else 1)
    batches = job.ranks * train.gradient_accumulation_steps * steps
    directory = Path(job.run_directory)
    longest = Longest(task, train.micro_batch_size, batches)
    trainer = prepare(job.config, longest, precision=precision, device=device, directory=directory)
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
    """Raised through the Trainer's loop to leave it."""


class Longest:
    """A task whose training split is only a micro batch of its longest samples, repeated."""

    def __init__(self, task: FinetuneTask, batch: int, batches: int) -> None:
        """`batches` micro batches of `batch` samples are a pass over the split."""
        self.tokenizer, self.metric, self.larger_is_better = (
            task.tokenizer,
            task.metric,
            task.larger_is_better,
        )
        self._task = task
        self._rows = Repeated(task.largest_rows(batch), batches)

    def split(self, name: Split) -> Any:
        """The samples of a split."""
        return self._rows if name == "train" else self._task.split(name)

    def build_model(self) -> "PreTrainedModel":
        """The task's model."""
        return self._task.build_model()

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """A batch of samples, padded."""
        return self._task.collate(rows)

    def largest_rows(self, count: int) -> list[dict[str, Any]]:
        """Samples of the greatest length."""
        return self._task.largest_rows(count)

    def scorer(self, accelerator: "Accelerator", model: "PreTrainedModel") -> Scorer:
        """The task's."""
        return self._task.scorer(accelerator, model)


class Repeated(Sequence[Mapping[str, Any]]):
    """Rows, several times over, held once."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], times: int) -> None:
        self._rows, self._times = rows, times

    def __len__(self) -> int:
        return len(self._rows) * self._times

    def __getitem__(self, number: Any) -> Any:
        return self._rows[number % len(self._rows)]


@contextmanager
def limited_memory(limit: int | None, device: torch.device) -> Iterator[None]:
    """Let allocations beyond a limit fail in the body, instead of taking the machine's last memory.

    On a GPU it limits what PyTorch takes there. Else it is the process's resident memory, of which
    what it has by now is a part: the kernel limits private memory (RLIMIT_DATA), and refuses what
    it has not given yet. That ends with the body: to tell of a failure takes memory, too.

    Args:
        limit: bytes; None means GPU_SHARE of the GPU, without one no limit.
        device: this rank's.

    Raises:
        ConfigError: it is less than what the process has, or more than the GPU.
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
    # OpenMP ends a process that cannot start its threads, so they start now
    torch.ones(_ALL_THREADS).exp_()
    resident, private = _status("VmRSS"), _status("VmData")
    if limit <= resident:
        raise ConfigError(
            f"the memory limit of a rank is {limit / 1e9:.2f} GB, and it has {resident / 1e9:.2f} "
            "GB before the model is built: raise find_batch_size.memory_limit_gb, or free some "
            "memory"
        )
    before = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = private + limit - resident
    resource.setrlimit(
        resource.RLIMIT_DATA,
        (allowed if before[1] == resource.RLIM_INFINITY else min(allowed, before[1]), before[1]),
    )
    try:
        yield
    except RuntimeError as error:
        if _NO_PRIMITIVE not in str(error):
            raise
        raise MemoryError(f"oneDNN cannot allocate memory ({_NO_PRIMITIVE})") from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def peak_memory(device: torch.device) -> int:
    """Bytes that this rank had at the most: on its GPU, or without one resident."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


@contextmanager
def memory_errors(batch: int) -> Iterator[None]:
    """Turn a failing allocation in the body into MemoryExhaustedError: too large."""

    def message(reason: str) -> str:
        return f"out of memory with a micro batch of {batch} ({_CHECK.sub('', reason)})"

    with reworded(message):
        yield


def _status(name: str) -> int:
    """Bytes of a line of this process's status in /proc."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
