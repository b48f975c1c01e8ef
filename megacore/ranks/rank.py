"""Common part of the entry points that a launcher starts once per rank.

This module does not import torch.
"""

import argparse
import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from megacore.artifact.files import workspace_errors
from megacore.errors import ConfigError, MegacoreError
from megacore.jobs.run import RankJob
from megacore.launch.exit_reason import die_with_parent, reported_exit
from megacore.observe.heartbeat import Heartbeat, beat_path, stack_path

J = TypeVar("J", bound=RankJob)
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Variables that transformers reads on import, so that it does not use the network."""


def run_rank(
    kind: type[J], work: Callable[[J], None], arguments: Sequence[str] | None = None
) -> None:
    """Read the job of `--config` and do this rank's work; write an exit reason if it fails.

    Args:
        kind: class of the job.
        work: function that does the work of this rank; its docstring is the command's help.
        arguments: command line arguments; None means those of the process.
    """
    if sys.platform == "linux" and "RANK" in os.environ:
        die_with_parent()  # not if started by hand, when the parent is a shell
    parser = argparse.ArgumentParser(
        description=work.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="the job, as JSON")
    parser.add_argument(
        "--local_rank",
        "--local-rank",
        type=int,
        metavar="N",
        help=(
            "this rank's number on its machine, as DeepSpeed's and PyTorch's older launchers pass "
            "it; replaces the variable LOCAL_RANK where a launcher sets none, and must agree "
            "with it where one does"
        ),
    )
    options = parser.parse_args(arguments)
    try:
        _take_local_rank(options.local_rank)
        job = kind.read(options.config)
    except MegacoreError as error:
        parser.exit(error.exit_code, f"{error}\n")
    rank = int(os.environ.get("RANK", "0"))
    for name, value in gpu_variables(job, os.environ).items():
        os.environ[name] = value
    try:
        with reported_exit(Path(job.exit_directory), rank):
            with workspace_errors(job.trace_prefix):
                job.trace_prefix.parent.mkdir(parents=True, exist_ok=True)
            write_stacks_on_signal(Path(job.exit_directory), rank)
            work(job)
    except SystemExit as end:
        if "RANK" in os.environ and isinstance(end.code, int):
            _leave(end.code)
        raise
    if "RANK" in os.environ:
        _leave(0)


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """Import the modules of a rank in the body without searching them for garbage.

    They stay until the process ends, so later searches leave them out, too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def gpu_variables(job: RankJob, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch reads when it starts on a GPU and that the user has not set.

    - Memory segments that grow, so that micro batches of different sizes do not fragment it.
    - A record of the last NCCL collectives, written to `trace_prefix` if one fails or times out.
    """
    variables = {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(job.trace_prefix),
    }
    if "PYTORCH_ALLOC_CONF" not in environment:  # the newer name, which torch reads second
        variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" in environment:  # the older name
        del variables["TORCH_FR_DUMP_TEMP_FILE"]
    return {name: value for name, value in variables.items() if name not in environment}


def write_stacks_on_signal(directory: Path, rank: int) -> None:
    """Register SIGUSR2 to write the Python stacks of all threads to `rank_<rank>.stack`.

    This also works while the rank is stuck in C code. Raises WorkspaceError.
    """
    path = stack_path(directory, rank)
    with workspace_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115  stays open until the process ends
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def require_one_rank(job: RankJob, what: str) -> None:
    """Raise ConfigError if a job that one process does, `what`, asks for more."""
    if job.ranks != 1:
        raise ConfigError(f"{what} was asked to run on {job.ranks} ranks: it takes 1")


def begin_heartbeat(job: RankJob) -> Heartbeat:
    """Start this rank's heartbeat in the job's `exit_directory`, where the supervisor reads it.

    Raises WorkspaceError.
    """
    path = beat_path(Path(job.exit_directory), int(os.environ.get("RANK", "0")))
    with workspace_errors(path):
        return Heartbeat(path)


def _take_local_rank(local_rank: int | None) -> None:
    """Set LOCAL_RANK to the local rank of the command line.

    Raises:
        ConfigError: LOCAL_RANK is set to another number; two ranks would share a GPU.
    """
    if local_rank is None:
        return
    if local_rank < 0:
        raise ConfigError(f"--local_rank is {local_rank}: ranks of a machine are counted from 0")
    current = os.environ.setdefault("LOCAL_RANK", str(local_rank))
    if current != str(local_rank):
        raise ConfigError(
            f"--local_rank is {local_rank} and the environment's LOCAL_RANK is {current}: unset "
            "LOCAL_RANK, or leave --local_rank out"
        )


def _leave(code: int) -> NoReturn:
    """End a rank whose work is over with an exit code, without the interpreter's teardown.

    torch's communication threads may abort the teardown ("terminate called without an active
    exception"), and a finished rank would then count as lost. That of a failed rank may wait
    forever, for a collective that no other rank joins or a thread that writes to a hung disk, and
    all other ranks would wait for its end.
    """
    with contextlib.suppress(OSError):  # they may be files on a full disk
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
