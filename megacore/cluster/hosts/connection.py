"""Connections of a job's head to the agents on its hosts, through ssh except on the head's host.

A job's `HostSet` starts the agents, chooses the rendezvous, and builds the messages to the agents.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from megacore.cluster.hosts.agent import RANK_FILE
from megacore.cluster.hosts.channel import Channel, Message
from megacore.cluster.hosts.plan import Plan, endpoint, meeting_addresses, plan_ssh
from megacore.cluster.hosts.ssh import SSH_FAILED, allow_connections, python
from megacore.config.hostfile import is_this_machine
from megacore.errors import LaunchError
from megacore.hardware import check_versions, shared_versions
from megacore.launch.guard import JOB_VARIABLE, host_mark, ignore_stops
from megacore.launch.rank_table import StateReport

AGENT = "megacore.cluster.hosts.agent"
_NEEDED = ("PYTHONPATH",)
"""Variables that an agent needs to import this package, before any message arrives."""
_END_SECONDS = 5.0
"""Seconds between the end of the messages of ssh or the agent and the end of its process."""
_QUOTED = 300
"""Number of characters of stderr that an error message quotes."""


@dataclass
class Connection:
    """The head's connection to the agent of one host of the job."""

    name: str
    """Name of the host in the hostfile."""
    number: int
    """Index of the host in the hostfile."""
    first: int
    """First rank of the host."""
    ranks: int
    """Number of ranks of the host."""
    process: "subprocess.Popen[bytes]"
    """Process of ssh, or of the agent itself on the head's host."""
    channel: Channel
    mark: str
    """Mark of the host's processes."""
    heard: float = field(default_factory=time.monotonic)
    """Monotonic time of the last message, in seconds."""
    hello: Message | None = None
    """The agent's hello message; None before it arrives."""
    started: bool = False
    """True if the agent was told to start its ranks."""
    code: int | None = None
    """Exit code of the host's ranks; None before they have ended."""
    lost: bool = False
    """True if the host is lost and gets no more messages."""
    states: list[tuple[int, StateReport]] | None = None
    """States of the host's ranks; None before the agent reports them."""
    last_output: str = ""
    """Last output of ssh or the agent on stderr."""

    @property
    def here(self) -> bool:
        """True if this is the head's host."""
        return is_this_machine(self.name)

    @property
    def done(self) -> bool:
        """True if no more messages are expected from the host."""
        return self.lost or self.code is not None

    def may_write(self, name: str) -> bool:
        """Return True if `name` is a file of one of the host's ranks."""
        match = RANK_FILE.fullmatch(name)
        return match is not None and self.first <= int(match[1]) < self.first + self.ranks

    def read_errors(self) -> list[str]:
        """Return the lines of stderr since the last call."""
        assert self.process.stderr is not None
        data = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.process.stderr.fileno(), 65536):
                data += part
        lines = [
            line for line in data.decode("utf-8", errors="replace").splitlines() if line.strip()
        ]
        self.last_output = " ".join([self.last_output, *lines])[-_QUOTED:].strip()
        return lines

    def why_it_ended(self) -> str:
        """Return the reason why the connection ended, for an error message."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=_END_SECONDS)
        self.read_errors()
        code, quoted = self.process.poll(), f": {self.last_output}" if self.last_output else ""
        if not self.here and code == SSH_FAILED:
            return (
                f"the connection to it ended{quoted}"
                if self.hello
                else f"ssh cannot reach it{quoted}"
            )
        if code is not None and code < 0:
            return (
                f"its {'agent' if self.here else 'ssh'} was ended by "
                f"{signal.Signals(-code).name}{quoted}"
            )
        if code == 0:
            return f"its agent ended, as it does when it hears nothing from this machine{quoted}"
        if code is None:
            return f"its {'agent' if self.here else 'ssh'} closed the connection{quoted}"
        return f"its agent ended with code {code}{quoted}"

    def close(self) -> None:
        """Close the connection, which ends the host's ranks if the host is still reachable."""
        assert self.process.stdin is not None
        self.channel.broken = True  # the descriptor's number may soon belong to another file
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.kill()


class HostSet:
    """Hosts of a plan: their connections, their rendezvous, and the messages to them."""

    def __init__(self, plan: Plan, environment: Mapping[str, str]) -> None:
        """Keep `plan` and this process's `environment`; no host is contacted yet."""
        self._plan, self._environment = plan, environment
        self._ssh = plan_ssh(plan)
        self._mark = environment.get(JOB_VARIABLE) or secrets.token_hex(16)
        self._left: list[tuple[subprocess.Popen[bytes], float]] = []
        self._master = self._meeting = ""

    def connect(self) -> list[Connection]:
        """Start an agent on every host and ask for its hello. Raises LaunchError."""
        self._master, second = meeting_addresses(
            self._ssh, self._plan.hosts, self._plan.rdzv_endpoint
        )
        allow_connections(len(self._plan.hosts))
        hosts, first = list[Connection](), 0
        for number, (name, ranks) in enumerate(self._plan.hosts.items()):
            hosts.append(self._connection(name, number, first, ranks))
            first += ranks
        for host in hosts:
            host.channel.send(
                "prepare",
                peer=self._master if host.number else second,
                interface=self._plan.interface,
                port=host.number == 0,
                host_timeout=self._plan.host_timeout,
            )
        return hosts

    def _connection(self, name: str, number: int, first: int, ranks: int) -> Connection:
        """Start the agent of host `number`, whose ranks begin with `first`."""
        mark = mark_on(name, number, self._mark)
        command = self._ssh.command(name, agent_words(mark, self._environment))
        try:
            process = start_quietly(command)
        except OSError as error:
            raise LaunchError(
                f"cannot start {command[0]} for host {name}: {error.strerror}"
            ) from error
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        channel = Channel(process.stdout.fileno(), process.stdin.fileno())
        return Connection(name, number, first, ranks, process, channel, mark)

    def start_messages(
        self, hosts: list[Connection], variables: Mapping[str, str]
    ) -> list[Message]:
        """Return the start message of each host.

        Raises:
            LaunchError: a host has other versions of packages than the head, or has a problem.
        """
        packages, here = self._plan.packages, shared_versions()
        for host in hosts:
            assert host.hello is not None
            versions = host.hello["versions"]
            check_versions(packages, f"host {host.name}", versions, "this machine", here)
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
        """Return one line with the hosts, their ranks and the address of the rendezvous."""
        parts = []
        for host in hosts:
            last = host.first + host.ranks - 1
            ranks = f"rank {host.first}" if host.ranks == 1 else f"ranks {host.first}-{last}"
            interface = (
                f" through {host.hello['interface']}"
                if host.hello and host.hello["interface"]
                else ""
            )
            parts.append(f"{host.name} ({ranks}{interface})")
        return f"hosts: {', '.join(parts)}; they meet at {self._meeting}"

    def kill_remaining(self, host: Connection, seconds: float) -> None:
        """Start to kill the job's processes on a lost host, through a new connection.

        The connection may take `seconds` seconds. The processes are found by the job's mark.
        """
        with contextlib.suppress(OSError):
            command = self._ssh.command(host.name, python(AGENT, "--end", host.mark))
            self._left.append(
                (start_quietly(command, stdin=subprocess.DEVNULL), time.monotonic() + seconds)
            )

    def wait_for_kills(self) -> None:
        """Wait until `kill_remaining` is done on all hosts, or its time is over."""
        for process, deadline in self._left:
            try:
                process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()


def mark_on(host: str, number: int, job: str) -> str:
    """Return the mark of a job's processes on host `number`, from the job's own mark."""
    return host_mark(job, None if is_this_machine(host) else number)


def agent_words(mark: str, environment: Mapping[str, str]) -> list[str]:
    """Return the command that starts the agent on a host.

    The command sets the mark of the host's processes and passes on the variables of `environment`
    that the agent needs.
    """
    variables = {name: value for name, value in environment.items() if name in _NEEDED} | {
        JOB_VARIABLE: mark
    }
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *python(AGENT)]


def start_quietly(command: list[str], stdin: int = subprocess.PIPE) -> "subprocess.Popen[bytes]":
    """Start a command that ignores the signals that end a job. Raises OSError.

    The guard's SIGTERM is for the head, which then tells the agents. ssh continues to ignore the
    signals that were ignored when it started.
    """
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=ignore_stops,
    )
