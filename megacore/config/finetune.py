"""The whole configuration of one fine-tuning, and the checks that cross its sections."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, ValidationInfo, field_validator, model_validator

from megacore.config.base import Section, keyed, unkeyed
from megacore.config.finetune_task import (
    CausalLmConfig,
    ClassificationConfig,
    Seq2SeqConfig,
    TaskConfig,
    best_metric,
)
from megacore.config.launch import LaunchConfig
from megacore.config.train import Precision, TrackingConfig
from megacore.errors import ConfigError

Distribution = Literal["ddp", "zero2", "zero3", "zero3-offload", "fsdp"]
DISTRIBUTIONS: tuple[Distribution, ...] = ("ddp", "zero2", "zero3", "zero3-offload")
"""Those that are compared unless others are named, in the order of what each rank holds."""


class PretrainedConfig(Section):
    """The model that the fine-tuning begins with."""

    path: str = keyed(resolved=("pretrained", "finetune-export", "finetune-publish"), min_length=1)
    """Directory of a transformers model, as an export's `model`; `models:/NAME@candidate` or
    `models:/NAME/3` of MLflow's registry; or a name on the Hugging Face hub. Its content is part of
    the key, not its name."""
    revision: str | None = keyed(
        None, resolved=("pretrained", "finetune-export", "finetune-publish"), min_length=1
    )
    """Commit, tag or branch on the hub; pin a commit to make the run reproducible."""
    random_weights: bool = keyed(
        False,
        key=("finetune", "find-batch-size"),
        resolved=("pretrained", "finetune-export", "finetune-publish"),
    )
    """Whether the weights are drawn from the seed, and only architecture and tokenizer are
    taken."""
    new_head: bool = keyed(False, key=("examples", "finetune", "find-batch-size"))
    """Whether a classifier's trained head of another number of outputs gives way to a new one, as
    where a model that learned MNLI's three classes is to learn two; a head that has as many outputs
    as the data stays."""
    pad_token: str | None = keyed(
        None, key=("examples", "finetune", "find-batch-size"), min_length=1
    )
    """Token that pads, for a tokenizer that has none, as `<|endoftext|>` for GPT-2; null takes the
    tokenizer's own."""


class FileRows(Section):
    """Local files with a row for each sample.

    Formats: .jsonl, .json, .csv, .tsv, .parquet, or .txt with a text per line.
    """

    kind: Literal["files"] = keyed()
    """Which source this is."""
    train: tuple[str, ...] = keyed(min_length=1)
    """Paths or globs of the training split, taken in this order."""
    valid: tuple[str, ...] = keyed(())
    """Paths or globs of the validation split; [] holds data.valid_share of the training split
    out."""
    test: tuple[str, ...] = keyed(())
    """Paths or globs of the test split; [] means none."""


class HubRows(Section):
    """A data set of the Hugging Face hub (or a local copy of one), read by `datasets`."""

    kind: Literal["hub"] = keyed()
    """Which source this is."""
    dataset: str = keyed(min_length=1)
    """Name on the hub, or a local directory of parquet files."""
    config: str | None = keyed(None)
    """Configuration name of the data set, as mrpc of GLUE."""
    revision: str | None = keyed(None)
    """Commit, tag or branch; pin a commit to make the run reproducible."""
    train: str = keyed("train", min_length=1)
    """Name of the training split."""
    valid: str | None = keyed("validation", min_length=1)
    """Name of the validation split; null holds data.valid_share of the training split out."""
    test: str | None = keyed(None, min_length=1)
    """Name of the test split, whose labels must be known; null means none."""


class FinetuneDataConfig(Section):
    """Rows of the three splits."""

    source: Annotated[FileRows | HubRows, Field(discriminator="kind")] = keyed(resolved="dataset")
    """Where the rows come from."""
    valid_share: float = keyed(0.05, resolved="dataset", gt=0, lt=1)
    """Share of the training split that is held out for validation where the source has no such
    split."""
    max_train_samples: int | None = keyed(None, key="examples", gt=0)
    """Rows of the training split, its first ones; null means all."""
    max_valid_samples: int | None = keyed(None, key="examples", gt=0)
    """Rows of the validation split, its first ones; null means all."""
    max_test_samples: int | None = keyed(None, key="examples", gt=0)
    """Rows of the test split, its first ones; null means all."""
    workers: PositiveInt | Literal["auto"] = unkeyed("auto")
    """Processes that tokenize; auto takes one per core."""


class FinetuneOptimConfig(Section):
    """AdamW (Loshchilov and Hutter 2019) and its schedule.

    A DeepSpeed JSON with an optimizer takes its place.
    """

    lr: float = keyed(gt=0)
    """Peak learning rate."""
    weight_decay: float = keyed(0.0, ge=0)
    """Decay of all weights but biases and norms."""
    adam_beta1: float = keyed(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    adam_beta2: float = keyed(0.999, ge=0, lt=1)
    """Decay of the second moment."""
    adam_eps: float = keyed(1e-8, gt=0)
    """Added to the root of the second moment."""
    lr_scheduler: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial"] = (
        keyed("linear")
    )
    """Course of the learning rate after the warm-up, as transformers names it."""
    warmup_steps: int = keyed(0, ge=0)
    """Optimizer steps in which the learning rate rises from 0."""
    clip_grad: float = keyed(1.0, ge=0)
    """Largest norm of all gradients together; 0 clips nothing."""


class FinetuneTrainConfig(Section):
    """The training loop."""

    num_epochs: int = keyed(3, key="finetune", gt=0)
    """Passes over the training split."""
    max_steps: int | None = keyed(None, key="finetune", gt=0)
    """Optimizer steps after which training ends, within or beyond num_epochs; null means
    num_epochs."""
    micro_batch_size: int = keyed(8, key="finetune", gt=0)
    """Samples per rank and forward pass."""
    eval_batch_size: int = keyed(8, key="find-batch-size", gt=0)
    """Samples per rank and forward pass of evaluations."""
    gradient_accumulation_steps: int = keyed(1, gt=0)
    """Forward passes per optimizer step."""
    precision: Precision = keyed("auto")
    """Compute type; auto takes bf16 where the hardware multiplies it natively, else fp32."""
    gradient_checkpointing: bool = keyed(False, key="find-batch-size")
    """Whether activations are computed again in the backward pass instead of kept."""
    best_metric: str | None = keyed(None, min_length=1)
    """Which metric of the validation tells the best model: one of the task's, or loss; null means
    the task's first."""
    log_interval: int = unkeyed(10, gt=0)
    """Optimizer steps between log lines and step events."""
    exit_duration_minutes: float | None = unkeyed(None, gt=0)
    """Minutes after whose end the run saves and ends, to be gone on with; null means never."""


class FinetuneCheckpointConfig(Section):
    """When to save what the run goes on from; the best model is kept beside that."""

    save_interval: int | None = unkeyed(None, gt=0)
    """Optimizer steps between checkpoints; null means at the end of each epoch."""
    keep_last: int = unkeyed(1, gt=0)
    """The newest checkpoints that are kept."""


class FinetuneLaunchConfig(LaunchConfig):
    """Processes, their supervision, and what the ranks divide among them."""

    distributed: Distribution = keyed("ddp", key="finetune")
    """ddp: each rank holds everything; zero2: optimizer state and gradients are divided; zero3:
    weights too; zero3-offload: and all of it lies in main memory. ZeRO (Rajbhandari et al. 2020) is
    DeepSpeed's. fsdp: as zero3, by torch's FSDP 2, for classification and causal_lm. It is part of
    the run's key: one's checkpoints cannot be read by another."""
    accelerate_config: str | dict[str, Any] | None = unkeyed(None)
    """YAML that `accelerate config` wrote, a path or its content: ranks, distribution and precision
    are taken from it; null means none."""
    deepspeed_config: str | dict[str, Any] | None = keyed(None, key=("finetune", "find-batch-size"))
    """DeepSpeed's own JSON for zero2 and zero3, a path or its content; "auto" is filled with the
    values of this configuration, an optimizer or a scheduler in it is honoured. Null means the
    project's own settings."""


class FindBatchSizeConfig(Section):
    """What `--find-batch-size` tries, and how much memory it may take."""

    methods: tuple[Distribution, ...] = unkeyed(DISTRIBUTIONS, min_length=1)
    """Which values of launch.distributed are compared."""
    memory_limit_gb: float | None = keyed(None, gt=0)
    """Memory of each rank in GB (10^9 bytes), its GPU's or without one main memory; null means 95 %
    of the GPU, without one 80 % of what is free on this machine, divided by its ranks."""
    max_batch: int = keyed(4096, gt=0)
    """Largest micro batch that is tried; never more than the samples that a rank has in an
    epoch."""
    steps: int = keyed(3, gt=1)
    """Optimizer steps after which a micro batch counts as fitting; the first ones allocate the
    optimizer's state."""

    @field_validator("methods")
    @classmethod
    def _methods_differ(cls, value: tuple[Distribution, ...]) -> tuple[Distribution, ...]:
        twice = sorted({name for name in value if value.count(name) > 1})
        if twice:
            raise ValueError(
                f"find_batch_size.methods names {twice[0]} {value.count(twice[0])} times: name it "
                "once"
            )
        return value


class FinetuneConfig(Section):
    """Everything that one deployment of the flow finetune says."""

    name: str = keyed(
        key="finetune-export", resolved="finetune-publish", pattern=r"^[a-z0-9][a-z0-9.-]*$"
    )
    """Name of the run and of the fine-tuned model: lower case, digits, dots and dashes."""
    seed: int = keyed(42, key=("finetune", "find-batch-size"), resolved="dataset", ge=0, lt=2**32)
    """Seeds the order of samples, the head's first weights and dropout."""
    verify: Literal["quick", "full"] = unkeyed("quick")
    """How a cached artifact is checked: sizes (and hashes where a file was touched), or every
    hash."""
    model: PretrainedConfig = keyed(key=("finetune", "find-batch-size"))
    """What is fine-tuned."""
    data: FinetuneDataConfig = keyed()
    """Rows."""
    task: TaskConfig = keyed(key=("examples", "finetune", "find-batch-size"))
    """What is learned from them, and how that is measured."""
    optim: FinetuneOptimConfig = keyed(key=("finetune", "find-batch-size"))
    """The optimizer and its schedule."""
    train: FinetuneTrainConfig = keyed(FinetuneTrainConfig(), key=("finetune", "find-batch-size"))
    """The training loop."""
    checkpoint: FinetuneCheckpointConfig = unkeyed(FinetuneCheckpointConfig())
    """When to save and what to keep."""
    launch: FinetuneLaunchConfig = unkeyed(FinetuneLaunchConfig())
    """Processes and their supervision."""
    find_batch_size: FindBatchSizeConfig = keyed(FindBatchSizeConfig(), key="find-batch-size")
    """The comparison of distributions."""
    tracking: TrackingConfig = unkeyed(TrackingConfig(experiment="finetune"))
    """MLflow."""

    @field_validator("tracking", mode="before")
    @classmethod
    def _runs_have_an_experiment_of_their_own(cls, value: Any) -> Any:
        return {"experiment": "finetune"} | value if isinstance(value, dict) else value

    @model_validator(mode="before")
    @classmethod
    def _files_are_merged(cls, values: Any, info: ValidationInfo) -> Any:
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
        """Name in the model registry, resolved."""
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
    ranks = config.launch.nproc_per_node
    if ranks != "auto" and ranks < 1:
        raise ValueError(
            f"launch.nproc_per_node is {ranks}: a fine-tuning needs at least one rank; use 1 or "
            "more"
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
    """A model's next version must not be its own parent's.

    What is fine-tuned next would begin with it.
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
    if (
        isinstance(task, Seq2SeqConfig)
        and task.sentence_splitter == "punkt"
        and "rougeLsum" not in task.metrics
    ):
        raise ValueError(
            f"task.sentence_splitter is punkt but task.metrics {', '.join(task.metrics)} has no "
            "rougeLsum, which alone looks at sentences: remove the former, or add rougeLsum"
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


def _check_differing(name: str, values: tuple[Any, ...]) -> None:
    twice = next((value for number, value in enumerate(values) if value in values[:number]), None)
    if twice is not None:
        raise ValueError(f"{name} names {twice} {values.count(twice)} times: name it once")


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
