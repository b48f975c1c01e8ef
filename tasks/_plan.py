"""Dry run of a flow: the key of each stage and the state of its artifact."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from prefect.artifacts import create_table_artifact
from rich.table import Table

from megacore.artifact import Artifact, StageKey, open_artifact
from megacore.artifact.workspace import RUN_FILE
from megacore.cluster.start import dry_run_commands
from megacore.errors import MegacoreError
from megacore.jobs.run import RankJob
from megacore.redact import redact_values
from tasks._cache import artifact_directory, artifact_problem
from tasks._flow_config import FlowConfig
from tasks._stage_runner import Output, store_config
from tasks.index import RunData

Names = str | tuple[str, ...] | RunData[str] | None


class PlannedStage(NamedTuple):
    """One row of the dry run."""

    name: str
    """Name of the stage, numbered if it runs several times."""
    key_of: Callable[..., StageKey]
    inputs: tuple[Names, ...] = ()
    """Names of the stages whose artifacts it reads, in the order of its task's arguments; None for
    an argument without an artifact."""
    problem: Callable[..., str | None] | None = None
    """Function of the configuration and the input artifacts that returns why the stage would run;
    None checks the artifact of its key."""
    directory: Callable[..., Path] | None = None
    """Function of the same arguments that returns the artifact's directory; None means the
    directory of its key."""

    @property
    def stage(self) -> str:
        """Name of the stage without its number."""
        return self.name.partition(" ")[0]

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of all stages whose artifacts it reads."""
        return tuple(itertools.chain.from_iterable(map(_names, self.inputs)))


def _names(names: Names) -> tuple[str, ...]:
    if isinstance(names, RunData):
        return names.tokens, names.tokenizer, names.index
    return (names,) if isinstance(names, str) else names or ()


def planned_row(
    planned: PlannedStage, config: FlowConfig, artifacts: dict[str, Artifact]
) -> dict[str, str]:
    """Return a stage's row of the table; an existing artifact is added to `artifacts` by name."""
    missing = [name for name in planned.reads if name not in artifacts]
    if missing:
        return {
            "stage": planned.name,
            "key": f"known after {missing[0]}",
            "state": "would run",
            "why": "new input",
        }
    inputs: list[Any] = []
    for names in planned.inputs:
        several = [artifacts[name] for name in _names(names)]
        if isinstance(names, RunData):
            inputs.append(RunData(*several))
        else:
            inputs.append(tuple(several) if isinstance(names, tuple) else next(iter(several), None))
    key = planned.key_of(config, *inputs)
    directory = planned.directory(config, *inputs) if planned.directory else artifact_directory(key)
    try:
        problem = (
            planned.problem(config, *inputs) if planned.problem else artifact_problem(key, config)
        )
        if problem is None:
            artifacts[planned.name] = open_artifact(directory)
    except MegacoreError as error:
        problem = str(error)
    state = "cached" if problem is None else "would run"
    return {"stage": planned.name, "key": directory.name, "state": state, "why": problem or ""}


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
    Output().print(
        f"configuration {config.name}, merged, without defaults:\n\n{text}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


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
    console.print(cost, soft_wrap=True, highlight=False, markup=False)
    if warning is not None:
        console.print(f"warning: {warning}", soft_wrap=True, highlight=False, markup=False)
    if refusal is not None:
        raise refusal
    for line in commands():
        console.print(line, soft_wrap=True, highlight=False, markup=False)
