"""Running a launcher under the guard: nothing it started outlives this call, and its failure is a typed error."""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from megacore.artifact.files import workspace_errors
from megacore.errors import LaunchError, MegacoreError, RankLostError, StageTimeoutError
from megacore.launch.exit_reason import ExitReason, read_reasons
from megacore.launch.guard import KILL_LIMIT, NOT_EXECUTABLE, NOT_FOUND, end_all

JOB_VARIABLE = "MEGACORE_JOB"
"""Every process of a job inherits this variable, whatever else it does to its session or its parent."""

_GUARD_MARGIN = KILL_LIMIT + 0.5
_LOG_BYTES = 65536
_LOG_LINES = 5
_ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\):.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.S)
_DEEPSPEED_CAUSE = re.compile(r"exits with return code = (-?\d+)")
"""What DeepSpeed's launcher says of the first rank that failed, without naming it."""
_LAUNCHERS_OWN = re.compile(
    r"^[WE]\d{4} .*torch/distributed/elastic/|^(?:\S+: )?\[[^]]*\] \[[A-Z]+\] \[launch\.py:|^pdsh@", re.M
)
"""Where a launcher's account of the failure begins, which says less than the ranks' last lines."""
_PORT_IN_USE = re.compile(r"(?:EADDRINUSE|address already in use)", re.I)
_PORT = re.compile(r"port:? (\d+)")


def supervise(
    command: Sequence[str],
    *,
    log: Path,
    exit_directory: Path,
    env: Mapping[str, str] | None = None,
    stop_grace: float = 20.0,
    timeout: float | None = None,
    timeout_setting: str = "launch.timeout_minutes",
    on_poll: Callable[[], None] = lambda: None,
    poll_interval: float = 0.2,
) -> None:
    """Run `command` to its end under the guard, its output appended to `log`.

    `env` is added to this process's environment; `stop_grace`, `timeout` and `poll_interval` are seconds. `on_poll`
    is called at each interval and once after the end. Whatever is raised meanwhile (KeyboardInterrupt and an
    orchestrator's cancellation included) first ends every process of the job: SIGTERM, `stop_grace`, SIGKILL.

    Raises the error that a rank wrote into `exit_directory`; RankLostError when one died without a word;
    StageTimeoutError after `timeout`, naming `timeout_setting`; LaunchError when `command` cannot be started.
    """
    executable = shutil.which(command[0])
    if executable is None:
        raise LaunchError(f"cannot start {command[0]}: no such executable file: install it or correct its path")
    _prepare(log, exit_directory)
    written = log.stat().st_size if log.exists() else 0
    started = time.monotonic()
    with _guarded([executable, *command[1:]], log, env or {}, stop_grace) as guard:
        while (code := _poll(guard, poll_interval)) is None:
            on_poll()
            if timeout is not None and time.monotonic() - started > timeout:
                raise StageTimeoutError(
                    f"{' '.join(command[-3:])} ran longer than {timeout_setting} = {timeout / 60:g} minutes and was "
                    f"ended: raise {timeout_setting}, or look for a hang in {log}"
                )
    on_poll()
    if code != 0:
        raise _failure(command[0], code, log, written, read_reasons(exit_directory))


def _prepare(log: Path, exit_directory: Path) -> None:
    """Make the directories; reasons of an earlier attempt would be taken for this one's."""
    with workspace_errors(exit_directory):
        exit_directory.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        for old in exit_directory.glob("rank_*.json*"):
            old.unlink()


@contextlib.contextmanager
def _guarded(
    command: list[str], log: Path, env: Mapping[str, str], grace: float
) -> Iterator["subprocess.Popen[bytes]"]:
    """The guard with its command running inside the block; after it nothing of the job is left."""
    mark = secrets.token_hex(16)
    with open(log, "ab") as output:
        guard = subprocess.Popen(
            [sys.executable, "-m", "megacore.launch.guard", f"--log={log}", f"--grace={grace}", "--", *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,  # the terminal's Ctrl-C is for us; the guard learns of it from us
            env={**os.environ, **env, JOB_VARIABLE: mark},
        )
    try:
        yield guard
    finally:
        _stop(guard, grace)
        end_all(lambda: _marked(mark), 0.0, reap=lambda: None)


def _poll(guard: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    try:
        return guard.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None


def _stop(guard: "subprocess.Popen[bytes]", grace: float) -> None:
    """Let the guard end the job, then the guard itself if it does not."""
    assert guard.stdin is not None
    guard.stdin.close()  # the guard reads this as our death
    try:
        guard.wait(timeout=grace + _GUARD_MARGIN)
    except subprocess.TimeoutExpired:
        guard.kill()
        guard.wait()


def _marked(mark: str) -> list[int]:
    """Ids of the live processes that carry the job's mark in their environment."""
    needle = f"{JOB_VARIABLE}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it ended, or is another user's
                if needle in Path("/proc", name, "environ").read_bytes():
                    found.append(int(name))
    return found


def _failure(program: str, code: int, log: Path, written: int, reasons: list[ExitReason]) -> MegacoreError:
    """The typed error for a command that ended with `code`."""
    text = _tail(log, written)
    if code in {NOT_FOUND, NOT_EXECUTABLE} and not reasons:
        return LaunchError(f"cannot start {program} (exit code {code}): {_last_lines(text)}; the log is {log}")
    lost_rank, lost_code = _first_to_fail(text)
    silent = lost_rank is None or lost_rank not in {reason.rank for reason in reasons}
    if reasons and not (silent and lost_code is not None and lost_code < 0):
        return reasons[0].exception()
    if not reasons and _PORT_IN_USE.search(text):
        port = _PORT.search(text)
        return RankLostError(
            f"port {port[1] if port else 'of the rendezvous'} is in use by another process: end it, "
            f"or start again for another port; the log is {log}"
        )
    number = lost_code if lost_code is not None else code
    who = f"rank {lost_rank}" if lost_rank is not None else "the job" if lost_code is None else "a rank"
    return RankLostError(
        f"{who} {_ended(number)} without giving a reason; a retry resumes from the last complete checkpoint; "
        f"last lines of {log}: {_last_lines(text)}"
    )


def _first_to_fail(text: str) -> tuple[int | None, int | None]:
    """Rank and exit code of the first rank that failed, as far as the launcher's account of it says."""
    if root := _ROOT_CAUSE.search(text):
        return int(root[1]), int(root[2])
    cause = _DEEPSPEED_CAUSE.search(text)
    return None, int(cause[1]) if cause else None


def _ended(code: int) -> str:
    """How a process ended, from a negative signal number, a shell's 128 + n, or an exit code."""
    number = -code if code < 0 else code - 128
    if number <= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"exited with code {code}"
    hint = " (as the kernel does when memory runs out)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def _tail(log: Path, start: int) -> str:
    """What this attempt wrote last."""
    with open(log, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _LOG_BYTES))
        return file.read().decode("utf-8", errors="replace")


def _last_lines(text: str) -> str:
    own = _LAUNCHERS_OWN.search(text)
    said = text[: own.start()] if own and text[: own.start()].strip() else text
    lines = [line.strip() for line in said.splitlines() if line.strip(" =-*")]
    return " | ".join(lines[-_LOG_LINES:]) or "none"
