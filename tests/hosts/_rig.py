"""Simulated hosts: namespaces (network, mount, UTS, IPC, PID) joined by a bridge, with sshd.

    with hosts(directory) as rig:
        rig.run("a", [sys.executable, "-m", "..."])

Every host has a separate directory at the same path `rig.workspace`. The rest of the file system,
including `rig.shared`, is the same for all. Only ssh resolves the hosts' names, through
`rig.ssh_config`; a host's own name is 127.0.1.1 in its /etc/hosts, like on Debian. The machine
itself is not changed, and closing the rig removes everything.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests._limits import HANG

ROOT = Path(__file__).resolve().parents[2]
SSH_PORT = 2222
_PREFIX = "mcore"
_INIT = Path(__file__).with_name("_init.py")


class RigError(Exception):
    """A host could not be created; the message contains the programs' output."""


@cache
def rig_problem() -> str | None:
    """Return why hosts cannot be created on this machine, or None."""
    if os.geteuid() != 0:
        return "hosts in network namespaces need root"
    missing = [
        name
        for name in ("ip", "ssh", "sshd", "ssh-keygen", "unshare", "nsenter", "mount")
        if not _which(name)
    ]
    if missing:
        return f"hosts in network namespaces need {', '.join(missing)}, which are not installed"
    probe = f"{_PREFIX}{os.getpid()}-probe"
    created = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, check=False
    )
    if created.returncode != 0:
        return f"network namespaces are not allowed here: {created.stderr.strip()}"
    try:
        inside = ["ip", "-n", probe, "link", "add", "x", "type", "veth", "peer", "name", "y"]
        namespaces = [
            "unshare",
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--fork",
            "mount",
            "-t",
            "tmpfs",
            "none",
            "/mnt",
        ]
        bridge = ["ip", "-n", probe, "link", "add", "z", "type", "bridge"]
        for words in (inside, namespaces, bridge):
            tried = subprocess.run(words, capture_output=True, text=True, check=False)
            if tried.returncode != 0:
                return f"`{' '.join(words)}` is not allowed here: {tried.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "delete", probe], check=False)
    return None


def require_rig() -> None:
    """Skip the test, with the reason, if hosts cannot be created."""
    import pytest  # imported here because the benchmarks, which use hosts too, do not need it

    problem = rig_problem()
    if problem is not None:
        pytest.skip(problem)


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _do(*words: str) -> None:
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RigError(f"`{' '.join(words)}`: {result.stderr.strip() or result.stdout.strip()}")


@dataclass
class Host:
    """One simulated host."""

    name: str
    address: str
    namespace: str
    port: str
    """Interface of the host's cable at the bridge."""
    directory: Path
    """Directory outside of the host with its keys, its logs and its `workspace`."""
    process: "subprocess.Popen[bytes] | None" = None
    init: int = 0
    """Id of the host's first process on the machine itself."""


@dataclass
class Rig:
    """Hosts that reach each other and nothing else."""

    directory: Path
    hosts: dict[str, Host]
    switch: str
    """Network namespace of the bridge."""
    _started: "list[subprocess.Popen[Any]]" = field(default_factory=list)

    @property
    def workspace(self) -> Path:
        """Path that is a separate directory on each host."""
        return self.directory / "workspace"

    @property
    def shared(self) -> Path:
        """Directory that all hosts see."""
        return self.directory / "shared"

    @property
    def ssh_config(self) -> Path:
        """Configuration for `ssh -F` on every host: address, port, user and identity."""
        return self.directory / "ssh_config"

    def disk(self, host: str) -> Path:
        """Return a host's workspace as seen from outside."""
        return self.hosts[host].directory / "workspace"

    def hostfile(self, slots: int = 1, names: Sequence[str] | None = None) -> Path:
        """Write a hostfile of all hosts, or of `names`, that all hosts see; return its path."""
        chosen = tuple(self.hosts if names is None else names)
        path = self.directory / f"hostfile-{'-'.join(chosen)}-{slots}"
        path.write_text("".join(f"{name} slots={slots}\n" for name in chosen))
        return path

    def inside(self, host: str, words: Sequence[str]) -> list[str]:
        """Return the command that runs `words` on a host, without ssh."""
        target = ["nsenter", "--target", str(self.hosts[host].init)]
        return [
            *target,
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            f"--wdns={ROOT}",
            "--",
            *words,
        ]

    def run(
        self,
        host: str,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = HANG,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on a host to its end."""
        command, environment = self.inside(host, words), {**os.environ, **(env or {})}
        return subprocess.run(
            command,
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start(
        self, host: str, words: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a command on a host with its output in `log`.

        It ends at the latest with the rig.
        """
        environment = {**os.environ, **(env or {})}
        with open(log, "ab") as output:
            process = subprocess.Popen(
                self.inside(host, words),
                env=environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    def processes(self, host: str) -> dict[int, str]:
        """Return command lines of a host's processes by their ids outside.

        Its init and zombies are excluded.
        """
        lines = {}
        for pid in _members(self.hosts[host].init):
            try:
                line = (
                    Path(f"/proc/{pid}/cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                    .strip()
                )
            except OSError:  # the process ended in the meantime
                continue
            if line and pid != self.hosts[host].init:
                lines[pid] = line
        return lines

    def ranks(self, host: str) -> list[int]:
        """Return the processes of a host that are ranks of a job, without their launchers."""
        return [pid for pid in self.processes(host) if "RANK" in _environment(pid)]

    def cut(self, host: str) -> None:
        """Disconnect the host's cable: no packet passes in either direction, without notice."""
        _do("ip", "-n", self.switch, "link", "set", self.hosts[host].port, "down")

    def freeze(self, host: str) -> None:
        """Stop all processes of a host, including sshd; its kernel still accepts connections."""
        deadline = time.monotonic() + HANG
        while awake := [
            pid for pid in _members(self.hosts[host].init) if _state(pid) not in "TZtX"
        ]:
            if time.monotonic() > deadline:
                raise RigError(f"processes {awake} of {host} do not stop")
            for pid in awake:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            time.sleep(0.01)

    def kill(self, host: str) -> None:
        """Kill all processes of a host at once."""
        process = self.hosts[host].process
        if process is not None:
            os.kill(self.hosts[host].init, signal.SIGKILL)
            process.wait(timeout=HANG)

    def restore(self, host: str) -> None:
        """Connect the cable again and continue frozen processes or start a killed host.

        A killed host keeps its disk.
        """
        restored_host = self.hosts[host]
        _do("ip", "-n", self.switch, "link", "set", restored_host.port, "up")
        if restored_host.process is not None and restored_host.process.poll() is None:
            for pid in _members(restored_host.init):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        else:
            self._boot(restored_host)
        self._wait_for_ssh(restored_host)

    def _boot(self, host: Host) -> None:
        """Start a host's init and sshd."""
        options = {
            "name": host.name,
            "hosts": str(host.directory / "hosts"),
            "shadow": _unlocked_shadow(host.directory),
            "binds": {str(self.workspace): str(host.directory / "workspace")},
            "sshd": str(host.directory / "sshd_config"),
        }
        namespaces = [
            "unshare",
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--fork",
            "--kill-child",
            "--propagation",
            "private",
        ]
        command = [
            "nsenter",
            f"--net=/run/netns/{host.namespace}",
            "--",
            *namespaces,
            sys.executable,
            "-S",
            str(_INIT),
        ]
        with open(host.directory / "log", "ab") as log:
            process = subprocess.Popen(
                [*command, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        host.process = process
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            process.kill()
            raise RigError(
                f"host {host.name} did not start: {(host.directory / 'log').read_text()[-500:]}"
            )
        (host.init,) = map(
            int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        )

    def _wait_for_ssh(self, host: Host) -> None:
        words = [
            "ssh",
            "-F",
            str(self.ssh_config),
            "-o",
            "BatchMode=yes",
            "-o",
            "ConnectTimeout=2",
            host.name,
            "true",
        ]
        deadline = time.monotonic() + HANG
        while (tried := self.run(host.name, words, timeout=HANG)).returncode != 0:
            if time.monotonic() > deadline:
                raise RigError(
                    f"ssh does not reach {host.name}: {tried.stderr} {host.directory / 'log'}"
                )
            time.sleep(0.1)

    def close(self) -> None:
        """End all hosts and all processes on them."""
        for host in self.hosts.values():
            if host.process is not None and host.process.poll() is None and host.init:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(host.init, signal.SIGKILL)
            if host.process is not None:
                host.process.kill()
                host.process.wait(timeout=HANG)
        for process in self._started:
            process.kill()
            process.wait(timeout=HANG)
        for namespace in (*(host.namespace for host in self.hosts.values()), self.switch):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


@contextlib.contextmanager
def hosts(directory: Path, names: Sequence[str] = ("a", "b")) -> Iterator[Rig]:
    """Create the hosts `names` with their files in `directory`, which must be empty or missing.

    Raise RigError on failure.
    """
    _remove_dead()
    directory.mkdir(parents=True, exist_ok=True)
    prefix = f"{_PREFIX}{os.getpid()}-{os.urandom(2).hex()}"
    hosts_by_name = {
        name: Host(
            name, f"10.77.0.{number}", f"{prefix}-{name}", f"to{number}", directory / "hosts" / name
        )
        for number, name in enumerate(names, start=1)
    }
    rig = Rig(directory, hosts_by_name, f"{prefix}-switch")
    try:
        _write_files_and_network(rig)
        for host in hosts_by_name.values():
            rig._boot(host)
        for host in hosts_by_name.values():
            rig._wait_for_ssh(host)
        yield rig
    finally:
        rig.close()


def _write_files_and_network(rig: Rig) -> None:
    """Create keys, configurations, directories and the network before any host runs."""
    for directory in (rig.workspace, rig.shared):
        directory.mkdir(parents=True)
    identity = rig.directory / "identity"
    _keygen(identity)
    lines = [
        "Host *",
        "  User root",
        f"  Port {SSH_PORT}",
        f"  IdentityFile {identity}",
        "  IdentitiesOnly yes",
    ]
    lines += [
        "  StrictHostKeyChecking no",
        f"  UserKnownHostsFile {rig.directory / 'known_hosts'}",
        "  LogLevel ERROR",
    ]
    _do("ip", "netns", "add", rig.switch)
    _do("ip", "-n", rig.switch, "link", "add", "bridge", "type", "bridge")
    _do("ip", "-n", rig.switch, "link", "set", "bridge", "up")
    for host in rig.hosts.values():
        (host.directory / "workspace").mkdir(parents=True)
        _keygen(host.directory / "host_key")
        (host.directory / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n")
        (host.directory / "sshd_config").write_text(_sshd_config(host, identity))
        lines += ["", f"Host {host.name}", f"  HostName {host.address}"]
        _connect(rig, host)
    # ssh uses the first of several values, so those of a host precede those of all.
    general, *each = "\n".join(lines).split("\n\n")
    rig.ssh_config.write_text("\n\n".join([*each, general]) + "\n")


def _connect(rig: Rig, host: Host) -> None:
    _do("ip", "netns", "add", host.namespace)
    peer = ["peer", "name", "eth0", "netns", host.namespace]
    _do("ip", "-n", rig.switch, "link", "add", host.port, "type", "veth", *peer)
    _do("ip", "-n", rig.switch, "link", "set", host.port, "master", "bridge", "up")
    _do("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _do("ip", "-n", host.namespace, "link", "set", "eth0", "up")


def _sshd_config(host: Host, identity: Path) -> str:
    values = {
        "Port": SSH_PORT,
        "ListenAddress": "0.0.0.0",
        "HostKey": host.directory / "host_key",
        "AuthorizedKeysFile": f"{identity}.pub",
        "PermitRootLogin": "yes",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "UsePAM": "no",
        "StrictModes": "no",
        "UseDNS": "no",
        "MaxStartups": 100,
        "PidFile": "none",
        "PrintMotd": "no",
    }
    return "".join(f"{name} {value}\n" for name, value in values.items())


def _keygen(path: Path) -> None:
    _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path))


def _unlocked_shadow(directory: Path) -> str | None:
    """Write a copy of /etc/shadow for a host whose sshd would refuse a locked root.

    Return None if it would not.
    """
    lines = Path("/etc/shadow").read_text().splitlines(True)
    if not any(line.startswith("root:!") for line in lines):
        return None
    path = directory / "shadow"
    path.touch(mode=0o600)
    path.write_text(
        "".join("root:*:1::::::\n" if line.startswith("root:") else line for line in lines)
    )
    return str(path)


def _members(init: int) -> list[int]:
    """Return the processes of the PID namespace whose first process is `init`."""
    try:
        namespace = os.stat(f"/proc/{init}/ns/pid").st_ino
    except FileNotFoundError:
        return []
    members = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.stat(path / "ns" / "pid").st_ino == namespace:
                members.append(int(path.name))
    return members


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _environment(pid: int) -> dict[str, str]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(entry.decode(errors="replace").split("=", 1) for entry in entries if b"=" in entry)


def _remove_dead() -> None:
    """Remove the network namespaces of rigs whose process was killed."""
    known = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=False
    ).stdout
    for line in known.splitlines():
        name = line.split()[0]
        owner = name.removeprefix(_PREFIX).partition("-")[0]
        if name.startswith(_PREFIX) and owner.isdecimal() and not Path("/proc", owner).exists():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
