"""Reaching other machines through the user's own ssh.

Its configuration says port, user and identity.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from megacore.config.hostfile import is_this_machine
from megacore.errors import LaunchError

CONNECT_TIMEOUT = 10
"""Seconds in which a machine must take a connection."""
_ALIVE_INTERVAL = 5
"""Seconds between two questions whether a machine that says nothing is still there; after four
without an answer ssh gives up."""
SSH_FAILED = 255
"""What ssh exits with when it is ssh that failed."""
_ALONE = ("ControlMaster=no", "ControlPath=none", "ClearAllForwardings=yes")
"""A connection of its own: one that is shared hangs with the others when a machine is lost, and
outlives the job."""
_POLL = 0.5


@dataclass(frozen=True)
class Ssh:
    """How commands reach a host."""

    config: Path | None = None
    """File that ssh reads instead of the user's own."""
    keep_alive: bool = True
    """Whether ssh itself gives up on a machine that falls silent; not where both sides of a
    connection see to that."""

    def options(self) -> list[str]:
        """Words of ssh before the host.

        It never asks anything, and gives up on a machine that does not answer.
        """
        own = ["-F", str(self.config)] if self.config is not None else []
        alive = (
            f"ServerAliveInterval={_ALIVE_INTERVAL if self.keep_alive else 0}",
            "ServerAliveCountMax=4",
        )
        settings = ("BatchMode=yes", f"ConnectTimeout={CONNECT_TIMEOUT}", *alive, *_ALONE)
        return [*own, *(word for setting in settings for word in ("-o", setting)), "-T"]

    def command(
        self, host: str, words: Sequence[str], *, directory: Path | None = None
    ) -> list[str]:
        """What runs `words` on `host`, in `directory` (None: the current one).

        On this machine it does without ssh.
        """
        place = str((directory or Path.cwd()).absolute())
        if is_this_machine(host):
            return ["env", "-C", place, *words]
        return [
            "ssh",
            *self.options(),
            host,
            "--",
            f"cd {shlex.quote(place)} && exec {shlex.join(words)}",
        ]

    def address(self, host: str) -> str:
        """The name or address under which ssh reaches `host`. Raises LaunchError."""
        found = subprocess.run(
            ["ssh", *self.options(), "-G", host], capture_output=True, text=True, check=False
        )
        names = [
            line.split()[1] for line in found.stdout.splitlines() if line.startswith("hostname ")
        ]
        if found.returncode != 0 or not names:
            raise LaunchError(
                f"ssh does not understand the host {host}: {found.stderr.strip() or 'no hostname'}"
            )
        return names[0]


@dataclass(frozen=True)
class HostResult:
    """What a command did on one host."""

    host: str
    code: int
    """Its exit code."""
    output: bytes
    """What it wrote to stdout."""
    errors: str
    """What it, or ssh, wrote to stderr."""
    timed_out: bool = False

    @property
    def problem(self) -> str | None:
        """Why the command did not succeed, in one clause; None where it did."""
        said = " ".join(self.errors.split())[-300:]
        if self.timed_out:
            return "it did not answer in time"
        if self.code == 0:
            return None
        if self.code == SSH_FAILED:
            return f"ssh cannot reach it: {said or 'no reason given'}"
        return f"the command ended with code {self.code}: {said or 'nothing was said'}"


def check_ssh(hosts: Iterable[str]) -> None:
    """Raise LaunchError where ssh is not installed and another machine is to be reached."""
    others = [host for host in hosts if not is_this_machine(host)]
    if others and shutil.which("ssh") is None:
        raise LaunchError(
            f"{', '.join(others)} are reached through ssh, which is not installed here: install it "
            "(apt-get install openssh-client), or let launch.hostfile name this machine alone"
        )


def python(module: str, *arguments: str) -> list[str]:
    """`python -m module …` with this process's interpreter.

    It lies at the same path on every machine.
    """
    return [sys.executable, "-m", module, *arguments]


def run_on_hosts(
    ssh: Ssh,
    hosts: Sequence[str],
    words: Sequence[str] | Mapping[str, Sequence[str]],
    *,
    stdin: bytes | Mapping[str, bytes] = b"",
    timeout: float,
    directory: Path | None = None,
) -> list[HostResult]:
    """Run a command on every host at once; one result per host, in their order.

    A result says whatever became of it.

    What is raised meanwhile in this thread ends the connections first.

    Args:
        ssh: how they are reached.
        hosts: names as in the hostfile.
        words: the command, or that of each host.
        stdin: what it reads, or what that of each host does; values that are secret go here, not
            into `words`.
        timeout: seconds for each.
        directory: where it runs (None: the current directory).
    """
    calls = _Calls(timeout)
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        futures = []
        for host in hosts:
            own = words[host] if isinstance(words, Mapping) else words
            given = stdin[host] if isinstance(stdin, Mapping) else stdin
            futures.append(
                pool.submit(calls.run, host, ssh.command(host, own, directory=directory), given)
            )
        try:
            while wait(futures, timeout=_POLL).not_done:
                pass
        except BaseException:
            calls.stop()
            raise
    return [future.result() for future in futures]


class _Calls:
    """Commands under way, each in a thread, that another thread can end."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def run(self, host: str, command: list[str], stdin: bytes) -> HostResult:
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)
        except OSError as error:
            return HostResult(host, SSH_FAILED, b"", f"{command[0]}: {error.strerror}")
        with process:
            self._running.add(process)
            if self._stopped:
                process.kill()
            try:
                output, errors = process.communicate(stdin, timeout=self._timeout)
            except subprocess.TimeoutExpired as error:
                process.kill()
                said = (error.stderr or b"").decode(errors="replace")
                return HostResult(host, -1, error.stdout or b"", said, timed_out=True)
            finally:
                self._running.discard(process)
        return HostResult(host, process.returncode, output, errors.decode(errors="replace"))

    def stop(self) -> None:
        self._stopped = True
        for process in list(self._running):
            process.kill()
