"""One fine-tuning: go on from a checkpoint, train, evaluate, keep the best model, save, stop."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megacore.artifact.files import write_json
from megacore.checkpoint.collective import RankGroup
from megacore.checkpoint.format import directory_name, iteration_of
from megacore.config.finetune import FinetuneConfig
from megacore.errors import LossError
from megacore.finetune.best import BEST_NAME, BestModel
from megacore.finetune.checkpoints import FinetuneCheckpoints, Progress
from megacore.finetune.resolve import Schedule, memory_advice
from megacore.finetune.task import FinetuneTask, Score, SplitScorer, sample_losses
from megacore.finetune.trainer import Step, StepTrainer, check_finite
from megacore.observe.heartbeat import Heartbeat
from megacore.observe.logging import logger
from megacore.observe.recorder import Recorder
from megacore.train.memory import in_use, reworded
from megacore.train.report import peak_memory_mb
from megacore.train.stop import StopLimits, StopReason, StopRequest


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
        norm = (
            "skipped, gradients overflowed"
            if self.grad_norm is None
            else f"grad norm {self.grad_norm:.3f}"
        )
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
        """Leave `paused` seconds that were no training out of the interval, and count on."""
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
    return (
        f"{kind} at step {progress.iteration}/{schedule.total_steps} | {values} | "
        f"{duration(seconds)}"
    )


RESULT_NAME = "result.json"
GATE_SAMPLES = 16
"""First validation samples whose losses are kept with the best model, for the gate of its
export."""


class _EndedError(Exception):
    """Raised through the Trainer's loop to leave it.

    The run is complete, or something asks it to stop.
    """

    def __init__(self, reason: StopReason | None) -> None:
        super().__init__(reason)
        self.reason = reason


@contextmanager
def finetune_memory_errors(config: FinetuneConfig, rank: int) -> Iterator[None]:
    """Turn a failing allocation in the body into MemoryExhaustedError, with what helps."""

    def message(reason: str) -> str:
        return f"rank {rank} ran out of memory ({reason}): {in_use()}; {memory_advice(config)}"

    with reworded(message):
        yield


class Finetuner:
    """One fine-tuning on one rank; every rank runs the same loop."""

    def __init__(
        self,
        config: FinetuneConfig,
        task: FinetuneTask,
        trainer: StepTrainer,
        recorder: Recorder,
        run_directory: Path,
        *,
        heartbeat: Heartbeat | None = None,
        started: float | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            config: the fine-tuning.
            task: what is learned and how it is measured.
            trainer: what takes the optimizer steps.
            recorder: where the run's account goes.
            run_directory: with the run's checkpoints, if any.
            heartbeat: this rank's, None where nobody watches.
            started: time.monotonic() when this attempt began; None means now.

        Raises:
            DataFormatError: the validation split has no sample.
        """
        self._config, self._task, self._trainer, self._recorder = config, task, trainer, recorder
        self._run_directory, self._heartbeat = run_directory, heartbeat
        self._schedule, accelerator = trainer.schedule, trainer.accelerator
        self._rank = accelerator.process_index
        size = config.train.eval_batch_size
        self._scorer = SplitScorer(task, "valid", accelerator, size)
        self._test_scorer = (
            SplitScorer(task, "test", accelerator, size) if task.split("test") else None
        )
        keep = config.checkpoint.keep_last
        self._checkpoints = FinetuneCheckpoints(
            trainer.write_state, recorder, run_directory, keep_last=keep, beat=self._beat
        )
        self._best = BestModel(task, accelerator, recorder, run_directory)
        limits = StopLimits(self._schedule.total_steps, config.train.exit_duration_minutes)
        self._stop = StopRequest(limits, run_directory, rank=self._rank, started=started)
        self._meter = Meter(self._schedule, accelerator.device)
        self.progress = Progress()
        trainer.before_step = lambda: self._beat("iteration", self.progress.iteration + 1)
        trainer.after_step, trainer.notices = self._after, self._stop.notices
        trainer.check_random_state = self._checkpoints.check_random_state

    def run(self) -> None:
        """Train to the last step, or until something asks to stop.

        A run that is already there ends at once.

        Raises:
            TrainingStoppedError: the run was asked to end early; its newest checkpoint is of its
                last step.
            TrainingError: a loss is not finite, or memory does not suffice.
            CheckpointError: the checkpoint to go on from is of another number of ranks.
            WorkspaceError: a checkpoint, the best model or an event cannot be written.
        """
        with self._stop.signals(), finetune_memory_errors(self._config, self._rank):
            reason = self._train()
            if reason is None:
                self._finish()
        self._stop.take_away_file()  # before the event: what comes next is another attempt's
        self._recorder.event("exit", reason=reason or "finished", iteration=self.progress.iteration)
        if reason is not None:
            raise self._stop.error(
                reason, self.progress.iteration, self._checkpoints.path_of(self.progress.iteration)
            )

    def _train(self) -> StopReason | None:
        """Resume from a checkpoint, if there is one, and train; return why it ended early."""
        self.progress, path = self._checkpoints.resume()
        self._best.find()
        accelerator, schedule = self._trainer.accelerator, self._schedule
        hosts = RankGroup(None).everywhere(socket.gethostname)
        self._recorder.event(
            "start",
            iteration=self.progress.iteration,
            total_iterations=schedule.total_steps,
            steps_per_epoch=schedule.steps_per_epoch,
            epochs=schedule.epochs,
            ranks=accelerator.num_processes,
            hosts=sorted(set(hosts)),
            device=accelerator.device.type,
            distributed=self._config.launch.distributed,
            precision=self._trainer.precision,
            validation_samples=self._scorer.samples,
            resumed_from=None if path is None else iteration_of(path),
        )
        if self._is_last and self._best.best is not None and not self.progress.evaluation_due:
            return None
        state = None if path is None else self._checkpoints.state_of(path)
        try:
            self._trainer.train_from(state, lambda: self._begin(fresh=path is None))
        except _EndedError as ended:
            return ended.reason
        return None

    def _begin(self, *, fresh: bool) -> None:
        """Evaluate the model as it is now, if that was not done yet.

        A best model that was lost is made again.
        """
        progress = self.progress
        # At the beginning, and where a signal had left no time for it.
        due = progress.evaluation_due or (self._is_last and self._best.best is None)
        if due and not self._evaluate():
            if fresh:
                self._checkpoints.save(progress)
            raise _EndedError("signal")
        if self._is_last:
            raise _EndedError(None)
        self._meter.start(progress)
        self._meter.resume(0.0)

    @property
    def _is_last(self) -> bool:
        return self.progress.iteration >= self._schedule.total_steps

    def _after(self, step: Step) -> None:
        """Count a step, and do what is due after it.

        The log, an evaluation, a checkpoint, the end.
        """
        progress, train = self.progress, self._config.train
        progress.skipped = progress.skipped + 1 if step.skipped else 0
        self._check(step)
        progress.iteration += 1
        progress.batches += step.batches
        progress.consumed_samples += step.samples
        progress.consumed_tokens += step.tokens
        self._meter.add(step.loss)
        last = progress.iteration == self._schedule.total_steps
        reason = None if last else self._stop.reason(step.notices, progress.iteration)
        if progress.iteration % train.log_interval == 0 or last:
            self._log(step)
        progress.epoch_seconds += self._meter.lap()
        if step.ends_epoch:
            self._end_epoch()
        progress.evaluation_due = step.ends_epoch or last
        began = time.monotonic()
        if progress.evaluation_due and reason != "signal" and not self._evaluate():
            reason = "signal"
        if step.ends_epoch:
            self._recorder.event(
                "epoch",
                iteration=progress.iteration,
                epoch=progress.epoch,
                train_seconds=progress.train_seconds[-1],
                evaluation_seconds=progress.evaluation_seconds,
            )
        if self._saves(step) or last or reason is not None:
            self._checkpoints.save(progress)
        self._meter.resume(time.monotonic() - began)
        if reason is not None:
            raise _EndedError(reason)

    def _check(self, step: Step) -> None:
        try:
            check_finite(
                step, self.progress.iteration + 1, self.progress.skipped, self._trainer.precision
            )
        except LossError as error:
            newest = self._checkpoints.newest()
            saved = (
                "no checkpoint was saved before"
                if newest is None
                else f"the last good checkpoint is {newest}"
            )
            raise LossError(f"{error}; {saved}") from error

    def _end_epoch(self) -> None:
        progress = self.progress
        progress.epoch, progress.batches = progress.epoch + 1, 0
        progress.train_seconds.append(progress.epoch_seconds)
        progress.epoch_seconds = 0.0

    def _saves(self, step: Step) -> bool:
        interval = self._config.checkpoint.save_interval
        return step.ends_epoch if interval is None else self.progress.iteration % interval == 0

    def _signalled(self) -> bool:
        """Whether any rank got a signal, the same on each."""
        told = torch.tensor([float(self._stop.signal is not None)])
        if dist.is_initialized():
            dist.all_reduce(told)
        return bool(told)

    def _evaluate(self) -> bool:
        """Measure the model on the validation split, and keep it if it is the best so far.

        Its test scores are kept with it.

        Returns False for an evaluation that a signal broke off: it leaves a few seconds, and they
        are the checkpoint's.
        """
        progress, model = self.progress, self._trainer.model_wrapped
        score = self._scorer.score(model, self._beat, self._signalled)
        if score is None:
            return False
        progress.metrics, progress.evaluation_seconds = score.metrics, score.seconds
        progress.start_metrics = progress.start_metrics or score.metrics
        self._report("evaluation", score)
        # What was learned is kept, not what was there before.
        if progress.iteration and self._best.beats(progress.iteration, score.metrics):
            tested: Score | None = None
            if self._test_scorer is not None:
                tested = self._test_scorer.score(model, self._beat, self._signalled)
                if tested is None:
                    return False
                self._report("test", tested)
            facts = self._facts(tested)
            self._best.keep(progress.iteration, score.metrics, model, facts)
            logger.info(
                "best model so far: %s %.4f", self._best.metric, score.metrics[self._best.metric]
            )
        progress.evaluation_due, progress.evaluated = False, progress.iteration
        return True

    def _report(self, kind: str, score: Score) -> None:
        """Write a pass over a split as a line of the log and as an event."""
        progress = self.progress
        logger.info(
            "%s", evaluation_line(kind, progress, self._schedule, score.metrics, score.seconds)
        )
        self._recorder.event(
            kind,
            iteration=progress.iteration,
            epoch=progress.epoch,
            loss=score.metrics.get("loss"),
            metrics=score.metrics,
            samples=score.samples,
            seconds=score.seconds,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
        )

    def _facts(self, tested: Score | None) -> dict[str, Any]:
        """What is kept with the best model.

        These are its test scores, and what the gate of the export compares it with.
        """
        device = self._trainer.accelerator.device
        return {
            "precision": self._trainer.precision,
            "distributed": self._config.launch.distributed,
            "start_metrics": self.progress.start_metrics,
            "test_metrics": None if tested is None else tested.metrics,
            "sample_losses": sample_losses(
                self._task, self._trainer.model_wrapped, device, GATE_SAMPLES, self._beat
            ),
        }

    def _log(self, step: Step) -> None:
        report = self._meter.report(
            self.progress, lr=step.lr, grad_norm=step.grad_norm, loss_scale=self._trainer.loss_scale
        )
        logger.info("%s", report.line(self._schedule))
        self._recorder.event("step", **report.event)

    def _finish(self) -> None:
        """Write the run's result; on the first rank, the same again where it was written before."""
        progress = self.progress
        best = self._best.best
        assert best is not None
        result = {
            "iterations": progress.iteration,
            "epochs": round(
                progress.epoch + progress.batches / self._schedule.batches_per_epoch, 4
            ),
            "best": f"{BEST_NAME}/{directory_name(best.iteration)}",
            "best_iteration": best.iteration,
            "metric": self._best.metric,
            "value": best.value,
            "metrics": best.metrics,
            "test_metrics": best.test_metrics,
            "start_metrics": progress.start_metrics,
            "train_seconds_per_epoch": self._seconds_per_epoch(),
            "evaluation_seconds": progress.evaluation_seconds,
            "checkpoints": self._checkpoints.kept(),
        }
        if self._rank == 0:
            write_json(self._run_directory / RESULT_NAME, result)

    def _seconds_per_epoch(self) -> float:
        """Training time of a pass.

        The mean of the complete ones, else what one would take at this rate.
        """
        progress = self.progress
        if progress.train_seconds:
            return sum(progress.train_seconds) / len(progress.train_seconds)
        return progress.epoch_seconds * self._schedule.batches_per_epoch / max(1, progress.batches)

    def _beat(self, phase: str, iteration: int | None = None) -> None:
        if self._heartbeat is not None:
            self._heartbeat.beat(phase, iteration)
