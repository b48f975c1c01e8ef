"""Interface between the follower and a scheduler, with the scheduler's commands and templates."""

import json
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from jinja2 import Environment, StrictUndefined, TemplateError

from megacore.artifact.files import read_record, workspace_errors, write_json
from megacore.cluster.batch.spec import BatchSpec
from megacore.config.launch import LaunchConfig
from megacore.errors import ConfigError, LaunchError, MegacoreError
from megacore.launch.guard import ignore_stops
from megacore.launch.watch import State
from megacore.paths import is_file

TIMEOUT = 60.0
"""Seconds for a command to answer; the scheduler may be busy."""
TIMED_OUT = 124
_TICK = 0.25
"""Seconds between two checks whether this process must end."""
TEMPLATES = Path(__file__).resolve().parent / "templates"
_PREFERENCES = ("SLURM_CLUSTERS", "SQUEUE_", "SCANCEL_", "SINFO_", "SACCT_")
"""Beginnings of variables with a user's preferences for Slurm's programs.

They could hide a job, spare it, or ask before its end.
"""


@dataclass(frozen=True)
class End:
    """End of a batch job."""

    code: int
    """Exit code of the job."""
    error: MegacoreError | None = None
    """Reason why the scheduler ended the job; None if the job's processes give the reason."""
    outranks_stop: bool = False
    """True if the error counts even if ranks say that they saved and stopped: a user ended the job,
    so it must not start again, or a node failed."""


@dataclass(frozen=True)
class Look:
    """State of a batch job at one moment."""

    state: State
    detail: str
    """State in the scheduler's own words."""
    end: End | None = None
    """End of the job; None before its end."""


@dataclass(frozen=True)
class Submission:
    """Record of a batch job's submission, written before the submission itself.

    With it a job without a follower can be found.
    """

    token: str
    """Random part of the job's name."""
    job: str | None
    """Id of the job at the scheduler; None before it is known."""

    @classmethod
    def new(cls) -> "Submission":
        """Return a submission with a new random token."""
        return cls(secrets.token_hex(4), None)

    @classmethod
    def read(cls, folder: Path) -> "Submission | None":
        """Read the submission in `folder`; return None if there is none."""
        return read_record(cls.path(folder), cls)

    @staticmethod
    def path(folder: Path) -> Path:
        """Return the path of the record in `folder`."""
        return folder / "submission.json"

    def write(self, folder: Path) -> None:
        """Write the record. Raises WorkspaceError."""
        with workspace_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(self.path(folder), asdict(self))

    def forget(self, folder: Path) -> None:
        """Remove the record after the end of the job."""
        self.path(folder).unlink(missing_ok=True)


class Scheduler(Protocol):
    """A batch job of one scheduler."""

    programs: ClassVar[tuple[str, ...]]
    """Programs of the scheduler that must be installed where the flow runs."""
    silence: str
    """Output of the scheduler's program when it did not answer the last time."""

    def __init__(self, spec: BatchSpec) -> None:
        """Keep the specification; nothing is submitted yet. Raises ConfigError."""

    @staticmethod
    def check(launch: LaunchConfig) -> None:
        """Raise ConfigError for an option that is missing or cannot be used."""

    def command(self) -> list[str]:
        """Return the command that submits the job."""

    def text(self, token: str) -> str:
        """Return the script or manifest of the submission `token`. Raises ConfigError."""

    def remove(self, earlier: Submission) -> None:
        """End a job that an earlier follower submitted, and wait for its end.

        Raises LaunchError.
        """

    def submit(self, submission: Submission, stopped: Callable[[], bool]) -> Submission:
        """Submit the job and return the submission with the job's id.

        If `stopped` returns True, it is not submitted again. Raises LaunchError.
        """

    def look(self) -> Look | None:
        """Return the current state of the job; None if the scheduler does not answer."""

    def copy_output(self) -> None:
        """Copy the job's output since the last call to the output of this process."""

    def cancel(self, *, at_once: bool) -> None:
        """Cancel the job with SIGTERM or, with `at_once`, kill it."""

    def close(self) -> None:
        """Copy the last of the job's output and clean up."""


def run(
    command: Sequence[str],
    *,
    timeout: float = TIMEOUT,
    directory: str | None = None,
    env: Mapping[str, str] | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end; after `timeout` seconds it is killed and has the code TIMED_OUT.

    The command ignores SIGTERM. The guard sends that to all processes when the job must be
    cancelled, and commands like this one are needed to cancel it.

    Without `env` it gets the variables of this process, except preferences for Slurm's programs.

    Raises:
        LaunchError: the command is not installed.
    """
    if env is None:
        env = {
            name: value for name, value in os.environ.items() if not name.startswith(_PREFERENCES)
        }
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
            preexec_fn=ignore_stops,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(
            command, TIMED_OUT, "", f"no answer within {timeout:g} s"
        )
    except FileNotFoundError as error:
        raise LaunchError(
            f"{command[0]} is not installed here: run the flow where it is"
        ) from error


def pause(seconds: float, stopped: Callable[[], bool]) -> None:
    """Wait some seconds, or until `stopped` returns True."""
    end = time.monotonic() + seconds
    while not stopped() and (remaining := end - time.monotonic()) > 0:
        time.sleep(min(_TICK, remaining))


def one_line(done: "subprocess.CompletedProcess[str]") -> str:
    """Return the output of a failed command as one line."""
    return " ".join((done.stderr or done.stdout).split()) or f"code {done.returncode}"


def say(text: str) -> None:
    """Write a line with the time to standard output."""
    sys.stdout.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
    sys.stdout.flush()


def check_template(template: str | None, setting: str) -> None:
    """Raise ConfigError if the user's template, named by the option `setting`, is not a file."""
    if template is not None and not is_file(template):
        raise ConfigError(
            f"{setting} is {template!r}, and there is no such file: correct it, or set it to null"
        )


def render(template: str | None, default: str, setting: str, values: Mapping[str, Any]) -> str:
    """Fill the placeholders of a template and return its text.

    In addition to Jinja's filters there are `word`, which quotes a value for a shell or an #SBATCH
    line, `words`, which quotes each value of a list, and `json`, which formats any value for YAML.
    The template is the user's, named by the option `setting`, or the file `default` of TEMPLATES.

    Raises:
        ConfigError: the template cannot be read or filled, or a value is not printable.
        LaunchError: the package's template is not installed.
    """
    path = TEMPLATES / default if template is None else Path(template)
    # The result is not HTML, so there is no autoescape. The template is the user's script, so it
    # needs no sandbox.
    environment = Environment(
        undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True, autoescape=False
    )
    environment.filters |= {"word": _word, "words": _words, "json": json.dumps}
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
            f"{text!r} cannot be written into a batch script: remove what is not printable"
        )
    return shlex.quote(text)


def _words(values: list[object]) -> str:
    return " ".join(map(_word, values))
