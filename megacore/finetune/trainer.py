"""The loop that all tasks share: resume, step, look, keep the best, save."""

import math
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from megacore.artifact.files import write_json
from megacore.checkpoint.collective import RankGroup
from megacore.checkpoint.format import directory_name, iteration_of
from megacore.config.finetune import FinetuneConfig
from megacore.errors import ConfigError, LossError
from megacore.finetune.best import BEST_NAME, BestModel
from megacore.finetune.checkpoints import FinetuneCheckpoints, Progress
from megacore.finetune.distribution import build_accelerator
from megacore.finetune.report import Meter, evaluation_line
from megacore.finetune.resolve import Schedule, memory_advice
from megacore.finetune.scoring import Score, SplitScorer, rows_of, sample_losses, token_count
from megacore.finetune.task import FinetuneTask
from megacore.observe.heartbeat import Heartbeat
from megacore.observe.logging import logger
from megacore.observe.recorder import Recorder
from megacore.train.memory import in_use, reworded
from megacore.train.stop import StopLimits, StopReason, StopRequest

if TYPE_CHECKING:
    from accelerate import Accelerator


@contextmanager
def finetune_memory_errors(config: FinetuneConfig, rank: int) -> Iterator[None]:
    """Turn an allocation that fails in the body into MemoryExhaustedError, which says what helps."""

    def message(reason: str) -> str:
        return f"rank {rank} ran out of memory ({reason}): {in_use()}; {memory_advice(config)}"

    with reworded(message):
        yield


def parameter_groups(model: nn.Module, weight_decay: float | None) -> list[dict[str, Any]]:
    """The trained parameters, biases and weights of norms apart: they do not decay.

    Args:
        model: before it is prepared; under ZeRO-3 its parameters may be divided already.
        weight_decay: of the others; None leaves it to whoever makes the optimizer.
    """
    apart = {id(weight) for module in model.modules() for weight in _undecayed(module)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decaying: dict[str, Any] = {"params": [each for each in trained if id(each) not in apart]}
    if weight_decay is not None:
        decaying["weight_decay"] = weight_decay
    groups = [decaying, {"params": [each for each in trained if id(each) in apart], "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _undecayed(module: nn.Module) -> list[nn.Parameter]:
    own = dict(module.named_parameters(recurse=False))
    if "norm" in type(module).__name__.lower():
        return list(own.values())
    return [parameter for name, parameter in own.items() if name == "bias" or name.endswith("_bias")]


def build_optimizer(config: FinetuneConfig, model: nn.Module, accelerator: "Accelerator", total_steps: int) -> Any:
    """Optimizer and scheduler for `accelerator.prepare`.

    What the DeepSpeed JSON describes is made by DeepSpeed: Accelerate takes a stand-in for it. The lengths of its
    schedule are in the JSON already, in optimizer steps, and are not divided among ranks.

    Args:
        config: the fine-tuning.
        model: whose parameters are trained.
        accelerator: of the job.
        total_steps: optimizer steps of the whole run.
    """
    from accelerate.utils import DummyOptim, DummyScheduler
    from transformers import get_scheduler

    plugin, optim = accelerator.state.deepspeed_plugin, config.optim
    described: dict[str, Any] = {} if plugin is None else plugin.deepspeed_config
    if "optimizer" in described:
        parameters = described["optimizer"].get("params", {})
        optimizer: Any = DummyOptim(
            parameter_groups(model, None),
            lr=parameters.get("lr", optim.lr),
            weight_decay=parameters.get("weight_decay", optim.weight_decay),
        )
    else:
        optimizer = torch.optim.AdamW(
            parameter_groups(model, optim.weight_decay),
            lr=optim.lr,
            betas=(optim.adam_beta1, optim.adam_beta2),
            eps=optim.adam_eps,
        )

    def schedule(made: Any) -> Any:
        return get_scheduler(
            optim.lr_scheduler, made, num_warmup_steps=optim.warmup_steps, num_training_steps=total_steps
        )

    if "scheduler" in described:
        return optimizer, DummyScheduler(optimizer)
    if "optimizer" in described:
        return optimizer, DummyScheduler(optimizer, lr_scheduler_callable=schedule)
    return optimizer, schedule(optimizer)


MOST_SKIPPED = 50
"""Steps in a row that fp16 may skip: a loss scale that has been halved so often will not find its place any more."""


@dataclass
class Prepared:
    """What a rank trains with."""

    accelerator: "Accelerator"
    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any
    """Of the training split, shuffled anew in each epoch by the seed."""
    schedule: Schedule
    precision: str
    """fp32, bf16 or fp16."""


def prepare(config: FinetuneConfig, task: FinetuneTask, *, precision: str, device: torch.device) -> Prepared:
    """The task's model, ready to be trained by the ranks that have joined.

    Args:
        config: the fine-tuning.
        task: what it learns.
        precision: fp32, bf16 or fp16, resolved.
        device: this rank's.

    Raises:
        ConfigError: the configuration asks for what this machine or this model has not.
        DataFormatError: the training split has no sample.
        LaunchError: Accelerate came to another kind of distribution than was asked for.
    """
    rows = rows_of(task, "train")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    schedule = Schedule.of(config.train, len(rows), ranks)
    accelerator = build_accelerator(config, precision=precision, device=device, total_steps=schedule.total_steps)
    model: Any = task.build_model()
    model.train()  # `from_pretrained` leaves it without dropout
    if config.train.gradient_checkpointing:
        _checkpoint_activations(model)
    optimizer, scheduler = build_optimizer(config, model, accelerator, schedule.total_steps)
    loader: Any = torch.utils.data.DataLoader(
        rows,
        batch_size=config.train.micro_batch_size,
        shuffle=True,
        collate_fn=task.collate,
        generator=torch.Generator(),  # of its own: training's random numbers are dropout's alone
    )
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    assert len(loader) == schedule.batches_per_epoch
    torch.manual_seed(config.seed + rank)  # each rank drops other activations
    return Prepared(accelerator, model, optimizer, scheduler, loader, schedule, precision)


def _checkpoint_activations(model: Any) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(
            f"train.gradient_checkpointing is true and {type(model).__name__} cannot compute its activations again: "
            "set it to false"
        ) from error


@dataclass(frozen=True)
class Step:
    """What one optimizer step gave, the same on each rank but for `grad_norm`'s last digits."""

    loss: float
    """Mean over its samples' batches and all ranks."""
    lr: float
    """With which it was taken."""
    grad_norm: float | None
    """Before clipping; None where fp16 skipped the step."""
    skipped: bool
    """Whether fp16 took no step, since gradients overflowed."""
    batches: int
    """Forward passes of each rank."""
    samples: int
    """Of all ranks."""
    tokens: int
    """Of all ranks, padding left out."""
    notices: tuple[bool, ...]
    """What any rank had to tell."""
    ends_epoch: bool


@dataclass(frozen=True)
class _Part:
    """What one forward and backward pass gave on this rank; not read from the device before the step is over."""

    loss: torch.Tensor
    """Share of the step's loss."""
    lr: float
    norm: Any
    """Of the gradients, after the last pass of a step."""
    samples: int
    tokens: torch.Tensor


class Stepper:
    """Takes optimizer steps; every rank calls it in step."""

    def __init__(self, config: FinetuneConfig, prepared: Prepared) -> None:
        """Nothing is done yet."""
        self._config, self._prepared = config, prepared
        self._accumulated = config.train.gradient_accumulation_steps

    def steps(self, epoch: int, done: int, notices: Any) -> Iterator[Step]:
        """The optimizer steps of one pass over the training split that are left.

        Args:
            epoch: passes that are complete.
            done: forward passes of this one that were made before.
            notices: called after each step for what this rank has to tell the others.
        """
        loader, accelerator = self._prepared.loader, self._prepared.accelerator
        loader.set_epoch(epoch)
        if done:
            loader = accelerator.skip_first_batches(loader, done)
            loader.iteration = epoch
        total = self._prepared.schedule.batches_per_epoch
        parts = list[_Part]()
        for number, batch in enumerate(loader, start=done):
            group = min(self._accumulated, total - number + number % self._accumulated)
            parts.append(self._learn(batch, group))
            if accelerator.sync_gradients:
                yield self._told(parts, notices(), ends_epoch=number + 1 == total)
                parts = []

    def _learn(self, batch: Mapping[str, torch.Tensor], group: int) -> "_Part":
        """One forward and backward pass of the `group` that a step has, and the step after the last of them."""
        accelerator, model = self._prepared.accelerator, self._prepared.model
        optimizer, scheduler = self._prepared.optimizer, self._prepared.scheduler
        lr = float(optimizer.param_groups[0]["lr"])
        norm: Any = None
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            # Accelerate divides by all that a step usually has; the last one of an epoch may have fewer.
            with _no_scale_left(self._config):
                accelerator.backward(loss * (self._accumulated / group))
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), self._config.optim.clip_grad or math.inf)
            optimizer.step()
            if accelerator.sync_gradients and not optimizer.step_was_skipped:
                scheduler.step()
            optimizer.zero_grad()
        return _Part(loss.detach().double() / group, lr, norm, len(batch["input_ids"]), token_count(batch))

    def _told(self, parts: "list[_Part]", notices: tuple[bool, ...], *, ends_epoch: bool) -> Step:
        """The step of these passes, as all ranks together have made it."""
        loss = float(torch.stack([part.loss for part in parts]).sum())
        tokens = float(torch.stack([part.tokens for part in parts]).sum())
        skipped = float(self._prepared.optimizer.step_was_skipped)
        own = [loss, float(sum(part.samples for part in parts)), tokens, skipped, *map(float, notices)]
        together = torch.tensor(own, dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(together)
            together[0] /= dist.get_world_size()
        loss, samples, all_tokens, skips, *told = together.tolist()
        norm = parts[-1].norm
        return Step(
            loss=loss,
            lr=parts[-1].lr,
            grad_norm=None if norm is None or skips else float(norm),
            skipped=skips > 0,
            batches=len(parts),
            samples=int(samples),
            tokens=int(all_tokens),
            notices=tuple(bool(each) for each in told),
            ends_epoch=ends_epoch,
        )

    @property
    def loss_scale(self) -> float | None:
        """Of fp16, else None."""
        accelerator = self._prepared.accelerator
        if self._prepared.precision != "fp16":
            return None
        if accelerator.scaler is not None:
            return float(accelerator.scaler.get_scale())
        return float(self._prepared.model.optimizer.loss_scale)


@contextmanager
def _no_scale_left(config: FinetuneConfig) -> Iterator[None]:
    """Turn DeepSpeed's exception for a loss scale that cannot be lowered further into LossError."""
    try:
        yield
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        raise LossError(
            "fp16 has halved its loss scale down to the least that it may be, and gradients still overflow: set "
            f"train.precision to bf16 or fp32, or lower optim.lr (now {config.optim.lr:g})"
        ) from error


def check_finite(step: Step, iteration: int, skipped: int, precision: str) -> None:
    """Refuse a loss or a gradient that is not finite; of fp16, steps that were skipped for it are no error.

    Args:
        step: just taken.
        iteration: its number.
        skipped: steps in a row that were skipped, this one included.
        precision: fp32, bf16 or fp16.

    Raises LossError with what to do.
    """
    if step.skipped:
        if skipped < MOST_SKIPPED:
            return
        raise LossError(
            f"fp16 has skipped {skipped} steps in a row up to step {iteration} for gradients that overflow: set "
            "train.precision to bf16 or fp32, or lower optim.lr"
        )
    for name, value in (("loss", step.loss), ("norm of the gradients", step.grad_norm)):
        if value is not None and not math.isfinite(value):
            less = "optim.lr" if precision == "fp32" else "optim.lr, or set train.precision to fp32"
            raise LossError(
                f"the {name} is {value} at step {iteration} (learning rate {step.lr:.3g}): lower {less}, raise "
                "optim.warmup_steps, or look for samples without labels"
            )


RESULT_NAME = "result.json"
GATE_SAMPLES = 16
"""First validation samples whose losses are kept with the best model, for the gate of its export."""


class Finetuner:
    """One fine-tuning on one rank; every rank runs the same loop."""

    def __init__(
        self,
        config: FinetuneConfig,
        task: FinetuneTask,
        prepared: Prepared,
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
            prepared: model, optimizer and samples.
            recorder: where the run's account goes.
            run_directory: with the run's checkpoints, if any.
            heartbeat: this rank's, None where nobody watches.
            started: time.monotonic() when this attempt began; None means now.

        Raises:
            DataFormatError: the validation split has no sample.
        """
        self._config, self._task, self._prepared, self._recorder = config, task, prepared, recorder
        self._run_directory, self._heartbeat = run_directory, heartbeat
        self._schedule, accelerator = prepared.schedule, prepared.accelerator
        self._rank = accelerator.process_index
        self._stepper = Stepper(config, prepared)
        size = config.train.eval_batch_size
        self._scorer = SplitScorer(task, "valid", accelerator, size)
        self._test_scorer = SplitScorer(task, "test", accelerator, size) if task.split("test") else None
        keep = config.checkpoint.keep_last
        self._checkpoints = FinetuneCheckpoints(accelerator, recorder, run_directory, keep_last=keep, beat=self._beat)
        self._best = BestModel(task, accelerator, recorder, run_directory)
        limits = StopLimits(self._schedule.total_steps, config.train.exit_duration_minutes)
        self._stop = StopRequest(limits, run_directory, rank=self._rank, started=started)
        self._meter = Meter(self._schedule, accelerator.device)
        self.progress = Progress()

    def run(self) -> None:
        """Train to the last step, or until something asks to stop; a run that is already there ends at once.

        Raises:
            TrainingStoppedError: the run was asked to end early; its newest checkpoint is of its last step.
            TrainingError: a loss is not finite, or memory does not suffice.
            CheckpointError: the checkpoint to go on from is of another number of ranks.
            WorkspaceError: a checkpoint, the best model or an event cannot be written.
        """
        with self._stop.signals(), finetune_memory_errors(self._config, self._rank):
            reason = self._start() or self._train() or self._finish()
        self._stop.take_away_file()  # before the event: what comes next is another attempt's
        self._recorder.event("exit", reason=reason or "finished", iteration=self.progress.iteration)
        if reason is not None:
            raise self._stop.error(reason, self.progress.iteration, self._checkpoints.path_of(self.progress.iteration))

    def _start(self) -> StopReason | None:
        """Go on from a checkpoint, if there is one, and say how the run starts; what is learned is measured before.

        Returns what ended that.
        """
        self.progress, path = self._checkpoints.resume()
        self._best.find()
        accelerator, schedule = self._prepared.accelerator, self._schedule
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
            precision=self._prepared.precision,
            validation_samples=self._scorer.samples,
            resumed_from=None if path is None else iteration_of(path),
        )
        # At the beginning, and where a signal had left no time for it.
        return self._measured() if self.progress.evaluation_due else None

    def _train(self) -> StopReason | None:
        """Step to the end; returns what ended it before."""
        progress = self.progress
        self._meter.start(progress)
        self._meter.resume(0.0)
        while progress.iteration < self._schedule.total_steps:
            self._beat("iteration", progress.iteration + 1)
            for step in self._stepper.steps(progress.epoch, progress.batches, self._stop.notices):
                reason = self._after(step)
                if reason is not None:
                    return reason
                if progress.iteration == self._schedule.total_steps:
                    break
                self._beat("iteration", progress.iteration + 1)
        return None

    def _after(self, step: Step) -> StopReason | None:
        """Count a step, and do what is due after it: the log, an evaluation, a checkpoint. Why the run stops now."""
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
        return reason

    def _check(self, step: Step) -> None:
        try:
            check_finite(step, self.progress.iteration + 1, self.progress.skipped, self._prepared.precision)
        except LossError as error:
            newest = self._checkpoints.newest()
            saved = "no checkpoint was saved before" if newest is None else f"the last good checkpoint is {newest}"
            raise LossError(f"{error}; {saved}") from error

    def _end_epoch(self) -> None:
        progress = self.progress
        progress.epoch, progress.batches = progress.epoch + 1, 0
        progress.train_seconds.append(progress.epoch_seconds)
        progress.epoch_seconds = 0.0

    def _saves(self, step: Step) -> bool:
        interval = self._config.checkpoint.save_interval
        return step.ends_epoch if interval is None else self.progress.iteration % interval == 0

    def _measured(self) -> StopReason | None:
        """Evaluate apart from any step; returns what broke it off, and then the run stands in a checkpoint."""
        if self._evaluate():
            return None
        self._checkpoints.save(self.progress)
        return "signal"

    def _signalled(self) -> bool:
        """Whether any rank got a signal, the same on each."""
        told = torch.tensor([float(self._stop.signal is not None)])
        if dist.is_initialized():
            dist.all_reduce(told)
        return bool(told)

    def _evaluate(self) -> bool:
        """Measure the model on the validation split, and keep it if it is the best so far, with its test scores.

        Returns False for an evaluation that a signal broke off: it leaves a few seconds, and they are the checkpoint's.
        """
        progress, model = self.progress, self._prepared.model
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
            logger.info("best model so far: %s %.4f", self._best.metric, score.metrics[self._best.metric])
        progress.evaluation_due, progress.evaluated = False, progress.iteration
        return True

    def _report(self, kind: str, score: Score) -> None:
        """Write a pass over a split as a line of the log and as an event."""
        progress = self.progress
        logger.info("%s", evaluation_line(kind, progress, self._schedule, score.metrics, score.seconds))
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
        """What is kept with the best model: its test scores, and what the gate of the export compares it with."""
        device = self._prepared.accelerator.device
        return {
            "precision": self._prepared.precision,
            "distributed": self._config.launch.distributed,
            "start_metrics": self.progress.start_metrics,
            "test_metrics": None if tested is None else tested.metrics,
            "sample_losses": sample_losses(self._task, self._prepared.model, device, GATE_SAMPLES, self._beat),
        }

    def _log(self, step: Step) -> None:
        report = self._meter.report(
            self.progress, lr=step.lr, grad_norm=step.grad_norm, loss_scale=self._stepper.loss_scale
        )
        logger.info("%s", report.line(self._schedule))
        self._recorder.event("step", **report.event)

    def _finish(self) -> StopReason | None:
        """Write the run's result; on the first rank, the same again where it was written before."""
        progress = self.progress
        if self._best.best is None and not self._evaluate():  # it was there, and is damaged now
            return "signal"
        best = self._best.best
        assert best is not None
        result = {
            "iterations": progress.iteration,
            "epochs": round(progress.epoch + progress.batches / self._schedule.batches_per_epoch, 4),
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
        return None

    def _seconds_per_epoch(self) -> float:
        """Training time of a pass: the mean of the complete ones, else what one would take at this rate."""
        progress = self.progress
        if progress.train_seconds:
            return sum(progress.train_seconds) / len(progress.train_seconds)
        return progress.epoch_seconds * self._schedule.batches_per_epoch / max(1, progress.batches)

    def _beat(self, phase: str, iteration: int | None = None) -> None:
        if self._heartbeat is not None:
            self._heartbeat.beat(phase, iteration)
