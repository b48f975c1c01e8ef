"""The guard: the process that ends the ranks if the parent dies.

    python -m megacore.launch.guard [--log FILE] --grace SECONDS -- COMMAND …

torchrun starts every rank in a separate session, so no signal to a group or a session reaches all
of them. The guard is a subreaper: every process that its command starts stays its descendant, even
when it is orphaned. The guard ends all of them (SIGTERM, the grace period, SIGKILL until none is
left) when

* it receives SIGTERM, SIGINT or SIGHUP,
* its parent dies: stdin, a pipe whose other end is open only in the parent, reaches its end, or the
  parent's id changes (PR_SET_PDEATHSIG for the guard would watch the parent's thread instead of
  the parent),
* the command itself ends and leaves processes behind.

A scheduler sends SIGUSR1 before it takes the host back. The guard then ends nothing. It passes the
signal on, once, to each descendant that catches it, including those that install a handler later,
and waits for the command's end. All descendants start with the signal ignored: a scheduler may send
it to every process, and it would kill torchrun, which does not catch it, or a rank that is still
importing its packages.

The guard exits with the command's code, or with 128 + n for signal n. If the guard itself is killed
by SIGKILL, the kernel kills the command (PR_SET_PDEATHSIG) and each rank that called
`exit_reason.die_with_parent`. The supervisor, if it is still alive, kills all other processes with
the job's mark in their environment.

The guard inherits the descriptor of the run's lock and does not pass it on. After the end of its
parent the lock is therefore held until all ranks have ended, those on other hosts and those of a
scheduler's job included, because the command waits for them; at most for the grace period and
KILL_LIMIT, and only until the guard itself is killed by SIGKILL.

On a remote host the guard runs between ssh and the ranks of that host: stdin ends when either side
closes the connection.

With --log, the guard copies the command's output to the log. What the disk does not take is
dropped, so no rank fails because it cannot write to its log. A rank whose exit reason cannot be
written to its file prints it after REASON_MARK; the guard passes the first one of each rank on to
its own stdout, a pipe that the supervisor reads. What that pipe does not take is dropped too,
because a guard that waited would block every rank that writes.

All processes of a job inherit its mark, an environment variable. The guard imports only the
standard library, so it starts in tens of milliseconds.
"""

import argparse
import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

JOB_VARIABLE = "MEGACORE_JOB"
"""Environment variable that every process of a job inherits, whatever its session or parent."""
REASON_MARK = b"megacore exit reason: "
"""Start of an exit reason, as JSON, in the output of a rank that cannot write it to its file."""
_RANK = re.compile(rb'\{"rank": (\d{1,9}),')
"""Start of an exit reason as JSON."""
KILL_LIMIT = 4.0
"""Seconds after SIGKILL before a process in uninterruptible sleep is left to the kernel."""
NOT_FOUND = 127
NOT_EXECUTABLE = 126
PR_SET_PDEATHSIG = 1
"""Option of prctl: the signal that the kernel sends to this process when its parent ends."""
_PR_SET_CHILD_SUBREAPER = 36
_POLL = 0.05
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def guarded(command: Sequence[str], grace: float, log: Path | None = None) -> list[str]:
    """Return the command that runs `command` under a guard, with the options of this module."""
    output = [] if log is None else [f"--log={log}"]
    guard = [sys.executable, "-m", "megacore.launch.guard", *output, f"--grace={grace}"]
    return [*guard, "--", *command]


def ignore_stops() -> None:
    """Ignore the signals that end a job, in a child that is needed to end it in order."""
    for number in (*_STOP_SIGNALS, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def main(arguments: list[str]) -> int:
    """Run a command under the guard and return the exit code."""
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
    prctl = load_prctl()
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with _Output(options.log) as output:
        try:
            child = _start(options.command, output.descriptor, prctl)
        except OSError as error:
            output.write(f"cannot start {options.command[0]}: {error.strerror}\n".encode())
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        output.copy()
        code = _wait(child, stop, _Notice())
        survivors = end_all(
            lambda: descendants(os.getpid()), options.grace, reap=lambda: _reap(child)
        )
    code = child.returncode if child.returncode is not None else code
    if survivors or code is None:
        return 128 + signal.SIGKILL
    return code if code >= 0 else 128 - code


class _Output:
    """Output of the command: a pipe that a thread copies to the log, or the guard's own stdout."""

    def __init__(self, log: str | None) -> None:
        self.descriptor = sys.stdout.fileno()
        """Descriptor that the command writes to."""
        self._log, self._reasons, self._reader = self.descriptor, self.descriptor, -1
        self._copier = threading.Thread(target=self._copy, name="log", daemon=True)
        if log is not None:
            os.set_blocking(self.descriptor, False)
            self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            self._reader, self.descriptor = os.pipe()

    def __enter__(self) -> "_Output":
        return self

    def __exit__(self, *error: object) -> None:
        """Wait until all output is copied; its writers have ended."""
        if self._copier.is_alive():
            self._copier.join(KILL_LIMIT)

    def copy(self) -> None:
        """Begin to copy, now that the command has its end of the pipe."""
        if self._reader >= 0:
            os.close(self.descriptor)
            self._copier.start()

    def write(self, data: bytes) -> None:
        """Write to the log; what a full disk does not take is dropped."""
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._log, data) :]

    def _copy(self) -> None:
        line, passed_on = b"", set[bytes]()
        while chunk := os.read(self._reader, 65536):
            self.write(chunk)
            *complete, line = (line + chunk).split(b"\n")
            line = line[-65536:]
            for each in complete:
                _, mark, reason = each.partition(REASON_MARK)
                rank = _RANK.match(reason) if mark else None
                if rank is not None and rank[1] not in passed_on:
                    with contextlib.suppress(OSError):  # the pipe is full, or its reader has ended
                        # An earlier reason may be torn, for lack of room.
                        os.write(self._reasons, b"\n" + reason + b"\n")
                        passed_on.add(rank[1])


class _StopRequest:
    """Requests from signals and from the parent: to end the command, or to pass SIGUSR1 on.

    `wait` returns early when a request arrives.
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
    """Do nothing: a signal that has a handler is written to the wake-up descriptor."""


def load_prctl() -> Callable[[int, int], None]:
    """Return the prctl system call, which raises OSError; it must be looked up before any fork."""
    function = ctypes.CDLL(None, use_errno=True).prctl

    def call(option: int, value: int) -> None:
        if function(option, value, 0, 0, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"prctl({option}): {os.strerror(code)}")

    return call


def _start(
    command: list[str], output: int, prctl: Callable[[int, int], None]
) -> subprocess.Popen[bytes]:
    """Start the command in a separate session, with SIGUSR1 ignored.

    The kernel kills the command if the guard dies first.
    """
    guard = os.getpid()

    def before_exec() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
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
    """Delivery of SIGUSR1, once to every descendant of this process that catches it."""

    def __init__(self) -> None:
        self._notified: set[int] = set()

    def spread(self) -> None:
        for pid in descendants(os.getpid()):
            if pid not in self._notified and catches(pid, signal.SIGUSR1):
                self._notified.add(pid)
                send_signal(pid, signal.SIGUSR1)


def catches(pid: int, number: signal.Signals) -> bool:
    """Return True if a process has a handler for a signal, so that the signal does not kill it."""
    try:
        status = Path("/proc", str(pid), "status").read_text(errors="replace")
    except OSError:  # the process has ended
        return False
    caught = next(
        (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0"
    )
    return bool(int(caught, 16) >> (number - 1) & 1)


def _wait(child: subprocess.Popen[bytes], stop: _StopRequest, notice: _Notice) -> int | None:
    """Wait for the command's end and return its code; None if a stop is requested first."""
    while not stop.requested:
        _reap(child)
        if child.returncode is not None:
            return child.returncode
        if stop.notice:
            notice.spread()
        stop.wait(0.5)
    return None


def _reap(child: subprocess.Popen[bytes]) -> None:
    """Reap every child and adopted orphan that has ended; record the command's exit code."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid == child.pid:
                child.returncode = os.waitstatus_to_exitcode(status)


def end_all(find: Callable[[], list[int]], grace: float, reap: Callable[[], None]) -> list[int]:
    """End the processes whose ids `find` returns: SIGTERM, then SIGKILL after `grace` seconds.

    `reap` reaps children that have ended. Returns the ids of the processes that survived SIGKILL
    for KILL_LIMIT seconds.
    """
    started = time.monotonic()
    signalled: set[int] = set()
    while True:
        reap()
        alive = find()
        elapsed = time.monotonic() - started
        if not alive or elapsed > grace + KILL_LIMIT:
            return alive
        kill = elapsed >= grace
        for pid in alive:
            if kill or pid not in signalled:
                signalled.add(pid)
                send_signal(pid, signal.SIGKILL if kill else signal.SIGTERM)
        time.sleep(_POLL)


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended or belongs to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def descendants(root: int) -> list[int]:
    """Return the ids of the live descendants of `root`, from /proc, without zombies."""
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
        except (OSError, ValueError):  # the process has just ended
            continue
        children.setdefault(int(parent), []).append(int(name))
        if state == "Z":
            zombies.add(int(name))
    pids: list[int] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        pids += below
        pending += below
    return [pid for pid in pids if pid not in zombies]


def marked(*marks: str) -> list[int]:
    """Return the ids of all other live processes with one of `marks` in their environment."""
    entries = {f"{JOB_VARIABLE}={mark}".encode() for mark in marks}
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):  # the process ended or is another user's
                if entries & set(Path("/proc", name, "environ").read_bytes().split(b"\0")):
                    pids.append(int(name))
    return pids


def host_mark(mark: str, host: int | None) -> str:
    """Return the mark of a job's processes on host number `host`; None means the head."""
    return f"{mark}.{'head' if host is None else host}"


def job_mark(mark: str) -> str:
    """Return the mark of the whole job, given it or the mark of the job's processes on a host."""
    return mark.partition(".")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
