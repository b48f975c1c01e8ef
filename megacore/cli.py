"""The command `megacore`."""

import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from megacore.artifact import Workspace
from megacore.errors import MegacoreError, WorkspaceError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Pretraining of large language models.")
WorkspaceOption = Annotated[
    Path | None, typer.Option("--workspace", help="root of everything that was produced (MEGACORE_WORKSPACE)")
]


@app.callback()
def options() -> None:
    """Pretraining of large language models: what a workspace holds, without a user interface."""


@app.command()
def runs(workspace: WorkspaceOption = None) -> None:
    """List the trainings of a workspace: step, perplexity, size and path."""
    from megacore.observe.runs import runs as list_runs

    rows = list_runs(_existing(workspace))
    if not rows:
        Console().print("no runs yet: start one with `make pretrain`")
        return
    table = Table()
    for column in ("name", "state", "step", "valid PPL", "test PPL", "size", "updated", "path"):
        table.add_column(column, overflow="fold", no_wrap=column != "path")
    for row in rows:
        table.add_row(
            row["name"] or "-",
            row["state"],
            f"{_number(row['iteration'])}/{_number(row['train_iters'])}",
            _number(row["valid_ppl"]),
            _number(row["test_ppl"]),
            f"{row['size_bytes'] / 2**20:,.1f} MiB",
            f"{datetime.fromtimestamp(row['updated']):%Y-%m-%d %H:%M}" if row["updated"] else "-",
            row["path"],
        )
    Console(width=None if sys.stdout.isatty() else 200).print(table)


@app.command()
def clean(
    workspace: WorkspaceOption = None,
    older_than: Annotated[
        float | None,
        typer.Option(min=0, help="also artifacts built this many days ago that no run or newer artifact needs"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would be removed")] = False,
) -> None:
    """Remove temporaries of processes that died and, when asked, old artifacts; trainings stay."""
    from megacore.artifact.clean import old_artifacts, remove, stale_temporaries

    place = _existing(workspace)
    items = stale_temporaries(place)
    if older_than is not None:
        items += old_artifacts(place, older_than)
    for item in items:
        Console().print(f"{item.path}: {item.reason}, {item.size / 2**20:.1f} MiB", soft_wrap=True)
    if not dry_run:
        remove(items)
    total = sum(item.size for item in items) / 2**20
    Console().print(f"{'would remove' if dry_run else 'removed'} {len(items)} items, {total:.1f} MiB")


@app.command()
def plan(
    conf: Annotated[str, typer.Argument(help="name in conf/, or path of a YAML file")],
    override: Annotated[
        list[str] | None, typer.Option("--override", "-o", help="key=value, as in parallel.pipeline_schedule=gpipe")
    ] = None,
    draw: Annotated[Path | None, typer.Option(help="write the schedule as a picture: FILE.svg or FILE.png")] = None,
) -> None:
    """Show how a configuration divides its model over stages, with memory and bubble, or draw its schedule."""
    from megacore.config import load_config
    from megacore.config.load import parse_overrides
    from megacore.plan import draw as pictures
    from megacore.plan.hardware import Hardware
    from megacore.plan.pipeline import plan_pipeline
    from megacore.plan.preflight import expected_vocab_size

    if draw is not None:
        pictures.check_drawable(draw)
    config = load_config(conf, parse_overrides(override or []))
    planned = plan_pipeline(config, expected_vocab_size(config), Hardware.detect())
    if draw is not None:
        pictures.draw(planned.timeline, draw, planned.name)
        Console().print(f"wrote {draw}", soft_wrap=True)
        return
    Console().print(planned.summary(), soft_wrap=True)
    Console(width=None if sys.stdout.isatty() else 200).print(planned.table())


def _existing(workspace: Path | None) -> Workspace:
    """The workspace to look at; one that was named must be there."""
    if workspace is not None and not workspace.is_dir():
        raise WorkspaceError(f"workspace {workspace} is no directory: correct --workspace")
    return Workspace.of(workspace)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}"


def main() -> None:
    """Entry point: a user's error is one sentence and an exit code."""
    try:
        app(standalone_mode=True)
    except MegacoreError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(error.exit_code) from None
