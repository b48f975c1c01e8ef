"""The process between a task and its ranks: it outlives the one and ends the others.

    python -m megacore.launch.guard [--log FILE] --grace SECONDS -- COMMAND …

torchrun puts every rank into a session of its own, so no signal to a group or a session reaches
them all. The guard is a subreaper: whatever its command starts stays its descendant, however it was
orphaned. It ends them all (SIGTERM, the grace, SIGKILL until none is left) when

* it gets SIGTERM, SIGINT or SIGHUP,
* its parent dies: stdin, a pipe whose other end only the parent holds, reaches its end, or the
  parent's id changes (a PR_SET_PDEATHSIG of its own would watch the parent's thread instead of the
  parent),
* the command itself ends and leaves something behind.

On SIGUSR1, by which a scheduler says that it will soon take the machine back, it ends nothing: it
passes the signal on, once, to each process below it that catches it, also to those that begin to
later, and waits for the command's end. All begin with the signal ignored: a scheduler may send it
to every process, and torchrun, which does not catch it, or a rank that still loads its packages
would die of it.

It exits with the command's code, 128 + n for signal n. When the guard itself is killed by SIGKILL,
the kernel kills the command (PR_SET_PDEATHSIG), and with it each rank that called
`exit_reason.die_with_parent`; the supervisor, if it still lives, kills whatever else carries the
job's mark in its environment.

On another machine it stands between ssh and the ranks of that machine: stdin ends with the
connection, whoever closed it.

All processes of a job inherit its mark, an environment variable. Only the standard library is
imported: the guard starts in tens of milliseconds.
"""

import argparse
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

JOB_VARIABLE = "MEGACORE_JOB"
"""Every process of a job inherits this variable, whatever else it does to its session or its
parent."""
KILL_LIMIT = 4.0
"""Seconds in which SIGKILL must have worked; a process in uninterruptible sleep is then left to the
kernel."""
NOT_FOUND = 127
NOT_EXECUTABLE = 126
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL = 0.05
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    """Run a command under guard; returns what to exit with."""
    parser = argparse.ArgumentParser(
        prog="megacore.launch.guard", description="Run a command and end all it starts."
    )
    parser.add_argument(
        "--log", help="file that gets the command's output, appended; else the guard's own output"
    )
    parser.add_argument(
        "--grace", type=float, required=True, help="seconds between SIGTERM and SIGKILL"
    )
    parser.add_argument("command", nargs="+", help="after --: the program and its arguments")
    options = parser.parse_args(arguments)
    stop = _StopRequest()
    prctl = _prctl()
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with open(options.log or sys.stdout.fileno(), "ab", closefd=options.log is not None) as log:
        try:
            child = _start(options.command, log.fileno(), prctl)
        except OSError as error:
            log.write(f"cannot start {options.command[0]}: {error.strerror}\n".encode())
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    code = _wait(child, stop, _Notice())
    left = end_all(lambda: descendants(os.getpid()), options.grace, reap=lambda: _reap(child))
    code = child.returncode if child.returncode is not None else code
    if left or code is None:
        return 128 + signal.SIGKILL
    return code if code >= 0 else 128 - code


class _StopRequest:
    """Whether the command is to be ended, or told that it soon will be.

    `wait` returns early when that changes.
    """

    def __init__(self) -> None:
        self.requested = False
        self.notice = False
        self._parent = os.getppid()
        self._watched = [0]
        self._wake, writer = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in _STOP_SIGNALS:
            signal.signal(number, self._request)
        signal.signal(signal.SIGUSR1, self._notify)
        signal.signal(signal.SIGCHLD, _ignore)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def _notify(self, number: int, frame: FrameType | None) -> None:
        self.notice = True

    def wait(self, seconds: float) -> None:
        ready, _, _ = select.select([self._wake, *self._watched], [], [], seconds)
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        if 0 in ready and os.read(0, 4096) == b"":
            self._watched = []
            self.requested = True
        if os.getppid() != self._parent:
            self.requested = True


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing, so that the wake-up descriptor is written."""


def _prctl() -> Callable[[int, int], None]:
    """The system call, looked up before any fork."""
    function = ctypes.CDLL(None, use_errno=True).prctl

    def call(option: int, value: int) -> None:
        if function(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")

    return call


def _start(
    command: list[str], output: int, prctl: Callable[[int, int], None]
) -> subprocess.Popen[bytes]:
    """The command in a session of its own.

    The kernel kills it if the guard dies first, and SIGUSR1 is ignored at first.
    """
    guard = os.getpid()

    def before_exec() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(128 + signal.SIGKILL)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=before_exec,
    )


class _Notice:
    """SIGUSR1, once to every process below this one that catches it."""

    def __init__(self) -> None:
        self._told: set[int] = set()

    def spread(self) -> None:
        for pid in descendants(os.getpid()):
            if pid not in self._told and catches(pid, signal.SIGUSR1):
                self._told.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal; one without would die of it, or ignores it."""
    try:
        status = Path("/proc", str(pid), "status").read_text(errors="replace")
    except OSError:  # it ended
        return False
    caught = next(
        (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0"
    )
    return bool(int(caught, 16) >> (number - 1) & 1)


def _wait(child: subprocess.Popen[bytes], stop: _StopRequest, notice: _Notice) -> int | None:
    """Until the command has ended or is to be ended; its code, or None."""
    while not stop.requested:
        _reap(child)
        if child.returncode is not None:
            return child.returncode
        if stop.notice:
            notice.spread()
        stop.wait(0.5)
    return None


def _reap(child: subprocess.Popen[bytes]) -> None:
    """Collect every child and adopted orphan that has ended; note the command's own code."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid == child.pid:
                child.returncode = os.waitstatus_to_exitcode(status)


def end_all(find: Callable[[], list[int]], grace: float, reap: Callable[[], None]) -> list[int]:
    """SIGTERM what `find` returns, after `grace` seconds SIGKILL it until nothing is found.

    Returns the ids that even SIGKILL did not end within KILL_LIMIT seconds.
    """
    started = time.monotonic()
    asked: set[int] = set()
    while True:
        reap()
        alive = find()
        elapsed = time.monotonic() - started
        if not alive or elapsed > grace + KILL_LIMIT:
            return alive
        kill = elapsed >= grace
        for pid in alive:
            if kill or pid not in asked:
                asked.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if kill else signal.SIGTERM)
        time.sleep(_POLL)


def descendants(root: int) -> list[int]:
    """Ids of the live processes below `root`, from /proc; zombies are not alive."""
    children: dict[int, list[int]] = {}
    zombies = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            state, parent = (
                Path("/proc", name, "stat")
                .read_text(errors="replace")
                .rpartition(")")[2]
                .split()[:2]
            )
        except (OSError, ValueError):  # it ended while we looked
            continue
        children.setdefault(int(parent), []).append(int(name))
        if state == "Z":
            zombies.add(int(name))
    found: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return [pid for pid in found if pid not in zombies]


def marked(*marks: str) -> list[int]:
    """Ids of the other live processes that carry one of these marks in their environment."""
    wanted = {f"{JOB_VARIABLE}={mark}".encode() for mark in marks}
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):  # it ended, or is another user's
                if wanted & set(Path("/proc", name, "environ").read_bytes().split(b"\0")):
                    found.append(int(name))
    return found


def host_mark(mark: str, host: int | None) -> str:
    """The mark of a job's processes on one of its hosts, by number.

    None is the machine that started the job.
    """
    return f"{mark}.{'head' if host is None else host}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
