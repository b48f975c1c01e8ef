"""Running a scheduler's own commands."""

import signal
import subprocess
from collections.abc import Mapping, Sequence

from megacore.errors import LaunchError

TIMEOUT = 60.0
"""Seconds in which a command must answer; the scheduler may be busy."""
TIMED_OUT = 124


def run(
    command: Sequence[str],
    *,
    timeout: float = TIMEOUT,
    directory: str | None = None,
    env: Mapping[str, str] | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end; one that does not answer in time has code TIMED_OUT.

    It does not end with SIGTERM, which the guard sends to all processes of this run when the job is to be cancelled:
    this is how that is done.

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
        return subprocess.CompletedProcess(command, TIMED_OUT, "", f"no answer within {timeout:g} s")
    except FileNotFoundError as error:
        raise LaunchError(f"{command[0]} is not installed here: run the flow where it is") from error


def one_line(done: "subprocess.CompletedProcess[str]") -> str:
    """What a command that failed said."""
    return " ".join((done.stderr or done.stdout).split()) or f"code {done.returncode}"


def _ignore_stop() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
