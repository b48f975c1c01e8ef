"""Compilation of DeepSpeed's operators before the ranks start, within a time limit.

The command

    python -m megacore.ranks.operators --config run.json

builds the operators that a job needs.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megacore.artifact.files import write_json
from megacore.engine.deepspeed.operators import (
    OPERATORS,
    REPORT_VARIABLE,
    Operator,
    build_operator,
    needed_operators,
    operator_is_built,
)
from megacore.errors import ERROR_TYPES, LaunchError, MegacoreError, StageTimeoutError
from megacore.jobs.run import TrainJob
from megacore.launch.exit_reason import read_reasons, reported_exit
from megacore.launch.supervise import supervise

REPORT = "operators.json"
"""Name of the file, next to the job file, that maps each operator to its build error or null."""

_log = logging.getLogger(__name__)


def prepare_operators(
    job: TrainJob, job_file: Path, log: Path, on_poll: Callable[[], None]
) -> dict[str, str]:
    """Build the operators that the job's ranks load.

    Returns:
        Environment variables that point the ranks to the report of the builds.

    Raises:
        LaunchError: an operator that the run requires cannot be built.
        StageTimeoutError: the build of an operator that the run requires took too long.
    """
    needed = needed_operators(job.config)
    if not needed:
        return {}
    report: dict[str, str | None] = {}
    for name in needed:
        report[name] = None
        if operator_is_built(name):
            continue
        try:
            _build(name, job, job_file, log, on_poll)
        except LaunchError as error:
            if name != "cpu_adam" or job.config.deepspeed.cpu_adam != "auto":
                raise
            _log.warning("%s; torch's Adam is used", error)
            report[name] = str(error)
    path = job_file.with_name(REPORT)
    write_json(path, report)
    return {REPORT_VARIABLE: str(path.absolute())}


def _build(
    name: Operator, job: TrainJob, job_file: Path, log: Path, on_poll: Callable[[], None]
) -> None:
    seconds, exit_directory = job.config.deepspeed.build_timeout, Path(job.exit_directory)
    module = "megacore.ranks.operators"
    try:
        supervise(
            [sys.executable, "-m", module, "--config", str(job_file), "--operator", name],
            log=log,
            exit_directory=exit_directory,
            stop_grace=1.0,
            timeout=seconds,
            on_poll=on_poll,
        )
    except StageTimeoutError as error:
        raise StageTimeoutError(
            f"DeepSpeed's operator {name} was not compiled within deepspeed.build_timeout = "
            f"{seconds:g} seconds: raise it, or look for a compiler that hangs in {log}"
        ) from error
    except MegacoreError as error:
        reasons = read_reasons(exit_directory)
        if not reasons:
            raise LaunchError(f"DeepSpeed's operator {name} cannot be compiled: {error}") from error
        # The message must not name a rank.
        raise ERROR_TYPES[reasons[0].error](reasons[0].message) from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the operators that a job needs, or one of them, and print their paths.

    A failure is written as an exit reason, like that of a rank.
    """
    parser = argparse.ArgumentParser(
        description="Compile the operators of DeepSpeed that a job needs."
    )
    parser.add_argument("--config", type=Path, required=True, help="the job, as JSON")
    parser.add_argument("--operator", choices=OPERATORS, help="build only this one")
    options = parser.parse_args(arguments)
    job = TrainJob.read(options.config)
    with reported_exit(Path(job.exit_directory), 0):
        for name in [options.operator] if options.operator else needed_operators(job.config):
            if not operator_is_built(name):
                sys.stdout.write(
                    f"compiling DeepSpeed's operator {name}, once for this machine: a minute or "
                    "more\n"
                )
                sys.stdout.flush()
            sys.stdout.write(f"{name} is in {build_operator(name)}\n")


if __name__ == "__main__":
    main()
