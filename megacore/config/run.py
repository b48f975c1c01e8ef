"""The whole configuration of one run, and the checks that cross its sections."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import model_validator

from megacore.config.base import Section, keyed, unkeyed
from megacore.config.batch_schedule import BatchSchedule
from megacore.config.checks import check_sections
from megacore.config.data import DataConfig
from megacore.config.deepspeed import DeepSpeedConfig, with_defaults
from megacore.config.launch import LaunchConfig
from megacore.config.model import Family, ModelConfig
from megacore.config.optim import OptimConfig
from megacore.config.parallel import ParallelConfig
from megacore.config.train import (
    CheckpointConfig,
    EvaluateConfig,
    ExportConfig,
    ResumeConfig,
    TrackingConfig,
    TrainConfig,
)


class RunConfig(Section):
    """Everything that one deployment says."""

    name: str = keyed(key="convert", resolved="publish", pattern=r"^[a-z0-9][a-z0-9.-]*$")
    """Name of the run and of the exported model: lower case, digits, dots and dashes."""
    family: Family = keyed("gpt", key="run", resolved="index")
    """Kind of model: a causal decoder, BERT's encoder, or T5's encoder and decoder."""
    seed: int = keyed(1234, key=("index", "run"), resolved="tokenize", ge=0, lt=2**32)
    """Seeds the order of documents and samples, the initial weights and dropout."""
    verify: Literal["quick", "full"] = unkeyed("quick")
    """How a cached artifact is checked: sizes (and hashes where a file was touched), or every
    hash."""
    data: DataConfig = keyed()
    """From documents to samples."""
    model: ModelConfig = keyed(key="run")
    """The architecture."""
    optim: OptimConfig = keyed(key="run")
    """The optimizer and its schedule."""
    train: TrainConfig = keyed(key="run")
    """The training loop."""
    checkpoint: CheckpointConfig = unkeyed()
    """When to save and what to keep."""
    resume: ResumeConfig = unkeyed(ResumeConfig())
    """Going on from another run's checkpoint."""
    engine: Literal["native", "deepspeed"] = unkeyed("native")
    """What carries out an optimizer step: megacore's own code, or DeepSpeed with ZeRO and
    offload."""
    parallel: ParallelConfig = unkeyed(ParallelConfig())
    """Division over ranks."""
    deepspeed: DeepSpeedConfig = unkeyed(DeepSpeedConfig())
    """What the engine deepspeed is told beside the rest; the engine native leaves it alone."""
    launch: LaunchConfig = unkeyed(LaunchConfig())
    """Processes and their supervision."""
    evaluate: EvaluateConfig = keyed(EvaluateConfig(), key="evaluate")
    """Perplexity of the test split."""
    export: ExportConfig = keyed(ExportConfig(), key="convert")
    """Conversion to transformers and its gate."""
    tracking: TrackingConfig = unkeyed(TrackingConfig())
    """MLflow and TensorBoard."""

    @model_validator(mode="before")
    @classmethod
    def _what_a_json_leaves_out_is_deepspeeds(cls, values: Any) -> Any:
        return with_defaults(values) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        check_sections(self)
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
        """Iterations of warm-up, resolved."""
        if self.optim.lr_warmup_fraction is not None:
            return int(self.optim.lr_warmup_fraction * self.lr_decay_iters)
        if self.optim.lr_warmup_samples is not None:
            return BatchSchedule.of(self.train).iterations_for(self.optim.lr_warmup_samples)
        return self.optim.lr_warmup_iters or 0

    @property
    def eval_rounds(self) -> int:
        """Validations of the whole run, the last one included."""
        return self.train.train_iters // self.train.eval_interval + 1

    @property
    def registered_model(self) -> str:
        """Name in the model registry, resolved."""
        return self.tracking.registered_model or self.name
