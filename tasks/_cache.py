"""Caching of stages.

Each artifact has one key. A cache hit counts only after its files were checked.
"""

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from prefect import State, Task, get_run_logger
from prefect import task as prefect_task
from prefect.cache_policies import CachePolicy
from prefect.context import TaskRunContext
from prefect.runtime import flow_run
from prefect.settings import PREFECT_LOCAL_STORAGE_PATH
from pydantic import BaseModel, ConfigDict, field_validator

from megacore.artifact import Artifact, Manifest, StageKey, Workspace, lock
from megacore.artifact.build import build_artifact, mark_used, try_lock
from megacore.artifact.files import access_error, require_space, workspace_errors
from megacore.artifact.manifest import depth_of
from megacore.artifact.workspace import FOLDERS, workspace_root
from megacore.errors import ArtifactError, MegacoreError
from megacore.observe.logging import counted
from megacore.paths import exists
from tasks._flow_config import FlowConfig
from tasks._logging import CountedRetries

KeyFunction = Callable[..., StageKey]
RetryCondition = Callable[[Any, Any, State[Any]], bool]
"""Function of a task, its run and the failed state that returns True if the task is retried."""
logger = logging.getLogger("prefect.megacore")


class StageResult(BaseModel):
    """Result of a stage's task: a reference to the artifact, never the data.

    A result that is read from a cache record refers to the present workspace, which may have been
    moved or copied since.
    """

    model_config = ConfigDict(frozen=True)

    artifact: Artifact
    ran: bool
    """True if the stage did its work, False if another run had completed it."""

    @field_validator("artifact", mode="before")
    @classmethod
    def _in_this_workspace(cls, value: Any) -> Any:
        if not isinstance(value, dict):  # an artifact of this process
            return value
        stage, path = value.get("stage"), value.get("path")
        if stage not in FOLDERS or not isinstance(path, str):
            return value  # of a damaged record: the fields are checked next
        folder = Workspace(workspace_root()).folder(stage)
        return value | {"path": str(folder / Path(path).name)}


Result = TypeVar("Result", bound=StageResult | State[Any])


def artifact_directory(key: StageKey) -> Path:
    """Return the directory of the artifact with this key, whether it exists or not."""
    return Workspace.of().folder(key.stage) / key.key


def artifact_problem(
    key: StageKey, config: FlowConfig, directory: Path | None = None
) -> str | None:
    """Return in one clause why the artifact cannot be used, or None if it can."""
    directory = directory or artifact_directory(key)
    if not exists(directory):
        return "it was not built yet"
    try:
        manifest = Manifest.read(directory)
    except ArtifactError as error:
        return str(error)
    if manifest.key != key.key:
        return f"it was built with key {manifest.key}"
    return manifest.problem(directory, depth_of(config.verify))


class ArtifactPolicy(CachePolicy):
    """Cache policy whose key is the task name and the artifact key.

    A cache record whose artifact is damaged or missing is removed. All functions take the arguments
    of the stage.
    """

    def __init__(
        self,
        key_of: KeyFunction,
        check: Callable[..., str | None] | None = None,
        directory_of: Callable[..., Path] | None = None,
    ) -> None:
        """Initialize the policy.

        `check` returns the problem of the artifact, or None; without it the files of the artifact
        are checked. `directory_of` returns the artifact's directory, if its name is not the key.
        """
        super().__init__()
        self.key_of = key_of
        self.check = check
        self.directory_of = directory_of

    def compute_key(
        self,
        task_ctx: TaskRunContext,
        inputs: dict[str, Any],
        flow_parameters: dict[str, Any],
        **kwargs: Any,
    ) -> str | None:
        """Return the cache key.

        After an exception here, Prefect turns caching off and runs the task. The task computes its
        key again, so an error of `key_of` is reported as the task's; another one is logged first.
        """
        key: StageKey = self.key_of(**inputs)
        record = f"{task_ctx.task.name}-{key.key}"
        path = Path(PREFECT_LOCAL_STORAGE_PATH.value()) / record
        try:
            if exists(path):
                problem = self._checked(**inputs)
                if problem:
                    logger.warning("%s runs again: %s", task_ctx.task.name, problem)
                    with workspace_errors(path):
                        path.unlink(missing_ok=True)
            return record
        except MegacoreError as error:
            logger.error("%s has no cache key: %s", task_ctx.task.name, error)
            raise

    def _checked(self, config: FlowConfig, **inputs: Any) -> str | None:
        """Return the problem of the artifact, or mark it as used if it has none."""
        if self.check is not None:
            return self.check(config=config, **inputs)
        key = self.key_of(config=config, **inputs)
        directory = artifact_directory(key)
        if not exists(directory):
            return artifact_problem(key, config)
        with try_lock(directory, shared=True) as free:
            if not free:  # the task waits for it
                return "another process builds or removes it"
            problem = artifact_problem(key, config)
            if problem is None:
                mark_used(directory)
        return problem


def stage_task(
    name: str,
    key_of: KeyFunction,
    *,
    check: Callable[..., str | None] | None = None,
    directory_of: Callable[..., Path] | None = None,
    retry_condition: RetryCondition | None = None,
) -> Callable[[Callable[..., Result]], Task[..., Result]]:
    """Build the Prefect task of a stage, which returns a StageResult or its own final state.

    `key_of`, `check` and `directory_of` take the same arguments as the stage itself, see
    `ArtifactPolicy`.

    A retryable failure is retried `launch.retries` times or, if the stage passes its own condition
    `retry_condition`, as often as the condition allows.
    """
    return prefect_task(
        name=name,
        task_run_name=name + "-{config.name}",
        cache_policy=ArtifactPolicy(key_of, check, directory_of),
        persist_result=True,
        result_serializer="json",
        retries=CountedRetries(0) if retry_condition else 0,  # the flow sets the number
        retry_condition_fn=retry_condition or should_retry,
        tags={"megacore"},
    )


def should_retry(task: Any, task_run: Any, state: State[Any]) -> bool:
    """Return True if a retry may succeed: after a lost rank or connection, not a wrong value."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, OSError):
        error = access_error(error) or error
    if isinstance(error, MegacoreError):
        return error.retryable
    return isinstance(error, (ConnectionError, TimeoutError))


def holder_name() -> str:
    """Return the name under which the current flow run holds locks."""
    name = flow_run.get_name()
    return f"flow run {name!r}" if name else ""


def build(
    config: FlowConfig,
    key: StageKey,
    function: Callable[[Path], dict[str, Any]],
    *,
    writes: Callable[[], int] | None = None,
) -> StageResult:
    """Build the stage's artifact, or use the one that another run has completed.

    `function` fills an empty directory and returns counts. `writes` returns about how many bytes
    it writes, if that is known. Raises WorkspaceError, also if there is no room for them.
    """
    folder = Workspace.of().folder(key.stage)
    log = get_run_logger()

    def fill(directory: Path) -> dict[str, Any]:
        if writes is not None:
            require_space(folder, writes(), f"{key.stage} writes about")
        return function(directory)

    artifact, ran = build_artifact(
        folder,
        key,
        fill,
        verify=depth_of(config.verify),
        holder=holder_name(),
        on_wait=log.info,
    )
    log.info(
        "%s %s %s: %s",
        key.stage,
        "built" if ran else "found",
        artifact.path,
        summarize(artifact.counts),
    )
    return StageResult(artifact=artifact, ran=ran)


def build_in_shards(
    config: FlowConfig,
    key: StageKey,
    fill: Callable[[Path, Path], dict[str, Any]],
    writes: Callable[[], int] | None = None,
) -> StageResult:
    """Build an artifact with a directory of intermediate files, in which a later attempt goes on.

    Its name is that of a temporary, which `megacore clean` removes while nobody holds the lock.
    """
    owner = Workspace.of().folder(key.stage) / f"{key.key}.work"
    work = owner.with_name(f"{owner.name}.tmp-shards")
    with workspace_errors(owner.parent):
        owner.parent.mkdir(parents=True, exist_ok=True)
        with lock(owner, on_wait=get_run_logger().info):
            result = build(config, key, lambda directory: fill(directory, work), writes=writes)
            if exists(work):
                shutil.rmtree(work)
    return result


def fresh_scratch(run_directory: Path, name: str) -> Path:
    """Create an empty directory for the job file, log and exit reasons of one artifact's stage."""
    scratch = run_directory / "jobs" / name
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    return scratch


def summarize(counts: dict[str, Any]) -> str:
    """Return the numbers and names among the counts as one line of text."""
    parts = []
    for name, value in counts.items():
        label = name.replace("_", " ")
        if isinstance(value, dict) and "samples" in value:
            parts.append(counted(value["samples"], f"{label} sample"))
        if isinstance(value, (bool, dict)) or value is None:
            continue
        if isinstance(value, list):
            parts.append(_counted(len(value), label))
        elif isinstance(value, int):  # "1,786 documents", but "eod id 0"
            parts.append(_counted(value, label) if label.endswith("s") else f"{label} {value:,}")
        elif isinstance(value, float):
            parts.append(f"{label} {value:.4g}")
        else:
            parts.append(f"{label} {value}")
    return ", ".join(parts)


def _counted(number: int, nouns: str) -> str:
    """Return a number with its nouns, of which one is in the singular: "1 removed copy"."""
    if number == 1:
        nouns = re.sub("(?<!s)s$", "", re.sub("ies$", "ys", nouns))
    return f"{number:,} {nouns}"
