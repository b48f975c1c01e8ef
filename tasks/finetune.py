"""Stage `finetune`: supervised fine-tuning with Accelerate, resumed from its last checkpoint."""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import get_run_logger

from megacore.artifact import Artifact, StageKey
from megacore.artifact.build import open_artifact, seal
from megacore.artifact.files import read_json, reason_of
from megacore.artifact.manifest import MANIFEST_NAME
from megacore.artifact.workspace import RESULT_FILE
from megacore.cluster.hosts.hardware import hardware_of
from megacore.config.finetune import FinetuneConfig
from megacore.config.keys import key_parameters
from megacore.errors import CheckpointError
from megacore.finetune.resolve import resolve_ranks
from megacore.jobs.finetune import FinetuneJob
from megacore.ranks import stages
from tasks._cache import StageResult, artifact_directory, artifact_problem, stage_task
from tasks._devices import devices
from tasks._doctor import check_hosts
from tasks._live_run import watched
from tasks._mlflow import STORE_ERRORS, Dataset, RunFacts
from tasks._parent import noted_parent, parent_of
from tasks._resume import warn_of_unfinished
from tasks._retry import attempt, may_retry

SEALED = "best/**/*"
"""Pattern of the files in the manifest: those of the best model. Checkpoints serve only to
resume."""


def finetune_key(config: FinetuneConfig, pretrained: Artifact, examples: Artifact) -> StageKey:
    """Return the key of the run and of its result.

    It includes how the work is divided, such as the number of ranks, because checkpoints cannot be
    resumed with another division.

    Raises ParallelLayoutError, ConfigError.
    """
    hardware = hardware_of(config.launch)
    resolved = {
        "ranks": resolve_ranks(config, hardware)[0],
        "precision": hardware.resolve_precision(config.train.precision),
    }
    parameters = key_parameters(config, "finetune", resolved)
    return StageKey.of(
        "finetune",
        stages.FINETUNE_VERSION,
        parameters,
        examples=examples,
        pretrained=pretrained,
    )


def run_directory(config: FinetuneConfig, pretrained: Artifact, examples: Artifact) -> Path:
    """Return the run directory `finetuned/<key>`."""
    return artifact_directory(finetune_key(config, pretrained, examples))


@stage_task("finetune", finetune_key, retry_condition=may_retry(run_directory))
def finetune(config: FinetuneConfig, pretrained: Artifact, examples: Artifact) -> StageResult:
    """Fine-tune the model; a retry resumes from the last complete checkpoint.

    It is retried when ranks were lost, a signal stopped them, or a disk or file server failed for a
    cause that may pass: `launch.retries` times without a new checkpoint.
    """
    key = finetune_key(config, pretrained, examples)
    directory = artifact_directory(key)
    with attempt(config, directory, lambda: artifact_problem(key, config)) as held:
        if held is not None:
            with devices(config.launch, trains=True):
                _run(config, key, directory, pretrained, examples, held)
        return StageResult(artifact=open_artifact(directory), ran=held is not None)


def _run(
    config: FinetuneConfig,
    key: StageKey,
    directory: Path,
    pretrained: Artifact,
    examples: Artifact,
    held: int,
) -> None:
    """Train and seal the run.

    `held` is the descriptor of its lock, which the guard of the ranks keeps.
    """
    from tasks.finetune_preflight import check_cost

    check_cost(config, pretrained, examples)
    started = time.monotonic()
    (directory / MANIFEST_NAME).unlink(missing_ok=True)
    job = finetune_job(config, directory, pretrained, examples)
    shutil.rmtree(job.exit_directory, ignore_errors=True)
    warn_of_unfinished(job)
    check_hosts(job)
    facts = run_facts(config, directory.name, examples, _parent_tags(config, pretrained))
    with watched(job, facts, None, "fine-tuning") as poll:
        stages.finetune(job, poll, [held])
    seal(directory, key, result_counts(directory), time.monotonic() - started, SEALED)


def finetune_job(
    config: FinetuneConfig, directory: Path, pretrained: Artifact, examples: Artifact
) -> FinetuneJob:
    """Build the job file of this run's next attempt. Raises ParallelLayoutError, ConfigError."""
    hardware = hardware_of(config.launch)
    ranks, threads = resolve_ranks(config, hardware)
    return FinetuneJob(
        config=config,
        pretrained_directory=pretrained.path,
        examples_directory=examples.path,
        run_directory=str(directory),
        exit_directory=str(directory / "exit"),
        ranks=ranks,
        threads_per_rank=threads,
        attempt=stages.next_attempt(directory),
        precision=hardware.resolve_precision(config.train.precision),
    )


def _parent_tags(config: FinetuneConfig, pretrained: Artifact) -> dict[str, str]:
    """Return the tags of the initial model, or those of its collection if MLflow does not answer.

    An attempt, which may be a retry after days, must not fail for a store that training can do
    without.
    """
    try:
        return parent_of(config).tags()
    except STORE_ERRORS as error:
        get_run_logger().warning(
            "%s; the run is recorded with the parent that was known when its model was collected",
            error,
        )
        return noted_parent(pretrained.directory)


def run_facts(
    config: FinetuneConfig, key: str, examples: Artifact, parent: Mapping[str, str]
) -> RunFacts:
    """Return the facts that MLflow records next to the configuration.

    These are the samples, and the initial model by its tags `parent`.
    """
    return RunFacts(
        key=key,
        datasets={"training": Dataset.of(examples)},
        tags={
            "megacore.conf": config.name,
            **{f"megacore.{name}": value for name, value in parent.items()},
        },
    )


def result_counts(directory: Path) -> dict[str, Any]:
    """Return the counts for the manifest, from the ranks' result. Raises CheckpointError."""
    path = directory / RESULT_FILE
    try:
        result: dict[str, Any] = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({reason_of(error)}): delete {directory} to train again"
        ) from error
    names = ("iterations", "epochs", "best", "best_iteration", "metric", "value")
    measured = ("metrics", "test_metrics", "start_metrics")
    return {name: result[name] for name in (*names, *measured)}
