"""Rates and log lines of a fine-tuning."""

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megacore.finetune.checkpoints import Progress
from megacore.finetune.resolve import Schedule
from megacore.train.report import peak_memory_mb


@dataclass(frozen=True)
class FinetuneReport:
    """Means over one log interval; the fields are those of a step event."""

    iteration: int
    """Optimizer steps taken."""
    total_iterations: int
    epoch: float
    """Passes over the training split, as a fraction."""
    loss: float
    """Mean over the interval's steps and all ranks."""
    lr: float
    """Learning rate of the last step."""
    grad_norm: float | None
    """Of the last step, before clipping; None where fp16 skipped it."""
    loss_scale: float | None
    """Of fp16, else None."""
    samples_per_second: float
    tokens_per_second: float
    """Padding left out."""
    ms_per_iteration: float
    memory_mb: float
    """Peak of this rank in MiB: allocated on the GPU, resident on a CPU."""
    consumed_samples: int
    consumed_tokens: int
    eta_seconds: float
    """Expected training time of the steps that are left, evaluations not counted."""

    @property
    def event(self) -> dict[str, Any]:
        """The values of a step event."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def line(self, schedule: Schedule) -> str:
        """As the log shows it."""
        epoch = min(schedule.epochs, int(self.epoch - 1e-9) + 1)
        norm = "skipped, gradients overflowed" if self.grad_norm is None else f"grad norm {self.grad_norm:.3f}"
        parts = [
            f"epoch {epoch}/{schedule.epochs}",
            f"step {self.iteration}/{self.total_iterations}",
            f"loss {self.loss:.4f}",
            f"lr {self.lr:.2e}",
            norm,
            *([] if self.loss_scale is None else [f"loss scale {self.loss_scale:g}"]),
            f"{self.samples_per_second:.1f} samples/s",
            f"ETA {duration(self.eta_seconds)}",
        ]
        return " | ".join(parts)


def duration(seconds: float) -> str:
    """In the unit that a reader would choose."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Meter:
    """Gathers an interval's losses and times; evaluations and saves are not counted as training."""

    def __init__(self, schedule: Schedule, device: torch.device) -> None:
        """The clock starts with `start`."""
        self._schedule, self._device = schedule, device
        self._losses: list[float] = []
        self._since = self._epoch_since = time.monotonic()
        self._samples = self._tokens = self._iteration = 0

    def start(self, progress: Progress) -> None:
        """Begin an interval here."""
        self._losses = []
        self._samples, self._tokens = progress.consumed_samples, progress.consumed_tokens
        self._iteration = progress.iteration
        self._since = time.monotonic()

    def add(self, loss: float) -> None:
        """Take note of a step's loss."""
        self._losses.append(loss)

    def lap(self) -> float:
        """Seconds of training since the last lap, or since `resume`."""
        now = time.monotonic()
        seconds, self._epoch_since = now - self._epoch_since, now
        return seconds

    def resume(self, paused: float) -> None:
        """Leave `paused` seconds that were no training out of the interval, and count on from now."""
        self._since += paused
        self._epoch_since = time.monotonic()

    def report(
        self, progress: Progress, *, lr: float, grad_norm: float | None, loss_scale: float | None
    ) -> FinetuneReport:
        """The interval that ends here; the next one begins."""
        steps = max(1, progress.iteration - self._iteration)
        seconds = max(time.monotonic() - self._since, 1e-9)
        passes = progress.epoch + progress.batches / self._schedule.batches_per_epoch
        report = FinetuneReport(
            iteration=progress.iteration,
            total_iterations=self._schedule.total_steps,
            epoch=round(passes, 4),
            loss=sum(self._losses) / len(self._losses) if self._losses else float("nan"),
            lr=lr,
            grad_norm=grad_norm,
            loss_scale=loss_scale,
            samples_per_second=(progress.consumed_samples - self._samples) / seconds,
            tokens_per_second=(progress.consumed_tokens - self._tokens) / seconds,
            ms_per_iteration=1000 * seconds / steps,
            memory_mb=peak_memory_mb(self._device),
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            eta_seconds=(self._schedule.total_steps - progress.iteration) * seconds / steps,
        )
        self.start(progress)
        return report


def evaluation_line(
    kind: str, progress: Progress, schedule: Schedule, metrics: dict[str, float], seconds: float
) -> str:
    """As the log shows an evaluation, or a test."""
    values = " | ".join(f"{name} {value:.4f}" for name, value in sorted(metrics.items()))
    return f"{kind} at step {progress.iteration}/{schedule.total_steps} | {values} | {duration(seconds)}"
