"""The connections of a job's head to its machines: an agent on each, through ssh, or on its own without."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from megacore.cluster.hosts.agent import RANK_FILE
from megacore.cluster.hosts.channel import Channel, Message
from megacore.cluster.hosts.ssh import SSH_FAILED, Ssh, python
from megacore.config.hostfile import is_this_machine
from megacore.launch.mark import JOB_VARIABLE, host_mark
from megacore.launch.rank_table import StateReport

AGENT = "megacore.cluster.hosts.agent"
_NEEDED = ("PYTHONPATH",)
"""What an agent needs to find this package, before it is told anything."""
_SAID = 300
"""Characters of what ssh said that go into a sentence."""


@dataclass
class Connection:
    """One machine of the job."""

    name: str
    """As in the hostfile."""
    number: int
    """Its place there."""
    first: int
    """Its first rank."""
    ranks: int
    """How many it has."""
    process: "subprocess.Popen[bytes]"
    """ssh, or the agent itself."""
    channel: Channel
    mark: str
    """What its processes carry."""
    heard: float = field(default_factory=time.monotonic)
    """When it last said something."""
    hello: Message | None = None
    """What it is, once it has said so."""
    started: bool = False
    """Whether it was told to start its ranks."""
    code: int | None = None
    """What its ranks ended with, once they are gone."""
    lost: bool = False
    """Whether it is not talked to any more."""
    states: list[tuple[int, StateReport]] | None = None
    """Where its ranks stand, once it has said so."""
    said: str = ""
    """What ssh, or the agent, wrote to stderr last."""

    @property
    def here(self) -> bool:
        """Whether it is the head's own machine."""
        return is_this_machine(self.name)

    @property
    def done(self) -> bool:
        """Whether nothing more is expected of it."""
        return self.lost or self.code is not None

    def may_write(self, name: str) -> bool:
        """Whether a file is one of its own ranks'."""
        match = RANK_FILE.fullmatch(name)
        return match is not None and self.first <= int(match[1]) < self.first + self.ranks

    def read_errors(self) -> list[str]:
        """Lines of stderr since the last call."""
        assert self.process.stderr is not None
        text = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.process.stderr.fileno(), 65536):
                text += part
        lines = [line for line in text.decode("utf-8", errors="replace").splitlines() if line.strip()]
        self.said = " ".join([self.said, *lines])[-_SAID:].strip()
        return lines

    def why_it_ended(self) -> str:
        """Of a connection whose other side is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1.0)
        self.read_errors()
        code, said = self.process.poll(), f": {self.said}" if self.said else ""
        if not self.here and code == SSH_FAILED:
            return f"the connection to it ended{said}" if self.hello else f"ssh cannot reach it{said}"
        if code is not None and code < 0:
            return f"its {'agent' if self.here else 'ssh'} was ended by {signal.Signals(-code).name}{said}"
        if code == 0:
            return f"its agent ended, as it does when it hears nothing from this machine{said}"
        return f"its agent ended with code {code}{said}"

    def close(self) -> None:
        """Close it, which ends the ranks there, if the machine can still hear of it."""
        assert self.process.stdin is not None
        self.channel.broken = True  # its descriptor may soon be another file's
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.kill()


def agent_words(mark: str, host: str, number: int, environment: Mapping[str, str]) -> list[str]:
    """What starts the agent on a host, with the mark of its processes and the variables it needs from `environment`."""
    own = host_mark(mark, None if is_this_machine(host) else number)
    variables = {name: value for name, value in environment.items() if name in _NEEDED} | {JOB_VARIABLE: own}
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *python(AGENT)]


def connect(ssh: Ssh, hosts: Mapping[str, int], mark: str, environment: Mapping[str, str]) -> list[Connection]:
    """Start an agent on every host.

    Args:
        ssh: how they are reached.
        hosts: ranks of each.
        mark: the job's.
        environment: this process's variables.

    Raises:
        OSError: ssh cannot be started.
    """
    found, first = [], 0
    for number, (name, ranks) in enumerate(hosts.items()):
        own = host_mark(mark, None if is_this_machine(name) else number)
        process = start_quietly(ssh.command(name, agent_words(mark, name, number, environment)))
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        channel = Channel(process.stdout.fileno(), process.stdin.fileno())
        found.append(Connection(name, number, first, ranks, process, channel, own))
        first += ranks
    return found


def start_quietly(command: list[str], stdin: int = subprocess.PIPE) -> "subprocess.Popen[bytes]":
    """Start what reaches a machine, deaf to the signals that end a job. Raises OSError."""
    return subprocess.Popen(
        command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_ignore_signals
    )


def _ignore_signals() -> None:
    """The guard's SIGTERM is for the head, which tells the agents; ssh keeps ignored what it began with ignored."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
