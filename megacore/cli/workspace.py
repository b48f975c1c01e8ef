"""`megacore runs`, `megacore stop` and `megacore clean`: commands on a workspace."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from megacore.artifact import Workspace
from megacore.artifact.files import workspace_errors
from megacore.artifact.workspace import workspace_root
from megacore.cli._terminal import write_line, write_table
from megacore.errors import ConfigError, WorkspaceError
from megacore.observe.logging import counted, short_number
from megacore.paths import is_dir, is_file

WorkspaceOption = Annotated[
    Path | None,
    typer.Option("--workspace", help="root directory of all artifacts (MEGACORE_WORKSPACE)"),
]


def runs(workspace: WorkspaceOption = None) -> None:
    """List the pretrainings and fine-tunings of a workspace.

    The table shows the step, perplexity or best metric, size and path of each.
    """
    from rich.table import Table

    from megacore.observe.runs import runs as list_runs

    place = _existing(workspace)
    rows = list_runs(place)
    if not rows:
        write_line(
            f"no runs yet in {place.root}: start one with `make pretrain` or `make finetune`"
        )
        return
    table = Table()
    for column in ("name", "state", "step", "valid PPL", "test PPL", "best", "size", "updated"):
        table.add_column(column, no_wrap=True)
    table.add_column("path")
    for row in rows:
        table.add_row(
            row["name"] or "-",
            row["state"],
            f"{_number(row['iteration'])}/{_number(row['train_iters'])}",
            _number(row["valid_ppl"]),
            _number(row["test_ppl"]),
            row["metric"] or "-",
            f"{row['size_bytes'] / 2**20:,.1f} MiB",
            f"{datetime.fromtimestamp(row['updated']):%Y-%m-%d %H:%M}" if row["updated"] else "-",
            row["path"],
        )
    write_table(table)


def stop(
    run: Annotated[
        str,
        typer.Argument(help="key or name of a run as `megacore runs` lists it, or its directory"),
    ],
    workspace: WorkspaceOption = None,
) -> None:
    """Ask a training to save a checkpoint after its current iteration and to end.

    The same command that started the training resumes it.
    """
    from megacore.artifact.workspace import RUN_FILE, STOP_FILE
    from megacore.observe.runs import find_run, is_training

    is_directory = is_file(Path(run) / RUN_FILE)
    directory = (
        Path(run).absolute()
        if is_directory
        else find_run(_existing(workspace), run, state="running")
    )
    if is_directory and not is_training(directory):
        raise ConfigError(f"nothing trains in {directory}: there is nothing to stop")
    file = directory / STOP_FILE
    with workspace_errors(file):
        file.touch()
    write_line(f"{directory} will save and end after its current iteration")


def clean(
    workspace: WorkspaceOption = None,
    older_than: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="also artifacts not used for this many days that no run or newer artifact needs",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only list what would be removed")
    ] = False,
) -> None:
    """Remove stale temporaries and, if requested, old artifacts; runs are never removed."""
    from megacore.checkpoint.retain import unnamed_saves
    from megacore.observe.clean import old_artifacts, old_downloads, remove, stale_temporaries

    place = _existing(workspace)
    items = stale_temporaries(place, unnamed_saves)
    if older_than is not None:
        items += old_artifacts(place, older_than) + old_downloads(place, older_than)
    for item in items:
        write_line(f"{item.path}: {item.reason}, {item.size / 2**20:.1f} MiB")
    removed = items if dry_run else remove(items)
    total = sum(item.size for item in removed) / 2**20
    used = len(items) - len(removed)
    kept = f"; {used} {'is' if used == 1 else 'are'} in use" if used else ""
    write_line(
        f"{'would remove' if dry_run else 'removed'} {counted(len(removed), 'item')}, "
        f"{total:.1f} MiB{kept}"
    )


def _existing(workspace: Path | None) -> Workspace:
    """Return the workspace, which is not created; one given explicitly must exist."""
    if workspace is not None and not is_dir(workspace):
        raise WorkspaceError(f"workspace {workspace} is no directory: correct --workspace")
    return Workspace(workspace_root() if workspace is None else workspace.absolute())


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return short_number(value)
