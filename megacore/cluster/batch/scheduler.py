"""What a follower asks of a scheduler; how its commands are run and its templates filled."""

import json
import secrets
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from jinja2 import Environment, StrictUndefined, TemplateError

from megacore.artifact.files import read_record, workspace_errors, write_json
from megacore.errors import ConfigError, LaunchError, MegacoreError
from megacore.launch.launcher_state import State

TIMEOUT = 60.0
"""Seconds in which a command must answer; the scheduler may be busy."""
TIMED_OUT = 124
TEMPLATES = Path(__file__).resolve().parent / "templates"


@dataclass(frozen=True)
class End:
    """How a batch job ended."""

    code: int
    """Its exit code."""
    error: MegacoreError | None = None
    """Why the scheduler ended it; None where its own processes say why."""
    on_request: bool = False
    """Whether somebody had it ended: that its ranks saved and stopped is no reason to start it
    again."""


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
    """Which batch job was submitted, noted before that happens.

    A job that nobody follows any more can be found.
    """

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
        return read_record(cls.path(folder), cls)

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
        """End a job that an earlier follower submitted, and wait for its end.

        Raises LaunchError.
        """

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


def run(
    command: Sequence[str],
    *,
    timeout: float = TIMEOUT,
    directory: str | None = None,
    env: Mapping[str, str] | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end; one that does not answer in time has code TIMED_OUT.

    It does not end with SIGTERM, which the guard sends to all processes of this run when the job is
    to be cancelled: this is how that is done.

    Raises:
        LaunchError: it is not installed.
    """
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            cwd=directory,
            env=env,
            preexec_fn=_ignore_stop,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(
            command, TIMED_OUT, "", f"no answer within {timeout:g} s"
        )
    except FileNotFoundError as error:
        raise LaunchError(
            f"{command[0]} is not installed here: run the flow where it is"
        ) from error


def one_line(done: "subprocess.CompletedProcess[str]") -> str:
    """What a command that failed said."""
    return " ".join((done.stderr or done.stdout).split()) or f"code {done.returncode}"


def _ignore_stop() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def render(template: str | None, default: str, setting: str, values: Mapping[str, Any]) -> str:
    """The text of a template with its placeholders filled.

    Besides Jinja's own filters there are `word`, which quotes a value for a shell or an #SBATCH
    line, `words`, which does so with each of a list, and `json`, in which form YAML takes any
    value.

    Args:
        template: a file of the user's; None takes `default` of this package.
        default: name of a file in megacore/cluster/batch/templates.
        setting: what names the user's file.
        values: what placeholders stand for.

    Raises:
        ConfigError: the file cannot be read or filled, or a value cannot stand in it.
        LaunchError: the package's own template is not installed.
    """
    path = TEMPLATES / default if template is None else Path(template)
    # No autoescape: the result is no HTML. A sandbox is not needed: the user's template is a script
    # of the user's.
    environment = Environment(
        undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True, autoescape=False
    )
    environment.filters |= {"word": _word, "words": _words, "json": _json}
    try:
        return environment.from_string(path.read_text(encoding="utf-8")).render(values)
    except OSError as error:
        if template is None:
            raise LaunchError(
                f"{path} is missing: install megacore again ({error.strerror})"
            ) from error
        raise ConfigError(f"{setting} is {path}, which cannot be read: {error.strerror}") from error
    except (TemplateError, UnicodeDecodeError) as error:
        line = getattr(error, "lineno", None)
        where = f"{path}, line {line}," if line else f"{path}"
        raise ConfigError(
            f"{where} cannot be filled: {error}: see megacore/cluster/batch/templates/{default} "
            "for what it may use"
        ) from error


def _word(value: object) -> str:
    text = str(value)
    if not text.isprintable():
        raise ConfigError(
            f"{text!r} cannot stand in a batch script: leave out what is not printable"
        )
    return shlex.quote(text)


def _words(values: list[object]) -> str:
    return " ".join(map(_word, values))


def _json(value: object) -> str:
    return json.dumps(value)
