"""The command line `megacore`: one module per group of commands."""

import logging
import os
import signal
import sys
from types import FrameType
from typing import Annotated, NoReturn

import typer

from megacore import __version__
from megacore.artifact.files import access_error
from megacore.artifact.workspace import require_working_directory
from megacore.cli._options import Command
from megacore.cli.adopt import adopt
from megacore.cli.compare import compare
from megacore.cli.convert import export, import_
from megacore.cli.curate import CurateCommand, curate
from megacore.cli.doctor import doctor
from megacore.cli.index import IndexCommand, index
from megacore.cli.init import init
from megacore.cli.inspect import inspect, verify
from megacore.cli.models import evaluate, generate
from megacore.cli.plan import plan
from megacore.cli.tokenize import TokenizeCommand, tokenize
from megacore.cli.workspace import clean, runs, stop
from megacore.errors import MegacoreError
from megacore.observe.logging import flush_output, output_fault, prepare_output

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    # Commands inherit it.
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(requested: bool) -> None:
    if requested:
        sys.stdout.write(f"megacore {__version__}\n")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """Pretraining of large language models: data tools, model tools and the workspace."""


for command in (
    init,
    adopt,
    runs,
    stop,
    clean,
    plan,
    doctor,
    inspect,
    verify,
    compare,
    generate,
    evaluate,
):
    app.command(cls=Command)(command)
app.command("import", cls=Command)(import_)
app.command(cls=Command)(export)
app.command(cls=CurateCommand)(curate)
app.command(cls=TokenizeCommand)(tokenize)
app.command(cls=IndexCommand)(index)


def main() -> None:
    """Run the command line, and report a MegacoreError as one sentence and an exit code."""
    prepare_output()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        require_working_directory()
        app(standalone_mode=True)
    except MegacoreError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        fault = access_error(error) or output_fault(error)
        if fault is None:
            raise
        flush_output()
        sys.stderr.write(f"error: {fault}\n")
        raise SystemExit(getattr(fault, "exit_code", 1)) from None
    except MemoryError as error:
        sys.stderr.write(f"error: this machine's memory does not suffice ({error}): ask for less\n")
        raise SystemExit(1) from None
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        _leave()


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """Exit on a signal as on an error, so that unfinished output is removed."""
    raise SystemExit(128 + number)


def _leave() -> NoReturn:
    """End a successful command at once.

    Freeing vocabularies and their caches would take 0.2 s.
    """
    logging.shutdown()
    problem = flush_output()
    if problem is not None:
        sys.stderr.write(f"error: {problem}\n")
    sys.stderr.flush()
    os._exit(0 if problem is None else 1)
