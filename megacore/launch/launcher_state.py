"""State of a scheduler's job, in a small file next to the ranks' reasons.

The process that follows the job writes the file and the supervisor reads it. While the state is
queued, the ranks wait for hosts and are not expected to make progress. Without the file, and so
without a scheduler, the job counts as running. Imports no torch.
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
    """State of a job according to its scheduler."""

    state: State
    """State of the job: queued (it waits for hosts, at first or after preemption) or running."""
    detail: str
    """State in the scheduler's own words, such as `PENDING (Resources)`."""
    time: float
    """Unix time of the change, in seconds."""


def launcher_state_path(exit_directory: Path) -> Path:
    """Return the path of the state file."""
    return exit_directory / _NAME


def write_launcher_state(exit_directory: Path, state: State, detail: str) -> None:
    """Replace the state atomically.

    Args:
        exit_directory: the job's exit directory; created if it does not exist.
        state: queued or running.
        detail: state in the scheduler's own words.

    Raises:
        WorkspaceError: the file cannot be written.
    """
    path = launcher_state_path(exit_directory)
    with workspace_errors(path):
        exit_directory.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(LauncherState(state, detail, time.time())))


def read_launcher_state(exit_directory: Path) -> LauncherState | None:
    """Return the state; None if no scheduler has reported one or the file is torn."""
    record = read_record(launcher_state_path(exit_directory), LauncherState)
    return record if record is not None and record.state in get_args(State) else None


def forget_launcher_state(exit_directory: Path) -> None:
    """Remove the state of an earlier attempt, which must not count for this one.

    Raises:
        WorkspaceError: the file cannot be removed.
    """
    path = launcher_state_path(exit_directory)
    with workspace_errors(path):
        path.unlink(missing_ok=True)
