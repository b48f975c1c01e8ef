"""A dry run: each stage's key, and whether its artifact is there."""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from prefect.artifacts import create_table_artifact
from rich.console import Console
from rich.table import Table

from megacore.artifact import Artifact, StageKey, open_artifact
from megacore.errors import MegacoreError
from tasks._cache import artifact_directory, artifact_problem
from tasks._flow_config import FlowConfig


class PlannedStage(NamedTuple):
    """A line of the dry run."""

    name: str
    """The stage, numbered where there are several."""
    key_of: Callable[..., StageKey]
    inputs: tuple[str | tuple[str, ...] | None, ...] = ()
    """Names of the stages it reads, in the order of its task's arguments; None where it reads
    nothing."""
    problem: Callable[..., str | None] | None = None
    """Of the configuration and the artifacts: why it would run; None looks at the artifact of its
    key."""
    directory: Callable[..., Path] | None = None
    """Of the same: where its artifact lies; None means under its key."""

    @property
    def stage(self) -> str:
        """The stage's own name."""
        return self.name.partition(" ")[0]

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of all stages it reads."""
        groups = [(each,) if isinstance(each, str) else each or () for each in self.inputs]
        return tuple(itertools.chain.from_iterable(groups))


def planned_row(
    planned: PlannedStage, config: FlowConfig, known: dict[str, Artifact]
) -> dict[str, str]:
    """A line of the table; an artifact that is there is added to `known`, by the stage's name."""
    missing = [name for name in planned.reads if name not in known]
    if missing:
        return {
            "stage": planned.name,
            "key": f"known after {missing[0]}",
            "state": "would run",
            "why": "new input",
        }
    inputs: list[Any] = [
        tuple(known[name] for name in each)
        if isinstance(each, tuple)
        else known[each]
        if each
        else None
        for each in planned.inputs
    ]
    key = planned.key_of(config, *inputs)
    try:
        problem = (
            planned.problem(config, *inputs) if planned.problem else artifact_problem(key, config)
        )
        if problem is None:
            directory = (
                planned.directory(config, *inputs) if planned.directory else artifact_directory(key)
            )
            known[planned.name] = open_artifact(directory)
    except MegacoreError as error:
        problem = str(error)
    state = "cached" if problem is None else "would run"
    return {"stage": planned.name, "key": key.key, "state": state, "why": problem or ""}


def show_plan(
    name: str,
    rows: list[dict[str, str]],
    cost: str,
    refusal: MegacoreError | None,
    commands: Callable[[], list[str]],
) -> None:
    """Print the table, store it as an artifact, and say what would be started.

    Args:
        name: of the configuration.
        rows: of `planned_row`.
        cost: what the training would need, in one line.
        refusal: why it cannot run here; raised at the end.
        commands: what would start it, asked only where it can run.
    """
    create_table_artifact(rows, key="dry-run", description=f"what {name} would do; {cost}")
    table = Table(title=f"dry run of {name}: nothing was started")
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(cost, soft_wrap=True, highlight=False)
    if refusal is not None:
        raise refusal
    for line in commands():
        console.print(line, soft_wrap=True, highlight=False, markup=False)
