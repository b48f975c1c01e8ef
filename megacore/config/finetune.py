"""Configuration of a fine-tuning, with the checks across its sections."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, ValidationInfo, field_validator, model_validator

from megacore.artifact.manifest import Verification
from megacore.config.base import Section, keyed, unkeyed
from megacore.config.finetune_task import (
    CausalLmConfig,
    ClassificationConfig,
    MultipleChoiceConfig,
    Seq2SeqConfig,
    TaskConfig,
    best_metric,
)
from megacore.config.launch import LaunchConfig
from megacore.config.train import HubConfig, Precision, TrackingConfig
from megacore.errors import ConfigError

Distribution = Literal["ddp", "zero2", "zero3", "zero3-offload", "fsdp"]
DISTRIBUTIONS: tuple[Distribution, ...] = ("ddp", "zero2", "zero3", "zero3-offload")
"""Distributions that are compared by default, in decreasing order of memory per rank."""


class PretrainedConfig(Section):
    """Pretrained model that the fine-tuning starts from."""

    path: str = keyed(resolved=("pretrained", "finetune-export", "finetune-publish"), min_length=1)
    """Directory of a transformers model, such as `model` in an export; `models:/NAME@candidate` or
    `models:/NAME/3` of MLflow's registry; or a name on the Hugging Face hub. The key contains its
    content, not its name."""
    revision: str | None = keyed(
        None, resolved=("pretrained", "finetune-export", "finetune-publish"), min_length=1
    )
    """Commit, tag or branch on the hub; null means the default branch. A commit makes the run
    reproducible."""
    random_weights: bool = keyed(
        False,
        key=("finetune", "find-batch-size"),
        resolved=("pretrained", "finetune-export", "finetune-publish"),
    )
    """If true, the weights are initialized from the seed, and only the architecture and the
    tokenizer are taken from the model."""
    new_head: bool = keyed(False, key=("examples", "finetune", "find-batch-size"))
    """If true, a trained classification head with a different number of outputs is replaced by a
    new one, for example when a model trained on MNLI's three classes must learn two. A head with as
    many outputs as the data has classes is kept."""
    pad_token: str | None = keyed(
        None, key=("examples", "finetune", "find-batch-size"), min_length=1
    )
    """Padding token for a tokenizer without one, such as `<|endoftext|>` for GPT-2; null means the
    tokenizer's own."""


class FileRows(Section):
    """Local files with one sample per row.

    Formats: .jsonl, .json, .csv, .tsv, .parquet, or .txt with one text per line.
    """

    kind: Literal["files"] = keyed()
    """Type of the source."""
    train: tuple[str, ...] = keyed(min_length=1)
    """Paths or globs of the training split; their order is the order of the rows."""
    valid: tuple[str, ...] = keyed(())
    """Paths or globs of the validation split; [] means the fraction data.valid_share of the
    training split."""
    test: tuple[str, ...] = keyed(())
    """Paths or globs of the test split; [] means none."""


class HubRows(Section):
    """Data set of the Hugging Face hub, or a local copy of one, read with `datasets`."""

    kind: Literal["hub"] = keyed()
    """Type of the source."""
    dataset: str = keyed(min_length=1)
    """Name of the data set on the hub, or a local directory of parquet files."""
    config: str | None = keyed(None)
    """Configuration name of the data set, such as mrpc of GLUE; null means its only
    or default one."""
    revision: str | None = keyed(None)
    """Commit, tag or branch; null means the default branch. A commit makes the run reproducible."""
    train: str = keyed("train", min_length=1)
    """Name of the training split."""
    valid: str | None = keyed("validation", min_length=1)
    """Name of the validation split; null means the fraction data.valid_share of the training
    split."""
    test: str | None = keyed(None, min_length=1)
    """Name of the test split, whose labels must be known; null means none."""


class FinetuneDataConfig(Section):
    """Options of the training, validation and test rows."""

    source: Annotated[FileRows | HubRows, Field(discriminator="kind")] = keyed(resolved="dataset")
    """Source of the rows."""
    valid_share: float = keyed(0.05, resolved="dataset", gt=0, lt=1)
    """Fraction of the training split that is held out for validation if the source has no
    validation split."""
    max_train_samples: int | None = keyed(None, key="examples", gt=0)
    """Number of rows from the start of the training split; null means all."""
    max_valid_samples: int | None = keyed(None, key="examples", gt=0)
    """Number of rows from the start of the validation split; null means all."""
    max_test_samples: int | None = keyed(None, key="examples", gt=0)
    """Number of rows from the start of the test split; null means all."""
    workers: PositiveInt | Literal["auto"] = unkeyed("auto")
    """Number of processes that tokenize; auto means one per core."""


class FinetuneOptimConfig(Section):
    """Options of AdamW (Loshchilov and Hutter 2019) and its schedule.

    A DeepSpeed JSON with an optimizer replaces them.
    """

    lr: float = keyed(gt=0)
    """Peak learning rate; may be omitted if DeepSpeed's JSON gives one."""
    weight_decay: float = keyed(0.0, ge=0)
    """Weight decay of all weights except biases and norms."""
    adam_beta1: float = keyed(0.9, ge=0, lt=1)
    """Decay rate of Adam's first moment."""
    adam_beta2: float = keyed(0.999, ge=0, lt=1)
    """Decay rate of Adam's second moment."""
    adam_eps: float = keyed(1e-8, gt=0)
    """Term added to the square root of the second moment for numerical stability."""
    lr_scheduler: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial"] = (
        keyed("linear")
    )
    """Learning-rate schedule after the warm-up, by its name in transformers."""
    warmup_steps: int = keyed(0, ge=0)
    """Number of optimizer steps in which the learning rate rises from 0 to lr; fewer than the run
    has."""
    clip_grad: float = keyed(1.0, ge=0)
    """Maximum global gradient norm, to which larger gradients are scaled down; 0 disables
    clipping."""


class FinetuneTrainConfig(Section):
    """Training loop."""

    num_epochs: int = keyed(3, key="finetune", gt=0)
    """Number of passes over the training split."""
    max_steps: int | None = keyed(None, key="finetune", gt=0)
    """Number of optimizer steps after which training ends, before or after num_epochs; null means
    the end of num_epochs."""
    micro_batch_size: int = keyed(8, key="finetune", gt=0)
    """Samples of one forward pass on one rank."""
    eval_batch_size: int = keyed(8, key="find-batch-size", gt=0)
    """Samples of one forward pass on one rank in evaluations."""
    gradient_accumulation_steps: int = keyed(1, gt=0)
    """Number of forward passes per optimizer step."""
    precision: Precision = keyed("auto")
    """Data type of the computation; auto selects bf16 where the hardware supports its
    multiplication natively, else fp32."""
    gradient_checkpointing: bool = keyed(False, key="find-batch-size")
    """If true, activations are recomputed in the backward pass instead of stored."""
    best_metric: str | None = keyed(None, min_length=1)
    """Validation metric that selects the best model: one of the task's metrics, or loss; null means
    the task's first metric."""
    log_interval: int = unkeyed(10, gt=0)
    """Interval in optimizer steps of log lines and step events."""
    exit_duration_minutes: float | None = unkeyed(None, gt=0)
    """Time in minutes after which the run saves a checkpoint and ends, to be resumed later; null
    means never."""


class FinetuneCheckpointConfig(Section):
    """Options of saving checkpoints. The best model is kept in addition to them."""

    save_interval: int | None = unkeyed(None, gt=0)
    """Interval in optimizer steps of checkpoints; null means at the end of each epoch."""
    keep_last: int = unkeyed(1, gt=0)
    """Number of newest checkpoints to keep."""


class FinetuneLaunchConfig(LaunchConfig):
    """Options of starting and supervising processes, and of the state that ranks divide."""

    distributed: Distribution = keyed("ddp", key="finetune")
    """Distribution of the training state. ddp: each rank has all of it; zero2: optimizer state and
    gradients are divided among the ranks; zero3: weights too; zero3-offload: like zero3, with all
    of it in host memory. ZeRO (Rajbhandari et al. 2020) is DeepSpeed's. fsdp: like zero3, with
    PyTorch's FSDP 2, not for encoder-decoders. It is part of the run's key, because one
    distribution cannot read another's checkpoints."""
    accelerate_config: str | dict[str, Any] | None = unkeyed(None)
    """Path or content of the YAML written by `accelerate config`, from which ranks, distribution
    and precision are taken; null means none."""
    deepspeed_config: str | dict[str, Any] | None = keyed(None, key=("finetune", "find-batch-size"))
    """Path or content of DeepSpeed's JSON for zero2 and zero3. "auto" is replaced by values of this
    configuration; an optimizer or a scheduler in it is used. null means this project's settings."""


def _check_differing(name: str, values: tuple[Any, ...]) -> None:
    twice = next((value for number, value in enumerate(values) if value in values[:number]), None)
    if twice is not None:
        raise ValueError(f"{name} names {twice} {values.count(twice)} times: name it once")


class FindBatchSizeConfig(Section):
    """Options of `--find-batch-size`: the distributions to try and the memory limit."""

    methods: tuple[Distribution, ...] = unkeyed(DISTRIBUTIONS, min_length=1)
    """Values of launch.distributed to compare."""
    memory_limit_gb: float | None = keyed(None, gt=0)
    """Memory limit per rank in GB (10^9 bytes), of the GPU or, without one, of host memory; null
    means 95 % of the GPU, or without one 80 % of the free host memory divided by the host's
    ranks."""
    max_batch: int = keyed(4096, gt=0)
    """Largest micro batch to try, limited to the samples of a rank in an epoch."""
    steps: int = keyed(3, gt=1)
    """Number of optimizer steps after which a micro batch counts as fitting; the first steps
    allocate the optimizer state."""

    @field_validator("methods")
    @classmethod
    def _methods_differ(cls, value: tuple[Distribution, ...]) -> tuple[Distribution, ...]:
        _check_differing("find_batch_size.methods", value)
        return value


class FinetuneConfig(Section):
    """Complete configuration of a fine-tuning."""

    name: str = keyed(
        key="finetune-export", resolved="finetune-publish", pattern=r"^[a-z0-9][a-z0-9.-]*$"
    )
    """Name of the run and of the fine-tuned model: lower-case letters, digits, dots and dashes. A
    configuration file without it takes its own name."""
    seed: int = keyed(42, key=("finetune", "find-batch-size"), resolved="dataset", ge=0, lt=2**32)
    """Random seed for the order of samples, the initial weights of the head, and dropout."""
    verify: Verification = unkeyed("once")
    """Check of cached artifacts: quick compares file sizes, and hashes only where a file was
    touched; once also compares all hashes when a training first reads an artifact, while the
    training starts; full compares all hashes at each use."""
    model: PretrainedConfig = keyed(key=("finetune", "find-batch-size"))
    """Pretrained model."""
    data: FinetuneDataConfig = keyed()
    """Data: source and number of rows."""
    task: TaskConfig = keyed(key=("examples", "finetune", "find-batch-size"))
    """Task to learn, and its metrics."""
    optim: FinetuneOptimConfig = keyed(key=("finetune", "find-batch-size"))
    """Optimizer and learning-rate schedule."""
    train: FinetuneTrainConfig = keyed(FinetuneTrainConfig(), key=("finetune", "find-batch-size"))
    """Training loop."""
    checkpoint: FinetuneCheckpointConfig = unkeyed(FinetuneCheckpointConfig())
    """Intervals of saving checkpoints, and how many to keep."""
    launch: FinetuneLaunchConfig = unkeyed(FinetuneLaunchConfig())
    """Start and supervision of the processes."""
    find_batch_size: FindBatchSizeConfig = keyed(FindBatchSizeConfig(), key="find-batch-size")
    """Search for the largest batch size and comparison of distributions."""
    export: HubConfig = unkeyed(HubConfig())
    """Upload of the fine-tuned model to the Hugging Face hub."""
    tracking: TrackingConfig = unkeyed(TrackingConfig(experiment="finetune"))
    """Tracking with MLflow."""

    @field_validator("tracking", mode="before")
    @classmethod
    def _default_experiment(cls, value: Any) -> Any:
        return {"experiment": "finetune"} | value if isinstance(value, dict) else value

    @model_validator(mode="before")
    @classmethod
    def _merge_files(cls, values: Any, info: ValidationInfo) -> Any:
        from megacore.config.finetune_files import FILES, merge_files

        return (
            merge_files(values, (info.context or {}).get(FILES, {}))
            if isinstance(values, dict)
            else values
        )

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        check_finetune(self)
        return self

    @property
    def registered_model(self) -> str:
        """Name in the model registry, with the default filled in."""
        return self.tracking.registered_model or self.name


def check_finetune(config: "FinetuneConfig") -> None:
    """Raise ValueError for sections that contradict each other."""
    _check_launch(config)
    _check_files(config)
    _check_model(config)
    _check_name(config)
    _check_data(config)
    _check_task(config)
    _check_schedule(config)
    if config.tracking.tensorboard:
        raise ValueError(
            "tracking.tensorboard is true: a fine-tuning writes no event files, its numbers are in "
            "MLflow; set it to false"
        )


def _check_launch(config: "FinetuneConfig") -> None:
    if config.launch.elastic:
        raise ValueError(
            f"launch.nnodes is {config.launch.nnodes}, a range: a fine-tuning's checkpoints are "
            "for one number of ranks; give one number"
        )
    if config.launch.data_placement == "node_local":
        raise ValueError(
            "launch.data_placement is node_local: a fine-tuning reads and writes one directory "
            "that all its machines see; set it to shared"
        )


def _check_files(config: "FinetuneConfig") -> None:
    for name in ("accelerate_config", "deepspeed_config"):
        held = getattr(config.launch, name)
        if isinstance(held, str):
            raise ValueError(
                f"launch.{name} is the path {held!r}, which was not read: give the content of the "
                "file, or load the configuration from its YAML"
            )


def _check_model(config: "FinetuneConfig") -> None:
    model = config.model
    if model.revision is not None and model.path.startswith("models:/"):
        raise ValueError(
            f"model.revision is {model.revision} but model.path is {model.path}, a model of the "
            "registry, whose version is in the path: remove model.revision"
        )
    if model.new_head and model.random_weights:
        raise ValueError(
            "model.new_head and model.random_weights are both true: random weights have no trained "
            "head; keep one of them"
        )
    if model.new_head and config.task.kind != "classification":
        raise ValueError(
            f"model.new_head is true but task.kind is {config.task.kind}: only a classifier has a "
            "head of its own; remove it"
        )


def _check_name(config: "FinetuneConfig") -> None:
    """Raise ValueError if the fine-tuned model would be registered as a version of its base model.

    The next fine-tuning would then start from the result of this one.
    """
    parent = re.fullmatch(r"models:/([^@/]+)[@/].+", config.model.path)
    if parent is not None and parent[1] == config.registered_model:
        raise ValueError(
            f"the fine-tuned model would be registered as {config.registered_model}, the name of "
            f"model.path {config.model.path} that it begins with: set tracking.registered_model or "
            "name to another one"
        )


def _check_data(config: "FinetuneConfig") -> None:
    data = config.data
    if data.max_test_samples is not None and not data.source.test:
        raise ValueError(
            f"data.max_test_samples is {data.max_test_samples} but data.source.test names no test "
            "split: remove the former, or name one"
        )


def _check_task(config: "FinetuneConfig") -> None:
    task = config.task
    if isinstance(task, ClassificationConfig | Seq2SeqConfig):
        _check_differing("task.metrics", task.metrics or ())
    if isinstance(task, ClassificationConfig):
        _check_differing("task.labels", task.labels or ())
    if isinstance(task, MultipleChoiceConfig):
        _check_differing("task.choices_columns", task.choices_columns)
    if (
        isinstance(task, Seq2SeqConfig)
        and task.sentence_splitter == "punkt"
        and "rougeLsum" not in task.metrics
    ):
        raise ValueError(
            f"task.sentence_splitter is punkt but task.metrics {', '.join(task.metrics)} has no "
            "rougeLsum, the only metric that looks at sentences: remove the former, or add "
            "rougeLsum"
        )
    if isinstance(task, CausalLmConfig) and config.model.pad_token is not None:
        raise ValueError(
            f"model.pad_token is {config.model.pad_token} but task.kind is causal_lm, whose blocks "
            "are all of one length: remove it"
        )
    if isinstance(task, Seq2SeqConfig) and config.launch.distributed == "fsdp":
        raise ValueError(
            "launch.distributed is fsdp and task.kind seq2seq, whose models share an embedding "
            "between encoder and decoder, which torch's FSDP 2 refuses: set launch.distributed to "
            "zero3"
        )
    try:
        best_metric(task, config.train.best_metric)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _check_schedule(config: "FinetuneConfig") -> None:
    optim, steps = config.optim, config.train.max_steps
    if optim.lr_scheduler == "constant" and optim.warmup_steps:
        raise ValueError(
            f"optim.warmup_steps is {optim.warmup_steps} but optim.lr_scheduler is constant, which "
            "has no warm-up: use constant_with_warmup, or remove the former"
        )
    if steps is not None and optim.warmup_steps >= steps:
        raise ValueError(
            f"optim.warmup_steps {optim.warmup_steps} does not end before train.max_steps {steps}: "
            f"set it below {steps}"
        )
