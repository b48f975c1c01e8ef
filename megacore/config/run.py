"""The whole configuration of one run, and the checks that cross its sections."""

from typing import Literal, Self

from pydantic import model_validator

from megacore.config.base import Section, keyed, unkeyed
from megacore.config.data import DataConfig
from megacore.config.model import ModelConfig
from megacore.config.optim import OptimConfig
from megacore.config.train import (
    CheckpointConfig,
    EvaluateConfig,
    ExportConfig,
    LaunchConfig,
    ParallelConfig,
    TrackingConfig,
    TrainConfig,
)


class RunConfig(Section):
    """Everything that one deployment says."""

    name: str = unkeyed(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    """Name of the run and of the exported model: lower case, digits, dots and dashes."""
    family: Literal["gpt"] = keyed("gpt")
    """Kind of model."""
    seed: int = keyed(1234, ge=0, lt=2**32)
    """Seeds the order of documents and samples, the initial weights and dropout."""
    verify: Literal["quick", "full"] = unkeyed("quick")
    """How a cached artifact is checked: sizes (and hashes where a file was touched), or every hash."""
    data: DataConfig = keyed()
    """From documents to samples."""
    model: ModelConfig = keyed()
    """The architecture."""
    optim: OptimConfig = keyed()
    """The optimizer and its schedule."""
    train: TrainConfig = keyed()
    """The training loop."""
    checkpoint: CheckpointConfig = unkeyed()
    """When to save and what to keep."""
    parallel: ParallelConfig = unkeyed(ParallelConfig())
    """Division over ranks."""
    launch: LaunchConfig = unkeyed(LaunchConfig())
    """Processes and their supervision."""
    evaluate: EvaluateConfig = keyed(EvaluateConfig())
    """Perplexity of the test split."""
    export: ExportConfig = keyed(ExportConfig())
    """Conversion to transformers and its gate."""
    tracking: TrackingConfig = unkeyed(TrackingConfig())
    """MLflow and TensorBoard."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        check_split(self.data.split)
        _check_model(self.model, self.data.seq_length)
        _check_schedule(self.optim, self.train.train_iters)
        _check_batch(self.train, self.launch.nproc_per_node)
        return self

    @property
    def max_position_embeddings(self) -> int:
        """Rows of the position table, resolved."""
        return self.model.max_position_embeddings or self.data.seq_length

    @property
    def lr_decay_iters(self) -> int:
        """Iteration at which the learning rate reaches optim.min_lr, resolved."""
        return self.optim.lr_decay_iters or self.train.train_iters

    @property
    def lr_warmup_iters(self) -> int:
        """Iterations of linear warm-up, resolved."""
        if self.optim.lr_warmup_fraction is not None:
            return int(self.optim.lr_warmup_fraction * self.lr_decay_iters)
        return self.optim.lr_warmup_iters or 0

    @property
    def eval_rounds(self) -> int:
        """Validations of the whole run, the last one included."""
        return self.train.train_iters // self.train.eval_interval + 1

    @property
    def registered_model(self) -> str:
        """Name in the model registry, resolved."""
        return self.tracking.registered_model or self.name


def check_split(split: str) -> None:
    """Raise ValueError unless `split` is three positive weights: every stage needs its part."""
    try:
        weights = [float(part) for part in split.split(",")]
    except ValueError:
        weights = []
    if len(weights) != 3 or not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(
            f"data.split is {split!r}: give three positive weights for train, validation and test, as in 969,30,1"
        )


def _check_model(model: ModelConfig, seq_length: int) -> None:
    if model.hidden_size % model.num_attention_heads:
        raise ValueError(
            f"model.hidden_size {model.hidden_size} is not a multiple of model.num_attention_heads "
            f"{model.num_attention_heads}: choose heads that divide it"
        )
    positions = model.max_position_embeddings
    if positions is not None and positions < seq_length:
        raise ValueError(
            f"data.seq_length {seq_length} exceeds model.max_position_embeddings {positions}: "
            f"raise the latter to at least {seq_length}"
        )


def _check_schedule(optim: OptimConfig, train_iters: int) -> None:
    if optim.lr_warmup_iters is not None and optim.lr_warmup_fraction is not None:
        raise ValueError(
            f"optim.lr_warmup_iters {optim.lr_warmup_iters} and optim.lr_warmup_fraction "
            f"{optim.lr_warmup_fraction} are both given: remove one"
        )
    if optim.min_lr > optim.lr:
        raise ValueError(f"optim.min_lr {optim.min_lr} is above optim.lr {optim.lr}: lower it")
    decay = optim.lr_decay_iters or train_iters
    if optim.lr_warmup_iters is not None and optim.lr_warmup_iters >= decay:
        raise ValueError(
            f"optim.lr_warmup_iters {optim.lr_warmup_iters} does not end before the decay does at {decay}: "
            f"set it below {decay}"
        )


def _check_batch(train: TrainConfig, ranks: int | str) -> None:
    if isinstance(ranks, int):
        check_data_parallel_size(train, ranks)
        return
    micro, total = train.micro_batch_size, train.global_batch_size
    if total % micro:
        raise ValueError(
            f"train.global_batch_size {total} is not a multiple of train.micro_batch_size {micro}: "
            f"use {(total // micro + 1) * micro}"
        )


def check_data_parallel_size(train: TrainConfig, ranks: int) -> None:
    """Raise ValueError when `ranks` data-parallel ranks cannot share a global batch evenly."""
    micro, total = train.micro_batch_size, train.global_batch_size
    if ranks < 1:
        raise ValueError(f"launch.nproc_per_node is {ranks}: at least one rank is needed")
    if total % (micro * ranks):
        step = micro * ranks
        raise ValueError(
            f"train.global_batch_size {total} is not a multiple of train.micro_batch_size {micro} x "
            f"{ranks} data-parallel ranks = {step}: use {(total // step + 1) * step}"
        )
