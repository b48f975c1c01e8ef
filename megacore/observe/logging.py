"""Log lines in the format of Megatron-LM, which programs that read logs know.

The fields up to the number of nan iterations have Megatron-LM's names and order. Those of
Megatron-DeepSpeed follow, then further ones.
"""

import errno
import io
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from megacore.redact import redact_log

logger = logging.getLogger("megacore")
"""Parent of the library's loggers; users of the library configure it like any other logger."""

memory_logger = logging.getLogger("megacore.memory")
"""Logger of memory lines, which several ranks write."""

PPL_TOLERANCE = 1e-4
"""Relative difference of two measurements of one perplexity above which they disagree."""

_MANY_DIGITS = 1e6
"""Measure from which its digits would fill a table, as of a diverged run."""
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of an output that is no closed pipe."""
_TIME = "%Y-%m-%d %H:%M:%S"
MFU_NAMES = {"mfu": "of the vendor's peak", "mfu_measured": "of measured matmuls"}
"""Rate to which each MFU of a step event is relative."""


def prepare_output() -> None:
    """Make standard output and standard error accept any text.

    Characters that a terminal's encoding lacks are printed as escapes: an ASCII terminal shows
    Japanese text as backslashes and numbers. Streams that the caller has closed (`>&-`) are opened
    on /dev/null; otherwise the next file would have their number, and children would print into it.
    Call it before a file is opened.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def output_fault(error: OSError) -> str | None:
    """Return the sentence for an error of standard output; None for one that names a file."""
    if error.filename is not None or error.errno not in _UNWRITABLE:
        return None
    return f"standard output cannot be written ({error.strerror}): direct it to another place"


def flush_output() -> str | None:
    """Flush standard output; return the sentence for an error.

    What was not written is dropped then: the interpreter would fail on it at its end.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        return output_fault(error)
    return None


@dataclass(frozen=True)
class StepReport:
    """Means over one log interval.

    The fields are those of a step event, in which each further loss is a separate field.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    consumed_tokens: int
    ms_per_iteration: float
    lr: float
    """Learning rate of the last update."""
    global_batch_size: int
    seq_length: int
    """Tokens of a sequence in the last iteration."""
    lm_loss: float
    """Mean over the interval's applied iterations and over data-parallel ranks, in nats per
    token."""
    loss_scale: float
    grad_norm: float
    """Gradient norm of the last update, before clipping."""
    skipped_iterations: int
    """Number of skipped iterations in this interval."""
    nan_iterations: int
    """Number of iterations with a NaN loss in this interval."""
    interval_iterations: int
    """Number of iterations of this interval, the last of which is `iteration`. Losses and counts
    are over them; after a resume, rates are over those of the attempt."""
    samples_per_second: float
    tokens_per_second: float
    tokens_per_second_per_rank: float
    tflops: float
    """Rate per rank, including recomputation."""
    model_tflops: float
    """Rate per rank of the model's operations, without recomputation."""
    mfu: float | None
    """Model FLOPs utilization (Chowdhery et al. 2022) between 0 and 1, relative to the vendor's
    peak rate; None if that is unknown."""
    mfu_measured: float | None
    """The same, relative to the rate of matrix products measured at the start; None if it was not
    measured."""
    exposed_communication_ms: float
    """Time per iteration in which this rank waits for others and computes nothing."""
    memory_mb: float
    """Peak memory of this rank in MiB: allocated on a GPU, resident on a CPU."""
    further_losses: Mapping[str, float] = field(default_factory=dict)
    """Means of further minimized losses by name, such as `sop_loss`, in nats per sample."""
    by_source: Sequence[Mapping[str, Any]] = ()
    """Estimates of the minimized loss of each source of a blend, with source, loss, error and
    samples."""

    @property
    def event(self) -> dict[str, Any]:
        """Values of a step event; `by_source` only of a blend."""
        values = asdict(self)
        further = values.pop("further_losses")
        by_source = values.pop("by_source")
        return {**values, **further, **({"by_source": list(by_source)} if by_source else {})}


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one rank in MiB: of torch's allocator on a GPU, resident on a CPU."""

    allocated: float
    max_allocated: float
    reserved: float
    max_reserved: float
    resident: bool = False
    """True if all values are the resident memory of the process."""


def configure_logging(rank: int) -> None:
    """Log to standard output: on rank 0 from level INFO, on other ranks from level WARNING.

    Memory lines are logged on every rank that writes them.
    """
    handler = logging.StreamHandler(sys.stdout)
    prefix = "" if rank == 0 else f"rank {rank}: "
    handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    redact_log(handler)
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    memory_logger.setLevel(logging.INFO)
    logger.propagate = False


def step_line(report: StepReport, now: datetime | None = None) -> str:
    """Return the log line of one interval."""
    time = (now or datetime.now()).strftime(_TIME)
    values = {"mfu": report.mfu, "mfu_measured": report.mfu_measured}
    mfu = ", ".join(
        f"{100 * value:.1f}% {MFU_NAMES[name]}"
        for name, value in values.items()
        if value is not None
    )
    parts = [
        f"iteration {report.iteration:8d}/{report.train_iters:8d}",
        f"consumed samples: {report.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {report.ms_per_iteration:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {report.model_tflops:.3f}",
        f"learning rate: {report.lr:.6E}",
        f"global batch size: {report.global_batch_size:5d}",
        f"lm loss: {report.lm_loss:.6E}",
        *(f"{display_name(name)}: {loss:.6E}" for name, loss in report.further_losses.items()),
        f"loss scale: {report.loss_scale:.1f}",
        f"grad norm: {report.grad_norm:.3f}",
        f"number of skipped iterations: {report.skipped_iterations:3d}",
        f"number of nan iterations: {report.nan_iterations:3d}",
        f"consumed tokens: {report.consumed_tokens:12d}",
        f"actual seqlen: {report.seq_length:5d}",
        f"samples per second: {report.samples_per_second:.3f}",
        f"tokens per gpu per second (tgs): {report.tokens_per_second_per_rank:.3f}",
        f"TFLOPs: {report.tflops:.3f}",
        f"tokens/s: {report.tokens_per_second:.0f}",
        f"MFU: {mfu or 'unknown'}",
        f"exposed communication (ms): {report.exposed_communication_ms:.1f}",
        f"memory (MB): {report.memory_mb:.0f}",
    ]
    return f" [{time}] " + " | ".join(parts) + " |"


def time_line(milliseconds: Mapping[str, float]) -> str:
    """Return the log line with the time of each phase of an iteration, on this rank."""
    return "time (ms) | " + " | ".join(
        f"{phase}: {value:.1f}" for phase, value in milliseconds.items()
    )


def memory_line(rank: int, iteration: int, memory: MemoryUse) -> str:
    """Return the log line with the memory of one rank after `iteration` iterations.

    On a CPU all values are resident memory, as in DeepSpeed's accelerator for CPUs, and the line
    says so at its end.
    """
    source = " | all: resident memory of the process" if memory.resident else ""
    return (
        f"[Rank {rank}] (after {iteration} iterations) memory (MB) | "
        f"allocated: {memory.allocated:.2f} | max allocated: {memory.max_allocated:.2f} | "
        f"reserved: {memory.reserved:.2f} | max reserved: {memory.max_reserved:.2f}{source}"
    )


def datetime_line(moment: str) -> str:
    """Return the log line with the time of this moment, such as "after training is done"."""
    return f"[{moment}] datetime: {datetime.now().strftime(_TIME)} "


def setup_lines(milliseconds: Sequence[Mapping[str, float]]) -> str:
    """Return the log lines with the shortest and longest time of each part of the set-up.

    Args:
        milliseconds: time by part, of each rank.
    """
    lines = ["(min, max) time across ranks (ms):"]
    for part in milliseconds[0]:
        times = [rank[part] for rank in milliseconds]
        lines.append(f"    {f'{part} ':.<48}: ({min(times):.2f}, {max(times):.2f})")
    return "\n".join(lines)


def validation_line(iteration: int, losses: Mapping[str, float]) -> str:
    """Return the log line of one validation: losses by name, `lm_loss` first."""
    lm_loss, *further = losses.items()
    values = [f"lm loss value: {lm_loss[1]:.6E}", f"lm loss PPL: {perplexity(lm_loss[1]):.6E}"]
    values += [f"{display_name(name)} value: {loss:.6E}" for name, loss in further]
    return f" validation loss at iteration {iteration} | {' | '.join(values)} | "


def source_line(title: str, losses: Sequence[Mapping[str, Any]]) -> str:
    """Return the log line of losses by source."""
    values = (f"{each['source']}: {each['loss']:.6E}" for each in losses)
    return f" {title} by source | {' | '.join(values)} | "


def perplexity_line(iteration: int, loss: float, *, samples: int, seconds: float) -> str:
    """Return the log line of a checkpoint's perplexity on the validation split."""
    return (
        f" valid_ppl at iteration {iteration}: {short_number(perplexity(loss), '.4f')} | "
        f"valid_loss: {loss:.6E} | samples: {samples} | seconds: {seconds:.1f} | "
    )


def display_name(name: str) -> str:
    """Return the name of a loss in log lines and TensorBoard: `sop loss` for `sop_loss`."""
    return name.replace("_", " ")


def short_number(value: float, style: str = ".2f") -> str:
    """Format a measure; from a million on, as a perplexity of a diverged run, with an exponent.

    Args:
        value: the measure.
        style: how to format smaller ones, such as ".2f" or ",.4f".
    """
    if value < _MANY_DIGITS:
        return format(value, style)
    return format(value, style.replace(",", "").replace("f", "e"))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 sequence" or "1,204 sequences"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def perplexity(loss: float) -> float:
    """Return the exponential of a loss in nats per token, infinity if it overflows."""
    return math.exp(loss) if loss < 709.0 else math.inf
