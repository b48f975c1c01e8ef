"""The frame of every entry point that a launcher starts once per rank; imports no torch."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from megacore.errors import MegacoreError
from megacore.launch.exit_reason import die_with_parent, reported_exit
from megacore.launch.job import RankJob

J = TypeVar("J", bound=RankJob)


def run_rank(kind: type[J], work: Callable[[J], None], arguments: Sequence[str] | None = None) -> None:
    """Read the job of `--config`, do its work, and report why this rank ended if it fails.

    Args:
        kind: what the file holds.
        work: what this rank does.
        arguments: of the command line; None takes the process's own.
    """
    if sys.platform == "linux" and "RANK" in os.environ:
        die_with_parent()  # not when started by hand: then the parent is a shell
    parser = argparse.ArgumentParser(description=work.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="the job, as JSON")
    try:
        job = kind.read(parser.parse_args(arguments).config)
    except MegacoreError as error:
        parser.exit(error.exit_code, f"{error}\n")
    with reported_exit(Path(job.exit_directory), int(os.environ.get("RANK", "0"))):
        work(job)
    if "RANK" in os.environ:
        _leave()


def _leave() -> NoReturn:
    """End a rank that has done its work and written it, without the interpreter's teardown.

    torch's communication threads may abort that ("terminate called without an active exception"), and a finished
    rank would count as lost.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
