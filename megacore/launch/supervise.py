"""Supervision of a launcher that runs under the guard.

No process of the launcher outlives the call of `supervise`. A failure raises a typed error.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from megacore.artifact.files import workspace_errors
from megacore.errors import LaunchError, MegacoreError, StageTimeoutError
from megacore.launch.exit_reason import LAUNCHER_REASON, remove_rank_files
from megacore.launch.failure import REPEATS, Attempt
from megacore.launch.guard import (
    JOB_VARIABLE,
    KILL_LIMIT,
    catches,
    descendants,
    end_all,
    guarded,
    host_mark,
    marked,
)
from megacore.launch.rank_table import REPORT, read_report
from megacore.launch.watch import (
    KillCounter,
    RankWatch,
    forget_launcher_state,
    oom_kills,
    read_launcher_state,
)
from megacore.paths import exists

_GUARD_MARGIN = KILL_LIMIT + 0.5
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOST_CODE = 255
"""Exit code of a guard that something else has reaped."""
_POLL_STEP = 0.05
"""Longest delay in seconds with which the guard's end is noticed."""
_REPORTED_END = 15.0
"""Time limit in seconds for a launcher that reported trouble to end its ranks on all hosts."""


def supervise(
    command: Sequence[str],
    *,
    log: Path,
    exit_directory: Path,
    env: Mapping[str, str] | None = None,
    stop_grace: float = 20.0,
    timeout: float | None = None,
    on_poll: Callable[[], None] = lambda: None,
    poll_interval: float = 0.2,
    stall_limit: float | None = None,
    ranks: int | None = None,
    hosts: Sequence[str] = (),
    stop_margin: float = 0.0,
    count_oom_kills: Callable[[], int | None] = oom_kills,
    inherited: Sequence[int] = (),
    again: str = REPEATS,
) -> None:
    """Run `command` to its end under the guard and append its output to `log`.

    Any exception in the meantime, including KeyboardInterrupt and an orchestrator's cancellation,
    first ends every process of the job: SIGTERM, `stop_grace`, SIGKILL.

    Each rank that writes a heartbeat to `exit_directory` is watched. If it makes no progress for
    `stall_limit` seconds, or if it is gone and the job continues without it, the ranks of this host
    write their Python stacks, all processes are killed at once, and a table of the ranks is written
    to the log and to `<log>-ranks.txt` next to it. For a job on several `hosts`, the command's
    agents do this on each host and report it in `exit_directory`. A scheduler's job
    (`launcher_state.json`) is cancelled by its follower, which gets SIGTERM; while the job is
    queued or ending, no rank is watched and no time is counted.

    If this runs in the main thread, SIGUSR1 is passed on to the ranks, and SIGINT, SIGTERM and
    SIGHUP are handled again if the exception of their handler was lost.

    Args:
        command: program and arguments.
        log: file that the output is appended to.
        exit_directory: directory of the ranks' reasons, heartbeats and stacks.
        env: variables added to this process's environment.
        stop_grace: seconds between SIGTERM and SIGKILL.
        timeout: longest run time in seconds (launch.timeout_minutes); None means no limit.
        on_poll: callback at each interval and once after the end.
        poll_interval: seconds between two polls.
        stall_limit: seconds without progress after which a rank is stalled; None means no limit.
        ranks: number of ranks; None if unknown.
        hosts: hosts of the job if there are several, otherwise empty.
        stop_margin: seconds that the command needs to stop, in addition to `stop_grace`.
        count_oom_kills: function that returns the number of out-of-memory kills so far.
        inherited: descriptors that the guard keeps open until the job has ended, such as that of a
            lock, which then outlives this process if it is killed.
        again: verb phrase on a retry of the command, for the advice in an error.

    Raises:
        MegacoreError: the error that a rank, or else the launcher, wrote to `exit_directory`;
            TrainingStoppedError if the training stopped on request.
        RankStalledError: a rank made no progress.
        RankLostError: a rank died without a reason.
        MemoryExhaustedError: the kernel killed a rank because memory ran out.
        StageTimeoutError: the command ran longer than `timeout`.
        LaunchError: `command` cannot be started.
        WorkspaceError: the log or `exit_directory` cannot be written.
    """
    executable = shutil.which(command[0])
    if executable is None:
        raise LaunchError(
            f"cannot start {command[0]}: no such executable file: install it or correct its path"
        )
    _prepare(log, exit_directory)
    written = log.stat().st_size if exists(log) else 0
    mark = secrets.token_hex(16)
    attempt = Attempt(
        command[0],
        log,
        written,
        exit_directory,
        ranks,
        KillCounter(count_oom_kills),
        tuple(hosts),
        mark=mark,
        again=again,
        stall_limit=stall_limit,
    )
    watch = RankWatch(exit_directory, stall_limit=stall_limit, ranks=ranks, elsewhere=bool(hosts))
    limit = _Limit(timeout, f"{' '.join(command[-3:])} ran longer than", log)
    variables = {**os.environ, **(env or {}), JOB_VARIABLE: mark}
    grace = stop_grace + stop_margin
    with _guarded([executable, *command[1:]], log, variables, grace, inherited) as guard:
        code = _until_the_end(guard, attempt, watch, limit, on_poll, poll_interval)
        _take_printed(guard, attempt)
    on_poll()
    if error := _verdict(attempt, code):
        raise error


@dataclass
class _Limit:
    """Time limit of a job."""

    seconds: float | None
    beginning: str
    """Beginning of the error message."""
    log: Path
    clock: Callable[[], float] = time.monotonic
    """Monotonic clock in seconds."""
    counted: float = 0.0
    """Seconds that count, until the last check."""

    def __post_init__(self) -> None:
        self._checked = self.clock()

    def check(self, *, counts: bool = True) -> None:
        """Count the time since the last check, if it `counts`.

        Raises StageTimeoutError if the limit is exceeded.
        """
        now = self.clock()
        self.counted += now - self._checked if counts else 0.0
        self._checked = now
        if self.seconds is not None and self.counted > self.seconds:
            raise StageTimeoutError(
                f"{self.beginning} launch.timeout_minutes = {self.seconds / 60:g} minutes and was "
                f"ended: raise launch.timeout_minutes, or look for a hang in {self.log}"
            )


def _until_the_end(
    guard: "subprocess.Popen[bytes]",
    attempt: Attempt,
    watch: RankWatch,
    limit: _Limit,
    on_poll: Callable[[], None],
    poll_interval: float,
) -> int | None:
    """Return the command's exit code; None if it reported trouble and did not end in time."""
    with _Signals() as signals:
        while (code := _poll(guard, poll_interval)) is None:
            signals.handle_again()
            signals.pass_on(guard.pid)
            _take_printed(guard, attempt)
            attempt.kills.look()
            on_poll()
            if attempt.hosts and read_report(attempt.exit_directory):
                return _wait_for_end(guard, attempt, on_poll, poll_interval)
            state = read_launcher_state(attempt.exit_directory)
            waits = state is not None and state.state != "running"
            if waits:
                watch.hold()
            elif trouble := watch.look():
                states = attempt.states(stacks=True)
                if state is None:  # otherwise the follower needs time to cancel its batch job
                    # There is no grace period: stuck ranks cannot save anything.
                    end_all(lambda: descendants(guard.pid), 0.0, reap=lambda: None)
                raise attempt.troubled(trouble, states)
            limit.check(counts=not waits)
    return code


class _Signals:
    """Signals to this process while a job runs, if it runs in the main thread.

    SIGUSR1, which would kill this process, is forwarded to the guard, which passes it on to the
    ranks. Handlers of `_ENDING` raise an exception, which some libraries swallow, such as pydantic
    in a serializer: then the handler is called again.
    """

    def __init__(self) -> None:
        self._notified = False
        self._before = signal.getsignal(signal.SIGUSR1)
        self._main = threading.current_thread() is threading.main_thread()
        self._arrived: int | None = None
        self._ends: tuple[int, ...] = ()

    def __enter__(self) -> "_Signals":
        if not self._main:
            return self
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            # Inherited, and with it the kernel would drop the exit codes of all processes.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if self._before is not None:  # a handler that C code installed could not be restored
            signal.signal(signal.SIGUSR1, self._take)
        self._ends = os.pipe()
        for end in self._ends:
            os.set_blocking(end, False)
        earlier = signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
        if earlier == -1:
            self._arrived = self._ends[0]
        else:  # an event loop of this thread needs it
            signal.set_wakeup_fd(earlier)
        return self

    def __exit__(self, *error: object) -> None:
        if not self._main:
            return
        if self._before is not None:
            signal.signal(signal.SIGUSR1, self._before)
        if self._arrived is not None:
            signal.set_wakeup_fd(-1)
        for end in self._ends:
            os.close(end)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._notified = True

    def pass_on(self, guard: int) -> None:
        """Send SIGUSR1 to the guard once the guard has a handler for it."""
        if self._notified and catches(guard, signal.SIGUSR1):
            self._notified = False
            os.kill(guard, signal.SIGUSR1)

    def handle_again(self) -> None:
        """Call the handlers of signals that arrived but have not ended this process's wait."""
        if self._arrived is None:
            return
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._arrived, 4096):
                handler = signal.getsignal(number)
                if number in _ENDING and callable(handler):
                    handler(number, None)


def _wait_for_end(
    guard: "subprocess.Popen[bytes]",
    attempt: Attempt,
    on_poll: Callable[[], None],
    poll_interval: float,
) -> int | None:
    """Wait until the command has ended its ranks, for at most `_REPORTED_END` seconds."""
    deadline = time.monotonic() + _REPORTED_END
    while (code := _poll(guard, poll_interval)) is None and time.monotonic() < deadline:
        _take_printed(guard, attempt)
        on_poll()
    return code


def _verdict(attempt: Attempt, code: int | None) -> MegacoreError | None:
    """Return the error of a command that ended with `code` or whose agents reported trouble."""
    report = read_report(attempt.exit_directory) if attempt.hosts else None
    if report is not None:
        states = attempt.states(stacks=False, reported=report.states)
        return attempt.troubled(report.trouble, states)
    return attempt.stopped() if code == 0 else attempt.failed(-1 if code is None else code)


def _prepare(log: Path, exit_directory: Path) -> None:
    """Create the directories and remove the files of an earlier attempt.

    They would be taken for files of this attempt.
    """
    with workspace_errors(exit_directory):
        exit_directory.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        remove_rank_files(exit_directory, f"{LAUNCHER_REASON}*", f"{REPORT}*")
        forget_launcher_state(exit_directory)


@contextlib.contextmanager
def _guarded(
    command: list[str],
    log: Path,
    variables: Mapping[str, str],
    grace: float,
    inherited: Sequence[int],
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the guard with its command inside the block; end every process of the job after it.

    `variables` is the environment of the guard and its command, with the job's mark.
    """
    mark = variables[JOB_VARIABLE]
    guard = None
    try:
        with _appended(log) as output:
            guard = subprocess.Popen(
                guarded(command, grace, log),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,  # the guard sends exit reasons that no file takes
                stderr=output,
                # The terminal's Ctrl-C goes to this process, which then ends the guard.
                start_new_session=True,
                env=variables,
                pass_fds=inherited,  # the guard does not pass them on
            )
        assert guard.stdout is not None
        os.set_blocking(guard.stdout.fileno(), False)
        with guard.stdout:
            yield guard
    finally:
        if guard is not None:
            _stop(guard, grace)
        else:  # a signal handler's exception left Popen's constructor
            _await_environments()
        end_all(lambda: marked(mark, host_mark(mark, None)), 0.0, reap=lambda: None)


def _await_environments() -> None:
    """Wait until each child has an environment, which it lacks for a moment after exec."""
    limit = time.monotonic() + KILL_LIMIT
    while time.monotonic() < limit and any(map(_lacks_environment, descendants(os.getpid()))):
        time.sleep(0.01)


def _lacks_environment(pid: int) -> bool:
    try:
        return not Path("/proc", str(pid), "environ").read_bytes()
    except OSError:  # it ended, or is another user's
        return False


def _appended(log: Path) -> BinaryIO:
    """Open the log to append to it. Raises WorkspaceError and FileAccessError."""
    with workspace_errors(log):
        return open(log, "ab")


def _take_printed(guard: "subprocess.Popen[bytes]", attempt: Attempt) -> None:
    """Add to the attempt the reasons that the guard has sent so far."""
    assert guard.stdout is not None
    with contextlib.suppress(OSError):
        attempt.printed.extend(guard.stdout.read() or b"")


def _poll(guard: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    """Return the guard's exit code, or None if it runs for `seconds` more.

    `Popen.wait` is not used: a signal handler that raises an exception in it, as Prefect's for
    SIGTERM, can leave its lock taken, and then every later wait hangs.
    """
    deadline = time.monotonic() + seconds
    while guard.returncode is None:
        try:
            pid, status = os.waitpid(guard.pid, os.WNOHANG)
        except ChildProcessError:  # the code is lost, which must not look like success
            pid, status = guard.pid, _LOST_CODE << 8
        if pid:
            guard.returncode = os.waitstatus_to_exitcode(status)
        elif (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_STEP))
        else:
            break
    return guard.returncode


def _stop(guard: "subprocess.Popen[bytes]", grace: float) -> None:
    """Let the guard end the job; kill the guard if it does not end in time."""
    assert guard.stdin is not None
    guard.stdin.close()  # to the guard this looks as if its parent had died
    if _poll(guard, grace + _GUARD_MARGIN) is None:
        guard.kill()
        while _poll(guard, _GUARD_MARGIN) is None:
            pass
