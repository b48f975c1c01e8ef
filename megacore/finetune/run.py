"""Loop of a fine-tuning: resume, train, evaluate, keep the best model, save, stop."""

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
from megacore.artifact.workspace import BEST_NAME, RESULT_FILE
from megacore.checkpoint.collective import RankGroup
from megacore.checkpoint.format import directory_name, iteration_of
from megacore.config.finetune import FinetuneConfig
from megacore.errors import LossError
from megacore.finetune.best import BestModelStore
from megacore.finetune.checkpoints import FinetuneCheckpoints, Progress
from megacore.finetune.metrics import ANSWERS_NAME, write_answers
from megacore.finetune.resolve import Schedule, memory_advice
from megacore.finetune.task import (
    FinetuneTask,
    Score,
    SplitScorer,
    sample_losses,
)
from megacore.finetune.trainer import Step, StepTrainer, check_finite
from megacore.observe.heartbeat import Heartbeat
from megacore.observe.logging import logger
from megacore.observe.recorder import Recorder
from megacore.train.memory import in_use, translate_memory_errors
from megacore.train.report import memory_use
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
    interval_iterations: int
    """Number of steps of the interval, the last of which is `iteration`."""
    lr: float
    """Learning rate of the last step."""
    grad_norm: float | None
    """Gradient norm of the last step, before clipping; None if fp16 skipped the step."""
    loss_scale: float | None
    """Loss scale of fp16, otherwise None."""
    samples_per_second: float
    tokens_per_second: float
    """Rate of tokens, not counting padding."""
    ms_per_iteration: float
    memory_mb: float
    """Peak memory of this rank in MiB: allocated on the GPU, or resident on a CPU."""
    consumed_samples: int
    consumed_tokens: int
    eta_seconds: float
    """Expected training time of the remaining steps, without evaluations."""

    @property
    def event(self) -> dict[str, Any]:
        """Values of a step event."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def line(self, schedule: Schedule) -> str:
        """Format the report as a line of the log."""
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
    """Format a duration in seconds, minutes or hours, depending on its length."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Meter:
    """Times of a log interval; evaluations and saves do not count as training."""

    def __init__(self, schedule: Schedule, device: torch.device) -> None:
        """Initialize the meter; the clock starts with `start`."""
        self._schedule, self._device = schedule, device
        self._since = self._epoch_since = time.monotonic()
        self._samples = self._tokens = self._iteration = 0

    def start(self, progress: Progress) -> None:
        """Start the clock of an interval, after a resume that of its rest."""
        self._samples, self._tokens = progress.consumed_samples, progress.consumed_tokens
        self._iteration = progress.iteration
        self._since = time.monotonic()

    def lap(self) -> float:
        """Return the seconds of training since the last lap, or since `resume`."""
        now = time.monotonic()
        seconds, self._epoch_since = now - self._epoch_since, now
        return seconds

    def resume(self, paused: float) -> None:
        """Exclude `paused` seconds without training from the interval, and resume the clock."""
        self._since += paused
        self._epoch_since = time.monotonic()

    def report(
        self, progress: Progress, *, lr: float, grad_norm: float | None, loss_scale: float | None
    ) -> FinetuneReport:
        """End the interval, return its report, and start the next one.

        The loss is the mean over the interval, and the rates are those since the last `start`.
        """
        losses, progress.interval_losses = progress.interval_losses, []
        steps = max(1, progress.iteration - self._iteration)
        seconds = max(time.monotonic() - self._since, 1e-9)
        passes = progress.epoch + progress.batches / self._schedule.batches_per_epoch
        report = FinetuneReport(
            iteration=progress.iteration,
            total_iterations=self._schedule.total_steps,
            epoch=round(passes, 4),
            loss=sum(losses) / len(losses) if losses else float("nan"),
            interval_iterations=len(losses),
            lr=lr,
            grad_norm=grad_norm,
            loss_scale=loss_scale,
            samples_per_second=(progress.consumed_samples - self._samples) / seconds,
            tokens_per_second=(progress.consumed_tokens - self._tokens) / seconds,
            ms_per_iteration=1000 * seconds / steps,
            memory_mb=memory_use(self._device).max_allocated,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            eta_seconds=(self._schedule.total_steps - progress.iteration) * seconds / steps,
        )
        self.start(progress)
        return report


def evaluation_line(
    kind: str, progress: Progress, schedule: Schedule, metrics: dict[str, float], seconds: float
) -> str:
    """Format the metrics of an evaluation, or of a test, as a line of the log."""
    values = " | ".join(f"{name} {value:.4f}" for name, value in sorted(metrics.items()))
    return (
        f"{kind} at step {progress.iteration}/{schedule.total_steps} | {values} | "
        f"{duration(seconds)}"
    )


GATE_SAMPLES = 16
"""Number of validation samples whose losses are stored with the best model for the export's
gate."""


class _EndedError(Exception):
    """Exception that leaves the Trainer's loop when the run is complete or was asked to stop."""

    def __init__(self, reason: StopReason | None) -> None:
        super().__init__(reason)
        self.reason = reason


@contextmanager
def finetune_memory_errors(config: FinetuneConfig, rank: int) -> Iterator[None]:
    """Translate a failed allocation in the body into MemoryExhaustedError with advice."""

    def message(reason: str) -> str:
        return f"rank {rank} ran out of memory ({reason}): {in_use()}; {memory_advice(config)}"

    with translate_memory_errors(message):
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
        """Connect the trainer, evaluation, checkpoints and stop requests.

        Args:
            config: configuration of the fine-tuning.
            task: task with samples and metrics.
            trainer: trainer that takes the optimizer steps.
            recorder: recorder of the run's events.
            run_directory: directory of the run, with its checkpoints, if any.
            heartbeat: heartbeat of this rank, or None if the ranks are not watched.
            started: time.monotonic() at the start of this attempt; None means now.

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
        self._best = BestModelStore(task, accelerator, recorder, run_directory)
        limits = StopLimits(self._schedule.total_steps, config.train.exit_duration_minutes)
        self._stop = StopRequest(limits, run_directory, rank=self._rank, started=started)
        self._meter = Meter(self._schedule, accelerator.device)
        self.progress = Progress()
        trainer.before_step = lambda: self._beat("iteration", self.progress.iteration + 1)
        trainer.after_step, trainer.notices = self._after, self._stop.notices
        trainer.check_random_state = self._checkpoints.check_random_state

    def run(self) -> None:
        """Train to the last step, or until the run is asked to stop.

        Return at once if the run is complete.

        Raises:
            TrainingStoppedError: the run was asked to end early; its newest checkpoint holds its
                last step.
            TrainingError: a loss is not finite, or memory does not suffice.
            CheckpointError: the checkpoint to resume from has another number of ranks.
            WorkspaceError: a checkpoint, the best model or an event cannot be written.
        """
        with self._stop.signals(), finetune_memory_errors(self._config, self._rank):
            reason = self._train()
            if reason is None:
                self._finish()
        self._stop.remove_stop_file()  # before the event: a later stop file is for the next attempt
        self._recorder.event("exit", reason=reason or "finished", iteration=self.progress.iteration)
        if reason is not None:
            raise self._stop.error(
                reason, self.progress.iteration, self._checkpoints.path_of(self.progress.iteration)
            )

    def _train(self) -> StopReason | None:
        """Resume from the newest checkpoint, if any, and train; return why the run ended early."""
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
        """Evaluate the current model if it was not evaluated yet.

        A complete run whose best model was lost is evaluated again, too.
        """
        progress = self.progress
        # An evaluation is due when the run begins, and after a signal that left no time for it.
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
        """Count a finished step, then log, evaluate, save or stop if any of these is due."""
        progress, train = self.progress, self._config.train
        progress.skipped = progress.skipped + 1 if step.skipped else 0
        self._check(step)
        progress.iteration += 1
        progress.batches += step.batches
        progress.consumed_samples += step.samples
        progress.consumed_tokens += step.tokens
        progress.interval_losses.append(step.loss)
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
        """Return True if any rank received a signal; identical on each rank. Collective."""
        signalled = torch.tensor([float(self._stop.signal is not None)])
        if dist.is_initialized():
            dist.all_reduce(signalled)
        return bool(signalled)

    def _evaluate(self) -> bool:
        """Evaluate the model on the validation split, and keep it if it is the best so far.

        The test scores of the best model are stored with it. Returns False if a signal ended the
        evaluation, because the few seconds left are needed for the checkpoint.
        """
        progress, model = self.progress, self._trainer.model_wrapped
        score = self._scorer.score(model, self._beat, self._signalled)
        if score is None:
            return False
        progress.metrics, progress.evaluation_seconds = score.metrics, score.seconds
        progress.start_metrics = progress.start_metrics or score.metrics
        self._report("evaluation", score)
        self._record_answers(score)
        # The model before the first step is never kept.
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
        """Report a pass over a split as a line of the log and as an event."""
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

    def _record_answers(self, score: Score) -> None:
        """Write the generated texts to the run's table, and an event that names the file."""
        if not score.answers:
            return
        progress = self.progress
        if self._rank == 0:
            path = self._run_directory / ANSWERS_NAME
            write_answers(path, progress.iteration, progress.epoch, score.answers)
        self._recorder.event(
            "answers", iteration=progress.iteration, epoch=progress.epoch, file=ANSWERS_NAME
        )

    def _facts(self, tested: Score | None) -> dict[str, Any]:
        """Return the values stored with the best model.

        They are its test scores and the values that the export's gate compares.
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
        """Write the run's result on the first rank; a repeated call writes the same content."""
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
            write_json(self._run_directory / RESULT_FILE, result)

    def _seconds_per_epoch(self) -> float:
        """Return the training time of an epoch.

        It is the mean over the complete epochs; before the first is complete, an extrapolation.
        """
        progress = self.progress
        if progress.train_seconds:
            return sum(progress.train_seconds) / len(progress.train_seconds)
        return progress.epoch_seconds * self._schedule.batches_per_epoch / max(1, progress.batches)

    def _beat(self, phase: str, iteration: int | None = None) -> None:
        if self._heartbeat is not None:
            self._heartbeat.beat(phase, iteration)
