"""The command `megacore`: one module per group of commands."""

import sys

import typer

from megacore.cli.plan import plan
from megacore.cli.workspace import clean, runs
from megacore.errors import MegacoreError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Pretraining of large language models.")


@app.callback()
def options() -> None:
    """Pretraining of large language models: the data's tools, and what a workspace holds."""


for command in (runs, clean, plan):
    app.command()(command)


def main() -> None:
    """Entry point: a user's error is one sentence and an exit code."""
    try:
        app(standalone_mode=True)
    except MegacoreError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(error.exit_code) from None
