"""Checks that cross the sections of a fine-tuning's configuration; each raises ValueError with one sentence."""

import re
from typing import TYPE_CHECKING, Any

from megacore.config.finetune_task import CausalLmConfig, ClassificationConfig, Seq2SeqConfig
from megacore.errors import ConfigError

if TYPE_CHECKING:
    from megacore.config.finetune import FinetuneConfig


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
            "tracking.tensorboard is true: a fine-tuning writes no event files, its numbers are in MLflow; set it to "
            "false"
        )


def _check_launch(config: "FinetuneConfig") -> None:
    if config.launch.elastic:
        raise ValueError(
            f"launch.nnodes is {config.launch.nnodes}, a range: a fine-tuning's checkpoints are for one number of "
            "ranks; give one number"
        )
    if config.launch.data_placement == "node_local":
        raise ValueError(
            "launch.data_placement is node_local: a fine-tuning reads and writes one directory that all its machines "
            "see; set it to shared"
        )
    ranks = config.launch.nproc_per_node
    if ranks != "auto" and ranks < 1:
        raise ValueError(f"launch.nproc_per_node is {ranks}: a fine-tuning needs at least one rank; use 1 or more")


def _check_files(config: "FinetuneConfig") -> None:
    for name in ("accelerate_config", "deepspeed_config"):
        held = getattr(config.launch, name)
        if isinstance(held, str):
            raise ValueError(
                f"launch.{name} is the path {held!r}, which was not read: give the content of the file, or load the "
                "configuration from its YAML"
            )


def _check_model(config: "FinetuneConfig") -> None:
    model = config.model
    if model.revision is not None and model.path.startswith("models:/"):
        raise ValueError(
            f"model.revision is {model.revision} but model.path is {model.path}, a model of the registry, whose "
            "version is in the path: remove model.revision"
        )
    if model.new_head and model.random_weights:
        raise ValueError(
            "model.new_head and model.random_weights are both true: random weights have no trained head; "
            "keep one of them"
        )
    if model.new_head and config.task.kind != "classification":
        raise ValueError(
            f"model.new_head is true but task.kind is {config.task.kind}: only a classifier has a head of its own; "
            "remove it"
        )


def _check_name(config: "FinetuneConfig") -> None:
    """A model's next version must not be its own parent's: what is fine-tuned next would begin with it."""
    parent = re.fullmatch(r"models:/([^@/]+)[@/].+", config.model.path)
    if parent is not None and parent[1] == config.registered_model:
        raise ValueError(
            f"the fine-tuned model would be registered as {config.registered_model}, the name of model.path "
            f"{config.model.path} that it begins with: set tracking.registered_model or name to another one"
        )


def _check_data(config: "FinetuneConfig") -> None:
    data = config.data
    if data.max_test_samples is not None and not data.source.test:
        raise ValueError(
            f"data.max_test_samples is {data.max_test_samples} but data.source.test names no test split: remove the "
            "former, or name one"
        )


def _check_task(config: "FinetuneConfig") -> None:
    from megacore.finetune.metrics import best_metric

    task = config.task
    if isinstance(task, ClassificationConfig | Seq2SeqConfig):
        _check_differing("task.metrics", task.metrics or ())
    if isinstance(task, ClassificationConfig):
        _check_differing("task.labels", task.labels or ())
    if isinstance(task, Seq2SeqConfig) and task.sentence_splitter == "punkt" and "rougeLsum" not in task.metrics:
        raise ValueError(
            f"task.sentence_splitter is punkt but task.metrics {', '.join(task.metrics)} has no rougeLsum, which alone "
            "looks at sentences: remove the former, or add rougeLsum"
        )
    if isinstance(task, CausalLmConfig) and config.model.pad_token is not None:
        raise ValueError(
            f"model.pad_token is {config.model.pad_token} but task.kind is causal_lm, whose blocks are all of one "
            "length: remove it"
        )
    if isinstance(task, Seq2SeqConfig) and config.launch.distributed == "fsdp":
        raise ValueError(
            "launch.distributed is fsdp and task.kind seq2seq, whose models share an embedding between encoder and "
            "decoder, which torch's FSDP 2 refuses: set launch.distributed to zero3"
        )
    try:
        best_metric(config)
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
            f"optim.warmup_steps is {optim.warmup_steps} but optim.lr_scheduler is constant, which has no warm-up: use "
            "constant_with_warmup, or remove the former"
        )
    if steps is not None and optim.warmup_steps >= steps:
        raise ValueError(
            f"optim.warmup_steps {optim.warmup_steps} does not end before train.max_steps {steps}: set it below {steps}"
        )
