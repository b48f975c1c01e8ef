"""Configuration of a pretraining run, with the checks across its sections."""

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import model_validator

from megacore.artifact.manifest import Verification
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
    """Complete configuration of a pretraining run."""

    name: str = keyed(key="convert", resolved="publish", pattern=r"^[a-z0-9][a-z0-9.-]*$")
    """Name of the run and of the exported model: lower-case letters, digits, dots and dashes. A
    configuration file without it takes its own name."""
    family: Family = keyed("gpt", key="run", resolved=("index", "convert"))
    """Family of the model: a causal decoder (gpt), an encoder (bert), or an encoder and decoder
    (t5)."""
    seed: int = keyed(1234, key=("index", "run"), resolved="tokenize", ge=0, lt=2**32)
    """Random seed for the order of documents and samples, the initial weights and dropout."""
    verify: Verification = unkeyed("once")
    """Check of cached artifacts: quick compares file sizes, and hashes only where a file was
    touched; once also compares all hashes when a training first reads an artifact, while the
    training starts; full compares all hashes at each use."""
    data: DataConfig = keyed(DataConfig())
    """Data: sources, tokenizer and samples."""
    model: ModelConfig = keyed(ModelConfig(), key="run")
    """Architecture of the model."""
    optim: OptimConfig = keyed(OptimConfig(), key="run")
    """Optimizer and learning-rate schedule."""
    train: TrainConfig = keyed(TrainConfig(), key="run")
    """Training loop."""
    checkpoint: CheckpointConfig = unkeyed(CheckpointConfig())
    """Intervals of saving checkpoints, and which of them to keep."""
    resume: ResumeConfig = unkeyed(ResumeConfig())
    """Start from another run's checkpoint."""
    engine: Literal["native", "deepspeed"] = unkeyed("native")
    """Implementation of the optimizer step: native is megacore's code, deepspeed is DeepSpeed with
    ZeRO and offload."""
    parallel: ParallelConfig = unkeyed(ParallelConfig())
    """Division of the model and the data over ranks."""
    deepspeed: DeepSpeedConfig = unkeyed(DeepSpeedConfig())
    """Additional options of the engine deepspeed; the engine native ignores them."""
    launch: LaunchConfig = unkeyed(LaunchConfig())
    """Start and supervision of the processes."""
    evaluate: EvaluateConfig = keyed(EvaluateConfig(), key="evaluate")
    """Evaluation of the checkpoints."""
    export: ExportConfig = keyed(ExportConfig(), key="convert")
    """Conversion to transformers and its gate."""
    tracking: TrackingConfig = unkeyed(TrackingConfig())
    """Tracking with MLflow and TensorBoard."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_deepspeeds_defaults(cls, values: Any) -> Any:
        return with_defaults(values) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        check_sections(self)
        return self

    @property
    def max_position_embeddings(self) -> int:
        """Number of rows of the position table, with the default filled in."""
        return self.model.max_position_embeddings or self.data.seq_length

    @property
    def lr_decay_iters(self) -> int:
        """Iteration at which the learning rate reaches optim.min_lr, with the default filled in."""
        return self.optim.lr_decay_iters or self.train.train_iters

    @property
    def lr_warmup_iters(self) -> int:
        """Warm-up in iterations, whichever option gives it."""
        if self.optim.lr_warmup_fraction is not None:
            return int(self.optim.lr_warmup_fraction * self.lr_decay_iters)
        if self.optim.lr_warmup_samples is not None:
            return BatchSchedule.of(self.train).iterations_for(self.optim.lr_warmup_samples)
        return self.optim.lr_warmup_iters or 0

    @property
    def row_width(self) -> int:
        """Number of ids of a row of a micro batch: of a sample with its labels and masks."""
        match self.family:
            case "bert":
                return 3 * self.data.seq_length + 1
            case "t5":
                return self.data.seq_length + self.data.span_corruption.decoder_seq_length
            case _:
                return self.data.seq_length + 1

    @property
    def eval_rounds(self) -> int:
        """Number of validations of the run, including the last."""
        return math.ceil(self.train.train_iters / self.train.eval_interval)

    @property
    def checkpoint_rounds(self) -> int:
        """Number of checkpoints of the run at most, including the last."""
        return math.ceil(self.train.train_iters / self.checkpoint.save_interval)

    @property
    def registered_model(self) -> str:
        """Name in the model registry, with the default filled in."""
        return self.tracking.registered_model or self.name


def with_current_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration that an earlier version stored with the names of this version."""
    result = dict(config)
    launch, parallel = result.get("launch"), result.get("parallel")
    if isinstance(launch, dict) and "launcher" in launch:
        others = {name: value for name, value in launch.items() if name != "launcher"}
        result["launch"] = {"kind": launch["launcher"]} | others
    if isinstance(parallel, dict) and "use_distributed_optimizer" in parallel:
        others = {
            name: value for name, value in parallel.items() if name != "use_distributed_optimizer"
        }
        sharding = "optimizer" if parallel["use_distributed_optimizer"] else "none"
        result["parallel"] = {"data_parallel_sharding": sharding} | others
    return result
