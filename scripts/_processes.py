"""Start and end of processes that outlive the command which starts them.

Whole process trees are ended, by process id and never by name.
"""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from megacore.errors import LaunchError

MARK = "MEGACORE_SERVERS"
"""Environment variable `<token>:<name>` that every descendant inherits, even in another session or
with another parent."""

_CLOCK_TOLERANCE = 2.0
"""Seconds by which a start time may move when the system clock is set."""


@dataclass(frozen=True)
class Started:
    """One started process, as recorded on disk."""

    name: str
    pid: int
    created: float
    """Start time, in seconds since the epoch: it differs if the process id was reused."""
    log: str

    def process(self) -> psutil.Process | None:
        """Return the process, or None if it has ended, even if its id is in use again."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.created) < _CLOCK_TOLERANCE and not _is_zombie(
                process
            ):
                return process
        return None


def spawn(
    name: str, command: list[str], *, token: str, env: dict[str, str], cwd: Path, log: Path
) -> Started:
    """Start `command` in a new session, without stdin and with its output appended to `log`."""
    with open(log, "ab") as output:
        child = subprocess.Popen(
            command,
            cwd=cwd,
            env={**env, MARK: f"{token}:{name}"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    # Do not wait for the child: it may outlive this command.
    child.returncode = 0
    return Started(name, child.pid, psutil.Process(child.pid).create_time(), str(log))


def family(token: str, name: str, started: Started | None) -> list[psutil.Process]:
    """Return every living process that descends from the one started as `name`."""
    members = {process.pid: process for process in _marked(f"{token}:{name}")}
    leader = started.process() if started else None
    if leader:
        members[leader.pid] = leader
    for process in list(members.values()):
        with contextlib.suppress(psutil.Error):
            members.update({child.pid: child for child in process.children(recursive=True)})
    members.pop(os.getpid(), None)
    return [process for process in members.values() if not _is_zombie(process)]


def end(token: str, name: str, started: Started | None, grace: float) -> int:
    """End the family of `name`: SIGTERM, at most `grace` seconds, then SIGKILL until none is left.

    Returns the number of processes. Raises LaunchError when one cannot be ended.
    """
    members = family(token, name, started)
    seen = {process.pid for process in members}
    for process in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _wait(members, grace)
    deadline = time.monotonic() + 10
    while members := family(token, name, started):
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in members)
            raise LaunchError(
                f"{name}: processes {pids} do not end after SIGKILL: see what they wait for with "
                "ps -l"
            )
        seen.update(process.pid for process in members)
        for process in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _wait(members, 1.0)
    return len(seen)


def require_free_port(port: int, what: str, variable: str) -> None:
    """Raise LaunchError, naming the listening process, when `port` on loopback is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise LaunchError(
                f"port {port} for {what} cannot be used: {error.strerror}, by {_listener(port)}; "
                f"end that or choose another port: make server {variable}={port + 1}"
            ) from error


def _listener(port: int) -> str:
    for process in psutil.process_iter(["pid", "cmdline"]):
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    command = " ".join(process.info["cmdline"])[:160]
                    return f"process {process.pid} ({command})"
    return "a process of another user"


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                yield process


def _wait(processes: list[psutil.Process], timeout: float) -> None:
    """Wait until the processes have ended, or are zombies of a parent that does not reap them."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and not all(_is_zombie(process) for process in processes):
        for process in processes:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
        time.sleep(0.1)


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
