"""Model, optimizer and samples as Accelerate has prepared them, and one optimizer step with them."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megacore.config.finetune import FinetuneConfig
from megacore.errors import ConfigError, LossError
from megacore.finetune.distribution import build_accelerator
from megacore.finetune.optimizer import build_optimizer
from megacore.finetune.schedule import Schedule
from megacore.finetune.scoring import rows_of, token_count
from megacore.finetune.task import FinetuneTask

if TYPE_CHECKING:
    from accelerate import Accelerator

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
