"""Caching of stages.

One key per artifact, and a hit that is believed only after the files were checked.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import Task, get_run_logger
from prefect import task as prefect_task
from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH
from prefect.states import State
from pydantic import BaseModel, ConfigDict

from megacore.artifact import Artifact, Manifest, StageKey, Workspace
from megacore.artifact.build import build_artifact
from megacore.errors import ArtifactError, MegacoreError
from tasks._flow_config import FlowConfig
from tasks._logging import UNLIMITED_RETRIES

KeyFunction = Callable[..., StageKey]
RetryCondition = Callable[[Any, Any, State[Any]], bool]
"""Of a task, its run and the failed state: whether to start the task again."""
logger = logging.getLogger("prefect.megacore")


class StageResult(BaseModel):
    """What a stage's task returns: a reference, never the data."""

    model_config = ConfigDict(frozen=True)

    artifact: Artifact
    ran: bool
    """Whether the stage did its work, or found it done by another run."""


def artifact_directory(key: StageKey) -> Path:
    """Where the artifact of this key lies, whether it exists or not."""
    return Workspace.of().folder(key.stage) / key.key


def artifact_problem(
    key: StageKey, config: FlowConfig, directory: Path | None = None
) -> str | None:
    """Why the artifact cannot be taken as it is, in one clause; None when it can."""
    directory = directory or artifact_directory(key)
    if not directory.exists():
        return "it was not built yet"
    try:
        manifest = Manifest.read(directory)
    except ArtifactError as error:
        return str(error)
    if manifest.key != key.key:
        return f"it was built with key {manifest.key}"
    return manifest.problem(directory, config.verify)


class ArtifactPolicy(CachePolicy):
    """Prefect's key is task name + artifact key.

    A record whose artifact is damaged or gone is removed.

    `check(config, *inputs)` says what is wrong with the artifact, or None.
    """

    def __init__(self, key_of: KeyFunction, check: Callable[..., str | None]) -> None:
        super().__init__()
        self.key_of = key_of
        self.check = check

    def compute_key(
        self,
        task_ctx: TaskRunContext,
        inputs: dict[str, Any],
        flow_parameters: dict[str, Any],
        **kwargs: Any,
    ) -> str | None:
        """The cache key.

        An exception here would silently turn caching off, so it is logged as what it is.
        """
        try:
            key: StageKey = self.key_of(**inputs)
            record = f"{task_ctx.task.name}-{key.key}"
            path = Path(PREFECT_LOCAL_STORAGE_PATH.value()) / record
            if path.exists():
                problem = self.check(**inputs)
                if problem:
                    logger.warning("%s runs again: %s", task_ctx.task.name, problem)
                    path.unlink(missing_ok=True)
            return record
        except MegacoreError as error:
            logger.error("%s has no cache key: %s", task_ctx.task.name, error)
            raise


def stage_task(
    name: str,
    key_of: KeyFunction,
    *,
    check: Callable[..., str | None] | None = None,
    may_pass: RetryCondition | None = None,
) -> Callable[[Callable[..., StageResult]], Task[..., StageResult]]:
    """Make a Prefect task of a stage.

    `key_of` and `check` take the same arguments as the stage itself.

    A failure that may pass is retried `launch.retries` times, or, with a condition `may_pass` of
    the stage's own, as often as that allows.
    """

    def default_check(config: FlowConfig, **inputs: Any) -> str | None:
        return artifact_problem(key_of(config=config, **inputs), config)

    return prefect_task(
        name=name,
        task_run_name=name + "-{config.name}",
        cache_policy=ArtifactPolicy(key_of, check or default_check),
        persist_result=True,
        result_serializer="json",
        retries=UNLIMITED_RETRIES if may_pass else 0,  # a flow gives the others their number
        retry_condition_fn=may_pass or should_retry,
        tags={"megacore"},
    )


def should_retry(task: Any, task_run: Any, state: State[Any]) -> bool:
    """Whether the failure may pass: a lost rank or a broken connection, never a wrong value."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, MegacoreError):
        return error.retryable
    return isinstance(error, (ConnectionError, TimeoutError))


def build(
    config: FlowConfig,
    key: StageKey,
    function: Callable[[Path], dict[str, Any]],
) -> StageResult:
    """Build the stage's artifact, or take the one that another run has completed."""
    folder = Workspace.of().folder(key.stage)
    artifact, ran = build_artifact(folder, key, function, verify=config.verify)
    log = get_run_logger()
    log.info("%s %s %s: %s", key.stage, "built" if ran else "found", artifact.path, artifact.counts)
    return StageResult(artifact=artifact, ran=ran)
