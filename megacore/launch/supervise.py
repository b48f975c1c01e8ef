"""Running a launcher under the guard: nothing it started outlives this call, and its failure is a typed error."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from megacore.artifact.files import workspace_errors
from megacore.errors import LaunchError, MegacoreError, StageTimeoutError
from megacore.launch.failure import Attempt
from megacore.launch.guard import KILL_LIMIT, catches, descendants, end_all
from megacore.launch.kernel_oom import KillCounter, oom_kills
from megacore.launch.watch import RankWatch, Trouble

JOB_VARIABLE = "MEGACORE_JOB"
"""Every process of a job inherits this variable, whatever else it does to its session or its parent."""

_GUARD_MARGIN = KILL_LIMIT + 0.5


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
    stall_limit: float | None = None,
    ranks: int | None = None,
    count_oom_kills: Callable[[], int | None] = oom_kills,
) -> None:
    """Run `command` to its end under the guard, its output appended to `log`.

    `env` is added to this process's environment; `stop_grace`, `timeout` and `poll_interval` are seconds. `on_poll`
    is called at each interval and once after the end. Whatever is raised meanwhile (KeyboardInterrupt and an
    orchestrator's cancellation included) first ends every process of the job: SIGTERM, `stop_grace`, SIGKILL.

    A rank that keeps a heartbeat in `exit_directory` is watched: when it makes no progress for `stall_limit` seconds
    (None: however long that takes), or is gone and the job goes on without it, the ranks of this machine write their
    Python stacks, everything is killed at once, and a table of the `ranks` is written beside the log, as
    `<log>-ranks.txt`, and into it.

    SIGUSR1 is passed on to the ranks while this runs in the main thread. `count_oom_kills` tells how many processes
    the kernel has killed for want of memory.

    Raises:
        MegacoreError: the one that a rank wrote into `exit_directory`, TrainingStoppedError although nothing failed.
        RankStalledError: a rank made no progress.
        RankLostError: a rank died without a word.
        MemoryExhaustedError: the kernel killed it because memory ran out.
        StageTimeoutError: the command ran longer than `timeout`; names `timeout_setting`.
        LaunchError: `command` cannot be started.
    """
    executable = shutil.which(command[0])
    if executable is None:
        raise LaunchError(f"cannot start {command[0]}: no such executable file: install it or correct its path")
    _prepare(log, exit_directory)
    written = log.stat().st_size if log.exists() else 0
    attempt = Attempt(command[0], log, written, exit_directory, ranks, KillCounter(count_oom_kills))
    watch = RankWatch(exit_directory, stall_limit=stall_limit, ranks=ranks)
    started = time.monotonic()
    with _Notice() as notice, _guarded([executable, *command[1:]], log, env or {}, stop_grace) as guard:
        while (code := _poll(guard, poll_interval)) is None:
            notice.pass_on(guard.pid)
            on_poll()
            if trouble := watch.look():
                raise _end_at_once(guard.pid, attempt, trouble, stall_limit)
            if timeout is not None and time.monotonic() - started > timeout:
                raise StageTimeoutError(
                    f"{' '.join(command[-3:])} ran longer than {timeout_setting} = {timeout / 60:g} minutes and was "
                    f"ended: raise {timeout_setting}, or look for a hang in {log}"
                )
    on_poll()
    error = attempt.failed(code) if code != 0 else attempt.stopped()
    if error is not None:
        raise error


class _Notice:
    """SIGUSR1 on its way to the guard, which passes it on; of this process, it would be the end."""

    def __init__(self) -> None:
        self._pending = False
        self._before = signal.getsignal(signal.SIGUSR1)
        # A handler that C installed could not be put back.
        self._possible = threading.current_thread() is threading.main_thread() and self._before is not None

    def __enter__(self) -> "_Notice":
        if self._possible:
            signal.signal(signal.SIGUSR1, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        if self._possible:
            signal.signal(signal.SIGUSR1, self._before)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._pending = True

    def pass_on(self, guard: int) -> None:
        """Send what has come, as soon as the guard does not die of it."""
        if self._pending and catches(guard, signal.SIGUSR1):
            self._pending = False
            os.kill(guard, signal.SIGUSR1)


def _end_at_once(guard: int, attempt: Attempt, trouble: Trouble, stall_limit: float | None) -> MegacoreError:
    """Ask the ranks where they stand, kill them (stuck ones cannot save anything), and return what to raise."""
    states = attempt.states(stacks=True)
    end_all(lambda: descendants(guard), 0.0, reap=lambda: None)
    return attempt.troubled(trouble, stall_limit, states)


def _prepare(log: Path, exit_directory: Path) -> None:
    """Make the directories; what ranks of an earlier attempt left there would be taken for this one's."""
    with workspace_errors(exit_directory):
        exit_directory.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        for pattern in ("rank_*.json*", "rank_*.beat*", "rank_*.stack"):
            for old in exit_directory.glob(pattern):
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
