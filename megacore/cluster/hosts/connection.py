"""The connections of a job's head to its machines: an agent on each, through ssh, or here without.

A job's `HostSet` knows how they are reached, where they meet, and what each is told.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from megacore.cluster.hosts.agent import RANK_FILE, versions
from megacore.cluster.hosts.channel import Channel, Message
from megacore.cluster.hosts.plan import Plan, endpoint, meeting_addresses, plan_ssh
from megacore.cluster.hosts.ssh import SSH_FAILED, Ssh, python
from megacore.config.hostfile import is_this_machine
from megacore.errors import LaunchError
from megacore.launch.guard import JOB_VARIABLE, host_mark
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
        lines = [
            line for line in text.decode("utf-8", errors="replace").splitlines() if line.strip()
        ]
        self.said = " ".join([self.said, *lines])[-_SAID:].strip()
        return lines

    def why_it_ended(self) -> str:
        """Of a connection whose other side is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1.0)
        self.read_errors()
        code, said = self.process.poll(), f": {self.said}" if self.said else ""
        if not self.here and code == SSH_FAILED:
            return (
                f"the connection to it ended{said}" if self.hello else f"ssh cannot reach it{said}"
            )
        if code is not None and code < 0:
            return (
                f"its {'agent' if self.here else 'ssh'} was ended by "
                f"{signal.Signals(-code).name}{said}"
            )
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


class HostSet:
    """The machines of a plan: how they are reached, where they meet, and what each is told."""

    def __init__(self, plan: Plan, environment: Mapping[str, str]) -> None:
        """Reach nobody yet; `environment` is this process's."""
        self._plan, self._environment = plan, environment
        self._ssh = plan_ssh(plan)
        self._mark = environment.get(JOB_VARIABLE) or secrets.token_hex(16)
        self._left: list[tuple[subprocess.Popen[bytes], float]] = []
        self._master = self._meeting = ""

    def connect(self) -> list[Connection]:
        """Start an agent on every machine and ask it what it is. Raises LaunchError."""
        self._master, second = meeting_addresses(
            plan_ssh(self._plan), self._plan.hosts, self._plan.rdzv_endpoint
        )
        try:
            hosts = connect(self._ssh, self._plan.hosts, self._mark, self._environment)
        except OSError as error:
            raise LaunchError(f"cannot start {error.filename}: {error.strerror}") from error
        for host in hosts:
            host.channel.send(
                "prepare",
                peer=self._master if host.number else second,
                interface=self._plan.interface,
                port=host.number == 0,
                host_timeout=self._plan.host_timeout,
            )
        return hosts

    def start_messages(
        self, hosts: list[Connection], variables: Mapping[str, str]
    ) -> list[Message]:
        """What each machine is told to start.

        Raises LaunchError for one that is not like this one.
        """
        own = versions()
        for host in hosts:
            assert host.hello is not None
            theirs: dict[str, str] = host.hello["versions"]
            for name in own:
                if theirs.get(name) != own[name]:
                    raise LaunchError(
                        f"host {host.name} has {name} {theirs.get(name)} and this machine "
                        f"{own[name]}: install the same environment on all machines"
                    )
            if host.hello["problem"]:
                raise LaunchError(
                    f"host {host.name} cannot take part: {host.hello['problem']}: correct "
                    "launch.interface"
                )
        assert hosts[0].hello is not None
        port = endpoint(self._plan.rdzv_endpoint)[1] or int(hosts[0].hello["port"])
        self._meeting = f"{self._master}:{port}"
        return [self._message(host, variables, port) for host in hosts]

    def _message(self, host: Connection, variables: Mapping[str, str], port: int) -> Message:
        plan = self._plan
        return {
            "command": plan.command(host.number, self._master, port),
            "environment": {**variables, **plan.gpus(host.name)},
            "grace": plan.stop_grace,
            "ranks": [host.first, host.ranks],
            "exit_directory": plan.exit_directory,
            "copy_files": plan.copy_files and not host.here,
            "stall_limit": plan.stall_limit,
        }

    def summary(self, hosts: list[Connection]) -> str:
        """Which machines take part, and where they meet, in one line."""
        parts = []
        for host in hosts:
            last = host.first + host.ranks - 1
            ranks = f"rank {host.first}" if host.ranks == 1 else f"ranks {host.first}-{last}"
            way = (
                f" through {host.hello['interface']}"
                if host.hello and host.hello["interface"]
                else ""
            )
            parts.append(f"{host.name} ({ranks}{way})")
        return f"hosts: {', '.join(parts)}; they meet at {self._meeting}"

    def end_what_is_left(self, host: Connection, seconds: float) -> None:
        """Begin to kill, through a new connection, what carries the job's mark on a lost machine.

        `seconds` are its.
        """
        with contextlib.suppress(OSError):
            command = self._ssh.command(host.name, python(AGENT, "--end", host.mark))
            self._left.append(
                (start_quietly(command, stdin=subprocess.DEVNULL), time.monotonic() + seconds)
            )

    def wait_for_the_rest(self) -> None:
        """Until that is done, or its seconds are over."""
        for process, deadline in self._left:
            try:
                process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def connect(
    ssh: Ssh, hosts: Mapping[str, int], mark: str, environment: Mapping[str, str]
) -> list[Connection]:
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


def agent_words(mark: str, host: str, number: int, environment: Mapping[str, str]) -> list[str]:
    """What starts the agent on a host, with the mark of its processes.

    It has the variables it needs from `environment`.
    """
    own = host_mark(mark, None if is_this_machine(host) else number)
    variables = {name: value for name, value in environment.items() if name in _NEEDED} | {
        JOB_VARIABLE: own
    }
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *python(AGENT)]


def start_quietly(command: list[str], stdin: int = subprocess.PIPE) -> "subprocess.Popen[bytes]":
    """Start what reaches a machine, deaf to the signals that end a job. Raises OSError."""
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=_ignore_signals,
    )


def _ignore_signals() -> None:
    """The guard's SIGTERM is for the head, which tells the agents.

    ssh keeps ignored what it began with ignored.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
