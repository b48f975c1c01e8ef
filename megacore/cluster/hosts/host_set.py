"""The machines of a job's plan: how they are reached, where they meet, and what each is told."""

import contextlib
import secrets
import subprocess
import time
from collections.abc import Mapping

from megacore.cluster.hosts.agent import versions
from megacore.cluster.hosts.channel import Message
from megacore.cluster.hosts.connection import AGENT, Connection, connect, start_quietly
from megacore.cluster.hosts.plan import Plan, endpoint, meeting_addresses, plan_ssh
from megacore.cluster.hosts.ssh import python
from megacore.errors import LaunchError
from megacore.launch.mark import JOB_VARIABLE


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
        self._master, second = meeting_addresses(plan_ssh(self._plan), self._plan.hosts, self._plan.rdzv_endpoint)
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

    def start_messages(self, hosts: list[Connection], variables: Mapping[str, str]) -> list[Message]:
        """What each machine is told to start. Raises LaunchError for one that is not like this one."""
        own = versions()
        for host in hosts:
            assert host.hello is not None
            theirs: dict[str, str] = host.hello["versions"]
            for name in own:
                if theirs.get(name) != own[name]:
                    raise LaunchError(
                        f"host {host.name} has {name} {theirs.get(name)} and this machine {own[name]}: install the "
                        "same environment on all machines"
                    )
            if host.hello["problem"]:
                raise LaunchError(
                    f"host {host.name} cannot take part: {host.hello['problem']}: correct launch.interface"
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
            way = f" through {host.hello['interface']}" if host.hello and host.hello["interface"] else ""
            parts.append(f"{host.name} ({ranks}{way})")
        return f"hosts: {', '.join(parts)}; they meet at {self._meeting}"

    def end_what_is_left(self, host: Connection, seconds: float) -> None:
        """Begin to kill, through a new connection, what carries the job's mark on a lost machine; `seconds` are its."""
        with contextlib.suppress(OSError):
            command = self._ssh.command(host.name, python(AGENT, "--end", host.mark))
            self._left.append((start_quietly(command, stdin=subprocess.DEVNULL), time.monotonic() + seconds))

    def wait_for_the_rest(self) -> None:
        """Until that is done, or its seconds are over."""
        for process, deadline in self._left:
            try:
                process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
