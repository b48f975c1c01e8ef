"""Checks before a fine-tuning: feasibility on this host, cached stages and expected cost."""

import importlib.util
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prefect import get_run_logger

from megacore.artifact import Artifact, Workspace
from megacore.artifact.files import JSON_BYTES, parse_json, read_object
from megacore.artifact.workspace import MODEL_DIRECTORY
from megacore.cluster.hosts.hardware import hardware_of
from megacore.cluster.start import check_launcher
from megacore.config.finetune import FinetuneConfig
from megacore.config.load import load_finetune_config
from megacore.errors import ArtifactError, ConfigError, MegacoreError
from megacore.finetune.resolve import Schedule, check_warmup, resolve_ranks
from megacore.observe.recorder import check_wandb
from megacore.paths import glob
from megacore.plan.machine import machine_of
from megacore.plan.preflight import CPU_DAYS_LIMIT, check_precision, unseen_gpus
from megacore.plan.throughput import SECONDS_PER_DAY
from tasks._parent import parent_directory, pinned
from tasks._plan import DryRun, launch_lines, show_config, show_plan
from tasks._stage_runner import StageRunner
from tasks.find_batch_size import check_find_batch_size
from tasks.finetune import run_directory
from tasks.preflight import CONF_DIR
from tasks.push import check_push

_PACKAGES = ("accelerate", "transformers", "datasets")
"""Packages of the extra `finetune` that every fine-tuning needs."""


def load_checked_finetuning(conf: str, overrides: Mapping[str, Any] | None) -> FinetuneConfig:
    """Load `conf`, apply `overrides`, and refuse a configuration that cannot work here.

    A registered model is pinned to its version.

    Raises ConfigError, ParallelLayoutError, WorkspaceError, LaunchError or TrackingError before any
    stage starts.
    """
    config = _load(conf, overrides)
    check_here(config)
    get_run_logger().info("preflight: %s, beginning with %s", _processes(config), config.model.path)
    return config


def _load(conf: str, overrides: Mapping[str, Any] | None) -> FinetuneConfig:
    config = load_finetune_config(conf, overrides, conf_dir=CONF_DIR / "finetune")
    Workspace.of()
    config = pinned(config)
    parent_directory(config)  # refuses an invalid path
    return config


def check_here(config: FinetuneConfig) -> None:
    """Refuse a configuration for which libraries, launchers or GPUs are missing.

    Raises ConfigError, ParallelLayoutError, LaunchError.
    """
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"a fine-tuning needs {package}, which is not installed: pip install "
                "megacore[finetune]"
            )
    launch, hardware = config.launch, hardware_of(config.launch)
    option = "launch.kind" if launch.kind == "deepspeed" else "launch.distributed"
    uses_deepspeed = launch.distributed.startswith("zero") or launch.kind == "deepspeed"
    if uses_deepspeed and importlib.util.find_spec("deepspeed") is None:
        value = launch.kind if option == "launch.kind" else launch.distributed
        raise ConfigError(
            f"{option} is {value}, which needs deepspeed, and that is not installed: pip install "
            f"megacore[deepspeed], or set {option} to "
            f"{'torchrun' if option == 'launch.kind' else 'ddp'}"
        )
    if config.tracking.wandb is not None:
        check_wandb()
    check_launcher(launch)
    resolve_ranks(config, hardware)
    scheduler = unseen_gpus(launch, hardware)
    if scheduler is not None:
        check_precision(config.train.precision, scheduler)
    if hardware.gpus or launch.has_scheduler:
        return
    if config.train.precision == "fp16":
        raise ConfigError(
            f"train.precision is fp16, which needs a GPU, and {hardware.owner} has none: set it to "
            "auto, bf16 or fp32"
        )
    if launch.distributed != "ddp" and not launch.allow_cpu:
        raise ConfigError(
            f"launch.distributed is {launch.distributed}, which divides a model over the memory of "
            f"GPUs, and {hardware.owner} has none: set launch.distributed to ddp, or "
            "launch.allow_cpu to true to start it all the same"
        )


def check_cost(config: FinetuneConfig, pretrained: Artifact, examples: Artifact) -> str:
    """Return the estimated cost of the training as one line of text.

    Raises ConfigError for a warm-up that does not end, and where CPUs would need more than
    CPU_DAYS_LIMIT days and launch.allow_cpu is false.
    """
    hardware = hardware_of(config.launch)
    ranks, threads = resolve_ranks(config, hardware)
    parameters = parameter_count(pretrained.directory / MODEL_DIRECTORY)
    samples, train = int(examples.counts["train"]), config.train
    schedule = Schedule.of(train, samples, ranks)
    check_warmup(config, schedule)
    tokens = examples.counts["tokens"] * schedule.total_steps / schedule.steps_per_epoch
    passes = 8 if train.gradient_checkpointing else 6
    precision = hardware.resolve_precision(train.precision)
    machine = machine_of(hardware, precision)
    devices = ranks if hardware.gpus else min(hardware.cores, ranks * threads)
    rate = devices * machine.peak(precision) * machine.product_efficiency
    days = passes * parameters * tokens / rate / SECONDS_PER_DAY
    kind = f"{'GPU' if hardware.gpus else 'CPU'} rank{'s' if ranks > 1 else ''}"
    cost = (
        f"{parameters / 1e6:.1f} M parameters on {ranks} {kind}: {schedule.total_steps} steps, "
        f"at least {_duration(days)}, the time of matrix products at {rate / 1e12:.3g} TFLOP/s"
    )
    on_cpus = not config.launch.has_scheduler and not hardware.gpus
    if on_cpus and days > CPU_DAYS_LIMIT and not config.launch.allow_cpu:
        raise ConfigError(
            f"{config.name} is sized for GPUs and {hardware.owner} has none: its CPUs would need "
            f"about {_duration(days)} for {schedule.total_steps} steps of {parameters / 1e6:.0f} M "
            "parameters: set train.max_steps or take a smaller model, or set launch.allow_cpu to "
            "true to start it all the same"
        )
    return cost


def parameter_count(directory: Path) -> int:
    """Count the parameters in the weights of a transformers directory.

    Without weights, estimate them from the shape in its configuration.
    """
    files = sorted(glob(directory, "*.safetensors"))
    if files:
        return sum(map(_numbers, files))
    config = read_object(directory / "config.json")

    def first(*names: str) -> int:
        return next((int(config[name]) for name in names if config.get(name)), 0)

    hidden, layers = (
        first("hidden_size", "n_embd", "d_model"),
        first("num_hidden_layers", "n_layer", "num_layers"),
    )
    layers += first("decoder_layers", "num_decoder_layers")
    return first("vocab_size") * hidden + 12 * layers * hidden**2


def _numbers(path: Path) -> int:
    """Count the parameters in a safetensors file, whose header has the shape of each tensor."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = parse_json(file.read(min(length, JSON_BYTES)))
        return sum(
            math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ArtifactError(
            f"{path} is damaged ({error}): delete {path.parent.parent} to have it made again"
        ) from error


def finetune_dry_run(
    conf: str,
    overrides: Mapping[str, Any] | None,
    stages: Callable[[StageRunner[FinetuneConfig]], None],
    *,
    find_batch_size: bool = False,
) -> None:
    """Print (and store) configuration, keys and states of stages, and start commands; run nothing.

    A key is unknown until its inputs exist. An error of the checks is shown too, then raised.
    `stages` runs the stages, of which a dry run only looks up the artifacts: those of the training,
    or with `find_batch_size` those that compare distributions.
    """
    config = _load(conf, overrides)
    show_config(config)
    refusal: MegacoreError | None = None
    try:
        check_here(config)
        if find_batch_size:
            check_find_batch_size(config)
        else:
            check_push(config.export)
    except MegacoreError as error:
        refusal = error
    plan = DryRun(config)
    stages(plan)
    artifacts = plan.artifacts
    cost = _processes(config) if refusal is None else str(refusal)
    if find_batch_size and refusal is None:
        methods = ", ".join(config.find_batch_size.methods)
        cost = f"{methods} are compared, with {cost.partition(' with ')[0]}"
    elif refusal is None and {"pretrained", "examples"} <= artifacts.keys():
        try:
            cost = check_cost(config, artifacts["pretrained"], artifacts["examples"])
        except MegacoreError as error:
            refusal, cost = error, str(error)
    action = "find-batch-size" if find_batch_size else "fine-tuning"
    commands = (lambda: []) if find_batch_size else (lambda: _commands(config, artifacts))
    show_plan(config.name, plan.planned, f"{action}: {cost}", refusal, commands)


def _processes(config: FinetuneConfig) -> str:
    hardware = hardware_of(config.launch)
    ranks, threads = resolve_ranks(config, hardware)
    kind = f"{'GPU' if hardware.gpus else 'CPU'} rank{'s' if ranks > 1 else ''}"
    threads_text = "" if hardware.gpus else f" x {threads} threads"
    precision = hardware.resolve_precision(config.train.precision)
    return f"{ranks} {kind}{threads_text} with {config.launch.distributed} in {precision}"


def _commands(config: FinetuneConfig, artifacts: Mapping[str, Artifact]) -> list[str]:
    """Return the commands that start the ranks, with `<key>` for a run key not yet known."""
    directory = Workspace.of().folder("finetune") / "<key>"
    if {"pretrained", "examples"} <= artifacts.keys():
        directory = run_directory(config, artifacts["pretrained"], artifacts["examples"])
    ranks = resolve_ranks(config, hardware_of(config.launch))
    return launch_lines(config, "megacore.ranks.finetune", directory, *ranks)


def _duration(days: float) -> str:
    if days >= 1:
        return f"{days:,.1f} days"
    minutes = days * 24 * 60
    return f"{minutes / 60:.1f} hours" if minutes >= 60 else f"{minutes:.1f} minutes"
