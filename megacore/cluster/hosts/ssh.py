"""Commands on other hosts through the user's ssh.

The ssh configuration sets port, user and identity.
"""

import json
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from megacore.config.hostfile import is_this_machine
from megacore.errors import LaunchError

if TYPE_CHECKING:
    from megacore.config.launch import LaunchConfig

CONNECT_TIMEOUT = 10
"""Seconds for a host to accept a connection."""
_ALIVE_INTERVAL = 5
"""Seconds between two keep-alive messages to a silent host; ssh gives up after four of them without
an answer."""
SSH_FAILED = 255
"""Exit code of ssh when ssh itself fails."""
_ALONE = ("ControlMaster=no", "ControlPath=none", "ClearAllForwardings=yes")
"""Options for a separate connection: a shared one hangs with the others when a host is lost, and
outlives the job."""
_POLL = 0.5
_FILES_PER_HOST = 6
"""Open files of a connection, with those of its start and of a second one that ends a lost host."""
_OTHER_FILES = 256
"""Open files of the rest of a process."""


@dataclass(frozen=True)
class Ssh:
    """Settings of ssh."""

    config: Path | None = None
    """File that ssh reads instead of the user's configuration."""
    keep_alive: bool = True
    """True if ssh itself gives up on a silent host; False if both sides of the connection check
    this themselves."""

    @classmethod
    def of(cls, launch: "LaunchConfig") -> Self:
        """Return the settings of a launch."""
        return cls(None if launch.ssh_config is None else Path(launch.ssh_config).absolute())

    def options(self) -> list[str]:
        """Return the options of ssh before the host.

        With them ssh never prompts, and gives up on a host that does not answer.
        """
        config_options = ["-F", str(self.config)] if self.config is not None else []
        alive = (
            f"ServerAliveInterval={_ALIVE_INTERVAL if self.keep_alive else 0}",
            "ServerAliveCountMax=4",
        )
        settings = ("BatchMode=yes", f"ConnectTimeout={CONNECT_TIMEOUT}", *alive, *_ALONE)
        return [*config_options, *(word for setting in settings for word in ("-o", setting)), "-T"]

    def command(
        self, host: str, words: Sequence[str], *, directory: Path | None = None
    ) -> list[str]:
        """Return the command that runs `words` on `host` in `directory`.

        The command for this host does not use ssh. A directory of None means the current one.
        """
        path = str((directory or Path.cwd()).absolute())
        if is_this_machine(host):
            return ["env", "-C", path, *words]
        return [
            "ssh",
            *self.options(),
            host,
            "--",
            f"cd {shlex.quote(path)} && exec {shlex.join(words)}",
        ]

    def address(self, host: str) -> str:
        """Return the name or address that ssh uses for `host`. Raises LaunchError."""
        result = subprocess.run(
            ["ssh", *self.options(), "-G", host], capture_output=True, text=True, check=False
        )
        names = [
            line.split()[1] for line in result.stdout.splitlines() if line.startswith("hostname ")
        ]
        if result.returncode != 0 or not names:
            raise LaunchError(
                f"ssh does not understand the host {host}: {result.stderr.strip() or 'no hostname'}"
            )
        return names[0]


@dataclass(frozen=True)
class HostResult:
    """Result of a command on one host."""

    host: str
    code: int
    """Exit code of the command."""
    output: bytes
    """Output of the command on stdout."""
    errors: str
    """Output of the command, or of ssh, on stderr."""
    timed_out: bool = False

    @property
    def problem(self) -> str | None:
        """Reason why the command failed (one clause); None if it succeeded."""
        errors = " ".join(self.errors.split())[-300:]
        if self.timed_out:
            return "it did not answer in time"
        if self.code == 0:
            return None
        if self.code == SSH_FAILED:
            return f"ssh cannot reach it: {errors or 'no reason given'}"
        return f"the command ended with code {self.code}: {errors or 'no message'}"

    def answer(self) -> Any:
        """Return the JSON on the last line of the output. Raises ValueError if it is none.

        A login script may have printed lines before it.
        """
        return json.loads((self.output.splitlines() or [b""])[-1])


def check_ssh(hosts: Iterable[str]) -> None:
    """Raise LaunchError if `hosts` contains another host and ssh is not installed."""
    others = [host for host in hosts if not is_this_machine(host)]
    if others and shutil.which("ssh") is None:
        raise LaunchError(
            f"{', '.join(others)} are reached through ssh, which is not installed here: install it "
            "(apt-get install openssh-client), or let launch.hostfile name only this machine"
        )


def allow_connections(hosts: int) -> None:
    """Raise this process's limit on open files if as many connections at the same time need it.

    The usual limit of 1,024 suffices for some 300 hosts. It is raised at most to the hard limit.
    """
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OTHER_FILES + _FILES_PER_HOST * hosts
    if limit < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, highest), highest))


def python(module: str, *arguments: str) -> list[str]:
    """Return the command `python -m module …` with this process's interpreter.

    The interpreter has the same path on every host.
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
    """Run a command on all hosts in parallel, and return one result per host, in their order.

    A command that fails, or takes more than `timeout` seconds, has a result, too. An exception in
    this thread ends the connections first. The command and its input may be given for each host;
    secret values belong in `stdin`, not in `words`. A directory of None means the current one.
    """
    allow_connections(len(hosts))
    calls = _Calls(timeout)
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        futures = []
        for host in hosts:
            host_words = words[host] if isinstance(words, Mapping) else words
            host_stdin = stdin[host] if isinstance(stdin, Mapping) else stdin
            futures.append(
                pool.submit(
                    calls.run, host, ssh.command(host, host_words, directory=directory), host_stdin
                )
            )
        try:
            while wait(futures, timeout=_POLL).not_done:
                pass
        except BaseException:
            calls.stop()
            raise
    return [future.result() for future in futures]


class _Calls:
    """Running commands, each in a thread, that another thread can end."""

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
                stderr = (error.stderr or b"").decode(errors="replace")
                return HostResult(host, -1, error.stdout or b"", stderr, timed_out=True)
            finally:
                self._running.discard(process)
        return HostResult(host, process.returncode, output, errors.decode(errors="replace"))

    def stop(self) -> None:
        self._stopped = True
        for process in list(self._running):
            process.kill()
