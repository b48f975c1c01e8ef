"""Dry run of a flow: the key of each stage and the state of its artifact."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import yaml
from prefect import Task
from prefect.artifacts import create_table_artifact
from rich.table import Table

from megacore.artifact import Artifact, open_artifact
from megacore.artifact.workspace import RUN_FILE
from megacore.cluster.start import dry_run_commands
from megacore.errors import MegacoreError
from megacore.jobs.run import RankJob
from megacore.redact import redact_values
from tasks._cache import ArtifactPolicy, StageResult, artifact_directory, artifact_problem
from tasks._flow_config import FlowConfig
from tasks._stage_runner import Config, Output, Share, StageRunner, store_config
from tasks.index import RunData

Result = TypeVar("Result")


class UnbuiltArtifact(Artifact):
    """Artifact that a stage would build. Only its name is known: that of the stage's row."""

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the artifact of the stage with this row."""
        return cls(stage=name, key="", path="", digest="", counts={})


@dataclass
class DryRun(StageRunner[Config]):
    """Runner that runs no stage: it computes keys, and looks up artifacts.

    A flow's functions take it in place of a StageRunner. What a missing artifact determines is an
    UnbuiltArtifact.
    """

    planned: list[dict[str, str]] = field(default_factory=list)
    """Rows of the table: stage, key, state and why it would run."""
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    """Artifacts that exist, by the names of the stages' rows."""

    def stage(self, task: Task[..., Any], *inputs: Any) -> Artifact:
        """Return the artifact of a stage, and add the stage's row."""
        return self._look_up(self._next_name(task.name), task, inputs)

    def stages(
        self,
        task: Task[..., Any],
        inputs: Sequence[tuple[Any, ...]],
        *,
        at_once: int = 1,
        share: Share | None = None,
    ) -> tuple[Artifact, ...]:
        """Return the artifacts of one stage for each of several inputs, and add their rows."""
        return tuple(self.stage(task, *each) for each in inputs)

    def checkpoint_stage(self, task: Task[..., Any], checkpoint: str, *inputs: Any) -> StageResult:
        """Return the artifact of a stage for one checkpoint, and add the stage's row."""
        artifact = self._look_up(f"{task.name} {checkpoint}", task, inputs)
        return StageResult(artifact=artifact, ran=False)

    def value(self, function: Callable[..., Result], *artifacts: Artifact) -> Result:
        """Return `function(config, *artifacts)`, or what is missing for it."""
        missing = next(_unbuilt(artifacts), None)
        return super().value(function, *artifacts) if missing is None else cast(Result, missing)

    def report(self, function: Callable[..., str | None], *artifacts: Artifact) -> None:
        """Report nothing."""

    def _look_up(self, name: str, task: Task[..., Any], inputs: tuple[Any, ...]) -> Artifact:
        missing = next(_unbuilt(inputs), None)
        if missing is not None:
            self._add(name, f"known after {missing.stage}", "new input")
            return UnbuiltArtifact.of(name)
        policy = task.cache_policy
        assert isinstance(policy, ArtifactPolicy), f"{task.name} is no stage"
        key, find, check = policy.key_of(self.config, *inputs), policy.directory_of, policy.check
        directory = find(self.config, *inputs) if find else artifact_directory(key)
        artifact: Artifact = UnbuiltArtifact.of(name)
        try:
            problem = check(self.config, *inputs) if check else artifact_problem(key, self.config)
            if problem is None:
                artifact = self.artifacts[name] = open_artifact(directory)
        except MegacoreError as error:
            problem = str(error)
        self._add(name, directory.name, problem)
        return artifact

    def _add(self, name: str, key: str, problem: str | None) -> None:
        state = "cached" if problem is None else "would run"
        self.planned.append({"stage": name, "key": key, "state": state, "why": problem or ""})


def _unbuilt(value: Any) -> Iterator[UnbuiltArtifact]:
    """Yield the artifacts among the inputs of a stage that do not exist."""
    match value:
        case UnbuiltArtifact():
            yield value
        case tuple():
            for each in value:
                yield from _unbuilt(each)
        case RunData():
            yield from _unbuilt((value.tokens, value.tokenizer, value.index))


def launch_lines(
    config: FlowConfig, module: str, directory: Path, ranks: int, threads: int
) -> list[str]:
    """Return the commands that start a run's ranks on each host, under a heading."""
    job = RankJob(exit_directory=str(directory / "exit"), ranks=ranks, threads_per_rank=threads)
    return ["launch:", *dry_run_commands(config.launch, module, job, directory / RUN_FILE)]


def show_config(config: FlowConfig) -> None:
    """Print the values that the files and overrides give, merged, and store all values."""
    store_config(config)
    values = redact_values(config.model_dump(mode="json", exclude_unset=True))
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    Output().print_text(f"configuration {config.name}, merged, without defaults:\n\n{text}")


def show_plan(
    name: str,
    rows: list[dict[str, str]],
    cost: str,
    refusal: MegacoreError | None,
    commands: Callable[[], list[str]],
    *,
    warning: str | None = None,
) -> None:
    """Print the table, store it as an artifact, and print the commands that would be started.

    `refusal`, which keeps the training from running here, is raised at the end, before `commands`
    is called. `cost` has a line for the training and one for its epochs.
    """
    create_table_artifact(
        rows, key="dry-run", description=f"what {name} would do; {'; '.join(cost.splitlines())}"
    )
    table = Table(title=f"dry run of {name}: nothing was started")
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    console = Output()
    console.print(table)
    console.print_text(cost)
    if warning is not None:
        console.print_text(f"warning: {warning}")
    if refusal is not None:
        raise refusal
    for line in commands():
        console.print_text(line)
