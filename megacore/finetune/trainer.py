"""transformers' Trainer as fine-tunings use it: a generator of optimizer steps."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from megacore.config.finetune import FinetuneConfig
from megacore.errors import CheckpointError, ConfigError, LossError
from megacore.finetune.distribution import check_distribution, training_arguments
from megacore.finetune.pretrained import quiet
from megacore.finetune.resolve import Schedule
from megacore.finetune.task import FinetuneTask, rows_of, token_count

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object

MOST_SKIPPED = 50
"""Steps in a row that fp16 may skip: a loss scale that has been halved so often will not find its
place any more."""


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


class StepTrainer(Trainer):
    """What is added to transformers' Trainer, the other base of the class that `prepare` makes.

    Its loop, its data, its DeepSpeed and its checkpoints are used as they are. It logs after each
    optimizer step; that is where `after_step` is called, which evaluates and saves.
    """

    after_step: Callable[[Step], None]
    """Called with each optimizer step on every rank; what it raises ends the training."""
    before_step: Callable[[], None] = staticmethod(lambda: None)
    """Called before each optimizer step."""
    notices: Callable[[], tuple[bool, ...]] = staticmethod(tuple)
    """Called after each step for what this rank has to tell the others."""

    def __init__(
        self, config: FinetuneConfig, schedule: Schedule, precision: str, **values: Any
    ) -> None:
        """Prepare to train.

        Args:
            config: the fine-tuning.
            schedule: its length.
            precision: fp32, bf16 or fp16.
            **values: model, args, data_collator and train_dataset of the Trainer.
        """
        self._config, self.schedule, self.precision = config, schedule, precision
        self._samples, self._batches = 0, 0
        self._tokens: list[torch.Tensor] = []
        self._lr, self._resumed = 0.0, False
        model_config = values["model"].config
        use_cache = getattr(model_config, "use_cache", None)
        super().__init__(**values)
        # The Trainer changes it, and it would be published with the model.
        if use_cache is None:
            vars(model_config).pop("use_cache", None)
        else:
            model_config.use_cache = use_cache
        # Most models take any keyword and do not divide by `num_items_in_batch`: their gradients
        # would be multiplied by the number of ranks and of accumulated batches.
        self.model_accepts_loss_kwargs = False

    @property
    def loss_scale(self) -> float | None:
        """Of fp16, else None."""
        if self.precision != "fp16":
            return None
        if self.accelerator.scaler is not None:
            return float(self.accelerator.scaler.get_scale())
        engine: Any = self.model_wrapped
        return float(engine.optimizer.loss_scale)

    def create_optimizer(self, model: Any = None) -> Any:
        """Make AdamW, or give the optimizer of a DeepSpeed JSON the groups that do not decay."""
        from accelerate.utils import DummyOptim

        optim, model = self._config.optim, self.model if model is None else model
        if isinstance(self.optimizer, DummyOptim):
            self.optimizer = DummyOptim(parameter_groups(model, None))
        elif self.optimizer is None:
            self.optimizer = torch.optim.AdamW(
                parameter_groups(model, optim.weight_decay),
                lr=optim.lr,
                betas=(optim.adam_beta1, optim.adam_beta2),
                eps=optim.adam_eps,
            )
        return self.optimizer

    def training_step(
        self, model: Any, inputs: dict[str, Any], *values: Any, **named: Any
    ) -> torch.Tensor:
        """Take a forward and backward pass, and count what it read."""
        if self._resumed:
            raise CheckpointError(
                "the random numbers of the checkpoint were not taken up: use another checkpoint"
            )
        # Read before the step, which with a schedule of DeepSpeed's own changes it.
        optimizer: Any = self.optimizer
        self._lr = float(optimizer.param_groups[0]["lr"])
        self._batches += 1
        self._samples += len(inputs["input_ids"])
        self._tokens.append(token_count(inputs))
        with _no_scale_left(self._config):
            return super().training_step(model, inputs, *values, **named)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Tell of an optimizer step; the Trainer calls it after each, and once more at the end."""
        if "loss" not in logs:
            return
        skipped = float(self.accelerator.optimizer_step_was_skipped)
        tokens = float(torch.stack(self._tokens).sum())
        own = [float(self._samples), tokens, skipped, *map(float, self.notices())]
        together = torch.tensor(own, dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(together)
        samples, all_tokens, skips, *told = together.tolist()
        batches, self._batches, self._samples, self._tokens = self._batches, 0, 0, []
        norm = logs.get("grad_norm")
        self.after_step(
            Step(
                loss=logs["loss"],
                lr=self._lr,
                grad_norm=None if norm is None or skips else float(norm),
                skipped=skips > 0,
                batches=batches,
                samples=int(samples),
                tokens=int(all_tokens),
                notices=tuple(bool(each) for each in told),
                ends_epoch=self.state.global_step % self.schedule.steps_per_epoch == 0,
            )
        )

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """Return 0: nobody reads what the Trainer would count."""
        return 0

    def store_flos(self) -> None:
        """Leave out the collective that adds up what nobody reads."""

    def write_state(self, directory: Path) -> None:
        """Write all that `train` goes on from below an empty directory. Collective."""
        output, self.args.output_dir = self.args.output_dir, str(directory)
        try:
            with quiet():
                self._save_checkpoint(self.model_wrapped, None)
        finally:
            self.args.output_dir = output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights of a checkpoint where DeepSpeed or FSDP do not write them."""
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            super().save_model(output_dir, _internal_call)

    def train_from(self, checkpoint: Path | None, begin: Callable[[], None]) -> None:
        """Train to the last step.

        Args:
            checkpoint: what `write_state` wrote, None to begin.
            begin: called once the model is ready.
        """
        from transformers import TrainerCallback

        def ready(*_: Any, **__: Any) -> None:
            # each rank drops other activations
            torch.manual_seed(self._config.seed + self.args.process_index)
            begin()

        events = {
            "on_train_begin": staticmethod(ready),
            "on_step_begin": staticmethod(lambda *_, **__: self.before_step()),
        }
        self.add_callback(type("Callback", (TrainerCallback,), events))
        self._resumed = checkpoint is not None
        self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        self.check_random_state()
        self._resumed = False

    check_random_state: Callable[[], None] = staticmethod(lambda: None)
    """Called once this rank's random numbers were taken up from a checkpoint."""


def prepare(
    config: FinetuneConfig,
    task: FinetuneTask,
    *,
    precision: str,
    device: torch.device,
    directory: Path,
) -> StepTrainer:
    """The task's model, ready to be trained by the ranks that have joined.

    Args:
        config: the fine-tuning.
        task: what it learns.
        precision: fp32, bf16 or fp16, resolved.
        device: this rank's.
        directory: of the run.

    Raises:
        ConfigError: the configuration asks for what this machine or this model has not.
        DataFormatError: the training split has no sample.
        LaunchError: Accelerate came to another kind of distribution than was asked for.
    """
    from transformers import Trainer

    rows = rows_of(task, "train")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    schedule = Schedule.of(config.train, len(rows), ranks)
    arguments = training_arguments(
        config,
        precision=precision,
        device=device,
        total_steps=schedule.total_steps,
        directory=directory,
    )
    model: Any = task.build_model()
    model.train()  # `from_pretrained` leaves it without dropout
    if config.train.gradient_checkpointing:
        _checkpoint_activations(model)
    kind: Any = type("FinetuneTrainer", (StepTrainer, Trainer), {})
    trainer: StepTrainer = kind(
        config,
        schedule,
        precision,
        model=model,
        args=arguments,
        data_collator=task.collate,
        train_dataset=rows,
    )
    check_distribution(trainer.accelerator, config, device)
    return trainer


def _checkpoint_activations(model: Any) -> None:
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(
            f"train.gradient_checkpointing is true and {type(model).__name__} cannot compute its "
            "activations again: set it to false"
        ) from error


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
    groups = [
        decaying,
        {"params": [each for each in trained if id(each) in apart], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _undecayed(module: nn.Module) -> list[nn.Parameter]:
    own = dict(module.named_parameters(recurse=False))
    if "norm" in type(module).__name__.lower():
        return list(own.values())
    return [
        parameter for name, parameter in own.items() if name == "bias" or name.endswith("_bias")
    ]


@contextmanager
def _no_scale_left(config: FinetuneConfig) -> Iterator[None]:
    """Turn DeepSpeed's exception for a loss scale that cannot be lowered further into LossError."""
    try:
        yield
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        raise LossError(
            "fp16 has halved its loss scale down to the least that it may be, and gradients still "
            "overflow: set train.precision to bf16 or fp32, or lower optim.lr (now "
            f"{config.optim.lr:g})"
        ) from error


def check_finite(step: Step, iteration: int, skipped: int, precision: str) -> None:
    """Refuse a loss or a gradient that is not finite.

    Of fp16, steps that were skipped for it are no error.

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
            f"fp16 has skipped {skipped} steps in a row up to step {iteration} for gradients that "
            "overflow: set train.precision to bf16 or fp32, or lower optim.lr"
        )
    for name, value in (("loss", step.loss), ("norm of the gradients", step.grad_norm)):
        if value is not None and not math.isfinite(value):
            less = "optim.lr" if precision == "fp32" else "optim.lr, or set train.precision to fp32"
            raise LossError(
                f"the {name} is {value} at step {iteration} (learning rate {step.lr:.3g}): lower "
                f"{less}, raise optim.warmup_steps, or look for samples without labels"
            )
