"""Extension of transformers' Trainer that calls back before and after each optimizer step."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from megacore.config.finetune import FinetuneConfig
from megacore.errors import CheckpointError, ConfigError, LossError
from megacore.finetune.distribution import (
    check_distribution,
    choose_fsdp_layers,
    training_arguments,
)
from megacore.finetune.examples import LABELS
from megacore.finetune.pretrained import quiet
from megacore.finetune.resolve import Schedule
from megacore.finetune.task import FinetuneTask, batch_loss, rows_of

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object

MOST_SKIPPED = 50
"""Number of consecutive steps skipped by fp16 at which training fails: a loss scale that was
halved so often does not recover."""


@dataclass(frozen=True)
class Step:
    """Result of one optimizer step, identical on each rank except for rounding of `grad_norm`."""

    loss: float
    """Mean over the step's batches and all ranks."""
    lr: float
    """Learning rate of the step."""
    grad_norm: float | None
    """Norm of the gradients before clipping; None if fp16 skipped the step."""
    skipped: bool
    """True if fp16 skipped the step because gradients overflowed."""
    batches: int
    """Forward passes of each rank."""
    samples: int
    """Samples of all ranks."""
    tokens: int
    """Tokens of all ranks, without padding."""
    notices: tuple[bool, ...]
    """Notices of all ranks; each is True if any rank reported it."""
    ends_epoch: bool


class StepTrainer(Trainer):
    """Mixin for transformers' Trainer; `prepare` combines both into one class.

    The Trainer's loop, data loading, DeepSpeed integration and checkpoints are used unchanged. The
    Trainer logs after each optimizer step; `log` then calls `after_step`, which evaluates and
    saves.
    """

    after_step: Callable[[Step], None]
    """Callback after each optimizer step on every rank; an exception raised by it ends the
    training."""
    before_step: Callable[[], None] = staticmethod(lambda: None)
    """Callback before each optimizer step."""
    notices: Callable[[], tuple[bool, ...]] = staticmethod(tuple)
    """Callback after each step that returns the notices of this rank for the others."""

    def __init__(
        self, config: FinetuneConfig, schedule: Schedule, precision: str, **values: Any
    ) -> None:
        """Initialize the Trainer.

        Args:
            config: configuration of the fine-tuning.
            schedule: length of the run.
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
        # The Trainer changes `use_cache`, which would be published with the model.
        if use_cache is None:
            vars(model_config).pop("use_cache", None)
        else:
            model_config.use_cache = use_cache
        # Most models take any keyword and do not divide by `num_items_in_batch`: their gradients
        # would be multiplied by the number of ranks and of accumulated batches.
        self.model_accepts_loss_kwargs = False

    @property
    def loss_scale(self) -> float | None:
        """Loss scale of fp16, otherwise None."""
        if self.precision != "fp16":
            return None
        if self.accelerator.scaler is not None:
            return float(self.accelerator.scaler.get_scale())
        engine: Any = self.model_wrapped
        return float(engine.optimizer.loss_scale)

    def create_optimizer(self, model: Any = None) -> Any:
        """Create AdamW, or set the parameter groups of the optimizer of a DeepSpeed JSON."""
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
        """Run a forward and a backward pass, and count the batch, its samples and its tokens."""
        if self._resumed:
            raise CheckpointError(
                "the random state of the checkpoint was not restored: use another checkpoint"
            )
        # Read before the step, because DeepSpeed's own schedule changes the rate during the step.
        optimizer: Any = self.optimizer
        self._lr = float(optimizer.param_groups[0]["lr"])
        self._batches += 1
        self._samples += len(inputs["input_ids"])
        self._tokens.append(inputs["attention_mask"].sum())
        with _no_scale_left(self._config):
            return super().training_step(model, inputs, *values, **named)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Move a batch to the device; labels stay fp32, which DeepSpeed's types would round."""
        prepared: dict[str, Any] = super()._prepare_inputs(inputs)
        return prepared | {LABELS: inputs[LABELS].to(self.args.device)}

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], *values: Any, **named: Any
    ) -> torch.Tensor:
        """Return the mean loss of a batch."""
        return batch_loss(model, inputs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Report an optimizer step to `after_step`.

        The Trainer calls this method after each step, and once more at the end.
        """
        if "loss" not in logs:
            return
        skipped = float(self.accelerator.optimizer_step_was_skipped)
        tokens = float(torch.stack(self._tokens).sum())
        local_counts = [float(self._samples), tokens, skipped, *map(float, self.notices())]
        totals = torch.tensor(local_counts, dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(totals)
        samples, all_tokens, skips, *notices = totals.tolist()
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
                notices=tuple(bool(notice) for notice in notices),
                ends_epoch=self.state.global_step % self.schedule.steps_per_epoch == 0,
            )
        )

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """Return 0, because the Trainer's count is not used."""
        return 0

    def store_flos(self) -> None:
        """Skip the collective that sums up the unused count of operations."""

    def write_state(self, directory: Path) -> None:
        """Write the training state for `train_from` into an empty directory. Collective."""
        output, self.args.output_dir = self.args.output_dir, str(directory)
        try:
            with quiet():
                self._save_checkpoint(self.model_wrapped, None)
        finally:
            self.args.output_dir = output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights of a checkpoint, unless DeepSpeed or FSDP writes them."""
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            super().save_model(output_dir, _internal_call)

    def train_from(self, checkpoint: Path | None, begin: Callable[[], None]) -> None:
        """Train to the last step.

        Args:
            checkpoint: directory written by `write_state`, or None to start from the beginning.
            begin: callback, called when the model is ready.
        """
        from transformers import TrainerCallback

        def ready(*_: Any, **__: Any) -> None:
            # A different seed on each rank, so that dropout differs.
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
    """Callback after the random number generators of this rank were restored from a checkpoint."""


def prepare(
    config: FinetuneConfig,
    task: FinetuneTask,
    *,
    precision: str,
    device: torch.device,
    directory: Path,
    rows: Sequence[Mapping[str, Any]] | None = None,
) -> StepTrainer:
    """Build the task's model and the trainer for the ranks that have joined.

    Args:
        config: configuration of the fine-tuning.
        task: task to learn.
        precision: fp32, bf16 or fp16, resolved.
        device: device of this rank.
        directory: directory of the run.
        rows: samples to train on; None means the task's training split.

    Raises:
        ConfigError: the configuration needs a feature that this host or model lacks.
        DataFormatError: the training split has no sample.
        LaunchError: Accelerate chose another kind of distribution than configured.
    """
    from transformers import Trainer

    rows = rows_of(task, "train") if rows is None else rows
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
    if config.launch.distributed == "fsdp":
        choose_fsdp_layers(trainer.accelerator, model)
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
    """Group the trained parameters: biases and weights of norms do not decay.

    Args:
        model: model before it is prepared; under ZeRO-3 its parameters may already be partitioned.
        weight_decay: weight decay of the other parameters; None leaves it to the optimizer.
    """
    undecayed = {id(weight) for module in model.modules() for weight in _undecayed(module)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decaying: dict[str, Any] = {
        "params": [parameter for parameter in trained if id(parameter) not in undecayed]
    }
    if weight_decay is not None:
        decaying["weight_decay"] = weight_decay
    groups = [
        decaying,
        {
            "params": [parameter for parameter in trained if id(parameter) in undecayed],
            "weight_decay": 0.0,
        },
    ]
    return [group for group in groups if group["params"]]


def _undecayed(module: nn.Module) -> list[nn.Parameter]:
    parameters = dict(module.named_parameters(recurse=False))
    if "norm" in type(module).__name__.lower():
        return list(parameters.values())
    return [
        parameter
        for name, parameter in parameters.items()
        if name == "bias" or name.endswith("_bias")
    ]


@contextmanager
def _no_scale_left(config: FinetuneConfig) -> Iterator[None]:
    """Translate DeepSpeed's exception for a loss scale at its minimum into LossError."""
    try:
        yield
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        raise LossError(
            "fp16 has halved its loss scale down to its minimum, and gradients still "
            "overflow: set train.precision to bf16 or fp32, or lower optim.lr (now "
            f"{config.optim.lr:g})"
        ) from error


def check_finite(step: Step, iteration: int, skipped: int, precision: str) -> None:
    """Raise LossError, with advice, for a loss or a gradient norm that is not finite.

    fp16 may skip fewer than `MOST_SKIPPED` steps in a row.

    Args:
        step: latest step.
        iteration: number of the step.
        skipped: number of consecutive skipped steps, including this one.
        precision: fp32, bf16 or fp16.
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
