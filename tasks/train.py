"""Stage `train`: distributed pretraining, which is watched and resumes from its last checkpoint."""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from prefect import get_run_logger

from megacore.artifact import Artifact, StageKey, Workspace
from megacore.artifact.build import open_artifact, seal
from megacore.artifact.files import require_space
from megacore.artifact.manifest import MANIFEST_NAME, Manifest, depth_of
from megacore.artifact.workspace import CHECKPOINTS_NAME, RUN_FILE
from megacore.checkpoint.format import complete_checkpoints, verify
from megacore.checkpoint.retain import remove_stale
from megacore.checkpoint.spec import read_spec
from megacore.cluster.hosts.elastic import choose_hosts
from megacore.cluster.hosts.hardware import hardware_of
from megacore.config import RunConfig
from megacore.config.keys import key_parameters
from megacore.config.spec import SpecialTokens
from megacore.config.train import Precision
from megacore.errors import ArtifactError, ConfigError, MegacoreError, WorkspaceError
from megacore.jobs.run import Job, TrainJob
from megacore.plan.preflight import checkpoints_on_disk, resolve_launch
from megacore.ranks import stages
from megacore.token_files.indexed_dataset import token_prefixes
from tasks._cache import StageResult, artifact_problem, stage_task
from tasks._devices import devices
from tasks._doctor import check_hosts
from tasks._live_run import watched
from tasks._mlflow import RunFacts
from tasks._resume import (
    check_model,
    planned_before,
    pretrained_digest,
    resumed_digest,
    warn_of_other_data,
)
from tasks._retry import attempt, may_retry
from tasks.curate import curation_metrics
from tasks.index import (
    RunData,
    consumed_samples,
    epochs_of,
    index_key,
    read_steps,
    resolved_samples,
    split_datasets,
    without_other_families,
)

SEALED = "checkpoints/*/complete.json"
"""Pattern of the files in a training's manifest: the completion markers, each of which contains the
digests of its checkpoint's files."""


def run_key(config: RunConfig, tokens: Artifact, tokenizer: Artifact) -> StageKey:
    """Return the key of the run, without values that may change on resume, such as train_iters."""
    resolved: dict[str, Any] = {
        f"samples.{name}": value for name, value in resolved_samples(config).items()
    }
    resolved["train.pretrained_checkpoint"] = pretrained_digest(config)
    resolved["precision"] = precision_of(config)
    if config.resume.checkpoint is not None:
        resolved["resume"] = resumed_digest(config)
    parameters = key_parameters(config, "run", resolved)
    parameters["samples"] = without_other_families(config, parameters["samples"])
    return StageKey.of(
        "train", stages.TRAIN_VERSION, parameters, tokens=tokens, tokenizer=tokenizer
    )


def precision_of(config: RunConfig) -> Precision:
    """Return the compute type of the run on its hosts, which are asked only for `auto`."""
    precision = config.train.precision
    if precision != "auto":
        return precision
    return cast(Precision, hardware_of(config.launch).resolve_precision(precision))


def check_pretrained(config: RunConfig) -> None:
    """Refuse, before anything runs, a pretrained checkpoint that is missing or does not fit.

    A checkpoint of another architecture does not fit. Raises ConfigError, CheckpointError.
    """
    if pretrained_digest(config) is not None:
        check_model(Path(str(config.train.pretrained_checkpoint)), config, extends=True)


def train_key(config: RunConfig, data: RunData[Artifact]) -> StageKey:
    """Return the key of the run up to train_iters.

    It contains the sample ranges that the run skips, which bad batches it skips, and the later
    weights of its blend.
    """
    run = run_key(config, data.tokens, data.tokenizer)
    train = config.train
    skipped = [[each.start, each.stop - 1] for each in train.skipped_ranges]
    steps = read_steps(config, consumed_samples(config))
    resolved = ({"skip_samples": skipped} if skipped else {}) | steps
    if train.loss_spike_action == "skip":
        resolved["skip_loss_spikes"] = train.loss_spike_factor
    if train.nonfinite_action == "skip":
        resolved["skip_nonfinite"] = True
    parameters = key_parameters(config, "train", resolved)
    return StageKey("train", run.version, run.parameters | parameters, run.inputs)


def run_directory(config: RunConfig, tokens: Artifact, tokenizer: Artifact) -> Path:
    """Return the run directory `runs/<run key>`."""
    return Workspace.of().folder("train") / run_key(config, tokens, tokenizer).key


def training_directory(config: RunConfig, data: RunData[Artifact]) -> Path:
    """Return a training's directory, which is not its key's: the key depends on train_iters."""
    return run_directory(config, data.tokens, data.tokenizer)


def planned_order(config: RunConfig, tokens: Artifact, tokenizer: Artifact) -> int | None:
    """Return the samples for which the order of the run's samples was planned before this start.

    See `tasks._resume.planned_before`. Raises FileAccessError if a file cannot be read now.
    """
    try:
        directory = run_directory(config, tokens, tokenizer)
    except ConfigError:
        # The checkpoint that the run begins with is not here: the training refuses it, but its
        # data can be prepared.
        directory = None
    return planned_before(config, directory)


def training_problem(config: RunConfig, data: RunData[Artifact]) -> str | None:
    """Return in one clause why the run must be trained (further); None if it is complete."""
    directory = training_directory(config, data)
    key, target = train_key(config, data), config.train.train_iters
    problem = artifact_problem(key, config, directory)
    if problem:
        ended = _ended_at(directory)
        longer = ended is not None and ended < target
        return f"it ended at iteration {ended:,} of {target:,}" if longer else problem
    try:
        for checkpoint in open_artifact(directory).counts["checkpoints"]:
            verify(directory / checkpoint["path"], depth_of(config.verify))
    except MegacoreError as error:
        return str(error)
    return None


def _ended_at(directory: Path) -> int | None:
    """Return the last iteration of a finished training; None if there is none."""
    try:
        return int(Manifest.read(directory).counts["iterations"])
    except (ArtifactError, KeyError):
        return None


@stage_task(
    "train",
    train_key,
    check=training_problem,
    directory_of=training_directory,
    retry_condition=may_retry(training_directory),
)
def train(config: RunConfig, data: RunData[Artifact]) -> StageResult:
    """Train to `train.train_iters`; a retry resumes from the last complete checkpoint.

    It is retried when ranks were lost, a signal stopped them, or a disk or file server failed for a
    cause that may pass: `launch.retries` times without a new checkpoint.
    """
    directory = training_directory(config, data)
    key = train_key(config, data)
    with attempt(config, directory, lambda: training_problem(config, data)) as held:
        if held is not None:
            _refuse_to_shorten(config, directory)
            _refuse_other_order(config, directory, data)
            warn_of_other_data(config, directory)
            with devices(config.launch, trains=True):
                _run(config, key, directory, data, held)
        return StageResult(artifact=open_artifact(directory), ran=held is not None)


def _refuse_to_shorten(config: RunConfig, directory: Path) -> None:
    target = config.train.train_iters
    for path, marker in complete_checkpoints(directory / CHECKPOINTS_NAME).items():
        if marker.iteration > target:
            raise ConfigError(
                f"train.train_iters is {target}, but {path} is already further: raise it to at "
                f"least {marker.iteration}, or change the seed to start another run"
            )


def _refuse_other_order(config: RunConfig, directory: Path, data: RunData[Artifact]) -> None:
    """Refuse maps that were planned before another flow run began the run with its own order."""
    planned = planned_before(config, directory)
    if planned is not None and index_key(config, data.tokens, planned).key != data.index.key:
        raise WorkspaceError(
            f"{directory} has a checkpoint whose order of samples was planned for {planned} "
            f"samples, and {data.index.path} has another order, because its maps were planned "
            "before another flow run wrote that checkpoint: start this run again"
        )


def _run(
    config: RunConfig,
    key: StageKey,
    directory: Path,
    data: RunData[Artifact],
    held: int,
) -> None:
    """Train and seal the run.

    `held` is the descriptor of its lock, which the guard of the ranks keeps.
    """
    started = time.monotonic()
    _warn_of_changed_schedule(config, directory)
    job = TrainJob(
        **make_job(config, directory, data).model_dump(),
        planned_samples=_planned_samples(config, directory),
    )
    shutil.rmtree(job.exit_directory, ignore_errors=True)
    check_hosts(job)
    _require_checkpoint_space(config, directory, data.tokenizer.counts["vocab_size"])
    facts = run_facts(config, directory.name, data)
    # After all that can refuse: an extension that does not start keeps the finished training.
    (directory / MANIFEST_NAME).unlink(missing_ok=True)
    with watched(job, facts, config.train.train_iters) as poll:
        stages.train(job, poll, [held])
    remove_stale(directory / CHECKPOINTS_NAME)
    counts = training_counts(directory, config, data.index)
    seal(directory, key, counts, time.monotonic() - started, SEALED)


def _require_checkpoint_space(config: RunConfig, directory: Path, vocab_size: int) -> None:
    """Refuse to train without room for the checkpoints that are not there yet.

    Raises WorkspaceError, FileAccessError.
    """
    number, size = checkpoints_on_disk(config, vocab_size)
    checkpoints = directory / CHECKPOINTS_NAME
    # Stale ones, such as one whose deletion failed, do not count: they are no room.
    there = sum(marker.size_bytes for marker in complete_checkpoints(checkpoints).values())
    require_space(
        checkpoints,
        number * size - there,
        f"train keeps up to {number} checkpoint{'s' if number > 1 else ''} of about "
        f"{size / 2**20:,.1f} MiB ({config.name}), and {there / 2**20:,.1f} MiB of them are there: "
        "the others need",
    )


def _warn_of_changed_schedule(config: RunConfig, directory: Path) -> None:
    """Warn if an extension of the run changes its learning rates.

    The run then differs from one that had the new length from the start.
    """
    try:
        previous = TrainJob.read(directory / RUN_FILE)
    except ConfigError:
        return
    old, new = (
        {"lr_decay_iters": run.lr_decay_iters, "lr_warmup_iters": run.lr_warmup_iters}
        for run in (previous.config, config)
    )
    if old != new:
        get_run_logger().warning(
            "the learning rate schedule of this run changes from %s to %s: set both in optim to "
            "keep it",
            old,
            new,
        )


def run_facts(config: RunConfig, key: str, data: RunData[Artifact]) -> RunFacts:
    """Return the facts that MLflow records in addition to the configuration."""
    return RunFacts(
        key=key,
        datasets=split_datasets(config, data),
        tags={"megacore.conf": config.name},
        epochs=epochs_of(config, data.index),
        metrics=curation_metrics(data.tokens) if config.data.curate else {},
    )


def make_job(config: RunConfig, directory: Path, data: RunData[Artifact]) -> Job:
    """Build the fields of the job of this run's next attempt, on the hosts that take part now.

    Raises ParallelLayoutError, and LaunchError when too few hosts of an elastic run answer.
    """
    vocab_size = data.tokenizer.counts["vocab_size"]
    hosts = choose_hosts(config, vocab_size, attempt=stages.next_attempt(directory))
    ranks, threads = resolve_launch(config, hardware_of(config.launch), vocab_size, hosts=hosts)
    job = job_of(config, directory, data, ranks=ranks, threads=threads, hosts=hosts)
    return job.model_copy(update={"precision": precision_of(config)})


def job_of(
    config: RunConfig,
    directory: Path,
    data: RunData[Artifact],
    *,
    ranks: int,
    threads: int,
    hosts: Mapping[str, int] | None = None,
) -> Job:
    """Build the fields of a job of this run on `ranks` ranks of `threads` CPU threads each.

    It runs on `hosts`, or on this host if that is None. Raises CheckpointError if the checkpoint
    that the run continues from does not describe its model.
    """
    return Job(
        config=config,
        token_prefixes=token_prefixes(data.tokens.directory),
        index_directory=data.index.path,
        tokenizer_directory=data.tokenizer.path,
        vocab_size=data.tokenizer.counts["vocab_size"],
        special_tokens=_special_tokens(config, data.tokenizer),
        run_directory=str(directory),
        exit_directory=str(directory / "exit"),
        ranks=ranks,
        threads_per_rank=threads,
        hosts=dict(hosts or {}),
        attempt=stages.next_attempt(directory),
    )


def _special_tokens(config: RunConfig, tokenizer: Artifact) -> SpecialTokens:
    """Return the tokenizer's special tokens, and begin and ends of the model that is continued."""
    tokens = SpecialTokens.model_validate(tokenizer.counts["special_tokens"])
    earlier = config.resume.checkpoint or config.train.pretrained_checkpoint
    if earlier is None:
        return tokens
    return tokens.continuing(
        read_spec(Path(earlier)).special_tokens, tokenizer.counts["vocab_size"]
    )


def _planned_samples(config: RunConfig, directory: Path) -> int:
    """Return the samples for which the run's order is planned, also before this start."""
    before = planned_before(config, directory)
    return consumed_samples(config) if before is None else before


def training_counts(directory: Path, config: RunConfig, index: Artifact) -> dict[str, Any]:
    """Return the counts of a training's manifest: iterations, tokens, epochs and checkpoints."""
    checkpoints = [
        {
            "iteration": marker.iteration,
            "path": path.relative_to(directory).as_posix(),
            "validation_loss": marker.validation_loss,
        }
        for path, marker in complete_checkpoints(directory / CHECKPOINTS_NAME).items()
    ]
    return {
        "iterations": config.train.train_iters,
        "tokens": consumed_samples(config) * config.data.seq_length,
        "epochs": epochs_of(config, index).epochs,
        "checkpoints": checkpoints,
    }


def open_finished_training(config: RunConfig, data: RunData[Artifact]) -> Artifact | None:
    """Return the training that `pretrain` has finished for this configuration, or None."""
    if training_problem(config, data):
        return None
    return open_artifact(training_directory(config, data))


def finished_training(config: RunConfig, data: RunData[Artifact]) -> Artifact:
    """Return the training that `pretrain` has finished for this configuration.

    Raises ConfigError when there is none.
    """
    problem = training_problem(config, data)
    if problem:
        raise ConfigError(
            f"{config.name} has no finished training here ({problem}): run pretrain/{config.name} "
            "first"
        )
    return open_artifact(training_directory(config, data))
