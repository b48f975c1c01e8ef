"""What a follower asks of a scheduler, whichever that is."""

import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from megacore.artifact.files import workspace_errors, write_json
from megacore.errors import MegacoreError
from megacore.launch.launcher_state import State


@dataclass(frozen=True)
class End:
    """How a batch job ended."""

    code: int
    """Its exit code."""
    error: MegacoreError | None = None
    """Why the scheduler ended it; None where its own processes say why."""
    on_request: bool = False
    """Whether somebody had it ended: that its ranks saved and stopped is no reason to start it again."""


@dataclass(frozen=True)
class Look:
    """Where a batch job stands."""

    state: State
    detail: str
    """The scheduler's own words."""
    end: End | None = None
    """Not None once it has ended."""


@dataclass(frozen=True)
class Submission:
    """Which batch job was submitted, noted before that happens: a job that nobody follows any more can be found."""

    token: str
    """Random, part of the job's name."""
    job: str | None
    """The scheduler's id; None while it is not known."""

    @classmethod
    def new(cls) -> "Submission":
        """One that nobody else has made."""
        return cls(secrets.token_hex(4), None)

    @classmethod
    def read(cls, folder: Path) -> "Submission | None":
        """The one noted in `folder`; None where there is none."""
        try:
            return cls(**json.loads(cls.path(folder).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    @staticmethod
    def path(folder: Path) -> Path:
        """Where it is noted."""
        return folder / "submission.json"

    def write(self, folder: Path) -> None:
        """Note it. Raises WorkspaceError."""
        with workspace_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(self.path(folder), asdict(self))

    def forget(self, folder: Path) -> None:
        """Remove the note: the job has ended."""
        self.path(folder).unlink(missing_ok=True)


class Scheduler(Protocol):
    """A batch job of one scheduler."""

    silence: str
    """What its program said when the scheduler did not answer the last time."""

    def remove(self, left: Submission) -> None:
        """End a job that an earlier follower submitted, and wait for its end. Raises LaunchError."""

    def submit(self, submission: Submission) -> Submission:
        """Submit the job; with its id. Raises LaunchError."""

    def look(self) -> Look | None:
        """Where the job stands; None where the scheduler does not answer."""

    def copy_output(self) -> None:
        """Bring what the job has said since the last time to this process's output."""

    def cancel(self, *, at_once: bool) -> None:
        """Have the job ended: asked to at first, killed with `at_once`."""

    def close(self) -> None:
        """Bring the last of its output, and leave nothing behind."""
