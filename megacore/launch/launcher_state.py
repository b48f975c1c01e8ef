"""Where a scheduler's job stands, in a small file beside the ranks' reasons.

Ranks that wait for machines do not stall.

Whoever follows the job writes it, whoever supervises reads it: while it says queued, no rank has to
make progress. Without the file the job runs, as one does that no scheduler holds back. Imports no
torch.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from megacore.artifact.files import read_record, workspace_errors, write_json

State = Literal["queued", "running"]

_NAME = "launcher_state.json"


@dataclass(frozen=True)
class LauncherState:
    """What the scheduler does with the job."""

    state: State
    """queued: it waits for machines, for the first time or after it was preempted; running: it has
    them."""
    detail: str
    """The scheduler's own words, as `PENDING (Resources)`."""
    time: float
    """Unix time of the change, in seconds."""


def launcher_state_path(exit_directory: Path) -> Path:
    """Where the state lies."""
    return exit_directory / _NAME


def write_launcher_state(exit_directory: Path, state: State, detail: str) -> None:
    """Replace the state, atomically.

    Args:
        exit_directory: the job's, which is made.
        state: queued or running.
        detail: the scheduler's words.

    Raises:
        WorkspaceError: the file cannot be written.
    """
    path = launcher_state_path(exit_directory)
    with workspace_errors(path):
        exit_directory.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(LauncherState(state, detail, time.time())))


def read_launcher_state(exit_directory: Path) -> LauncherState | None:
    """The state; None where no scheduler has said anything, or its file is torn."""
    noted = read_record(launcher_state_path(exit_directory), LauncherState)
    return noted if noted is not None and noted.state in get_args(State) else None


def forget_launcher_state(exit_directory: Path) -> None:
    """Remove the state of an earlier attempt, which would be taken for this one's.

    Raises:
        WorkspaceError: the file cannot be removed.
    """
    path = launcher_state_path(exit_directory)
    with workspace_errors(path):
        path.unlink(missing_ok=True)
