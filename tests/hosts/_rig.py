"""Stand-ins for machines: network, mount, UTS, IPC and process namespaces, joined by a bridge, each
with an sshd.

    with hosts(directory) as rig:
        rig.run("a", [sys.executable, "-m", "..."])

Every host has `rig.workspace` at the same path, and there a directory of its own; all else of the
file system is the same for all, `rig.shared` among it. Their names are resolved by ssh alone,
through `rig.ssh_config`; their own name is 127.0.1.1 in /etc/hosts, as on Debian. Nothing of the
machine outside is changed, and all is gone with the rig.
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

ROOT = Path(__file__).resolve().parents[2]
SSH_PORT = 2222
_PREFIX = "mcore"
_INIT = Path(__file__).with_name("_init.py")


class RigError(Exception):
    """A host could not be made; what the programs said."""


@cache
def rig_problem() -> str | None:
    """Why no hosts can be made here; None where they can."""
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
    made = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    try:
        inside = ["ip", "-n", probe, "link", "add", "x", "type", "veth", "peer", "name", "y"]
        own = [
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
        for words in (inside, own, bridge):
            tried = subprocess.run(words, capture_output=True, text=True, check=False)
            if tried.returncode != 0:
                return f"`{' '.join(words)}` is not allowed here: {tried.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "delete", probe], check=False)
    return None


def require_rig() -> None:
    """Skip the test, with the reason, where no hosts can be made."""
    import pytest  # the benchmarks, which make hosts too, do without

    problem = rig_problem()
    if problem is not None:
        pytest.skip(problem)


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RigError(f"`{' '.join(words)}`: {done.stderr.strip() or done.stdout.strip()}")


@dataclass
class Host:
    """One stand-in."""

    name: str
    address: str
    namespace: str
    port: str
    """Its end of the cable at the bridge."""
    directory: Path
    """Its keys and logs, and in `workspace` its own workspace, as seen from outside."""
    process: "subprocess.Popen[bytes] | None" = None
    init: int = 0
    """Its first process, by its id outside."""


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
        """Path that is another directory on each host."""
        return self.directory / "workspace"

    @property
    def shared(self) -> Path:
        """Directory that all hosts see."""
        return self.directory / "shared"

    @property
    def ssh_config(self) -> Path:
        """What `ssh -F` reads on every host: address, port, user and identity."""
        return self.directory / "ssh_config"

    def disk(self, host: str) -> Path:
        """A host's own workspace, as it is seen from outside."""
        return self.hosts[host].directory / "workspace"

    def hostfile(self, slots: int = 1, names: Sequence[str] | None = None) -> Path:
        """A hostfile of all hosts, or of `names`; all hosts see it."""
        chosen = tuple(self.hosts if names is None else names)
        path = self.directory / f"hostfile-{'-'.join(chosen)}-{slots}"
        path.write_text("".join(f"{name} slots={slots}\n" for name in chosen))
        return path

    def inside(self, host: str, words: Sequence[str]) -> list[str]:
        """What runs `words` on a host, without ssh."""
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
        timeout: float = 120,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on a host, to its end."""
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
        """Start a command on a host, its output to `log`; it ends with the rig at the latest."""
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
        """Command lines of a host's processes by their ids outside, without its init and
        zombies."""
        found = {}
        for pid in _members(self.hosts[host].init):
            try:
                line = (
                    Path(f"/proc/{pid}/cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                    .strip()
                )
            except OSError:  # it ended while we looked
                continue
            if line and pid != self.hosts[host].init:
                found[pid] = line
        return found

    def ranks(self, host: str) -> list[int]:
        """Processes of a host that are ranks of a job, and not what starts them."""
        return [pid for pid in self.processes(host) if "RANK" in _environment(pid)]

    def cut(self, host: str) -> None:
        """Pull the cable: no packet reaches the host or comes from it, and nobody is told."""
        _do("ip", "-n", self.switch, "link", "set", self.hosts[host].port, "down")

    def freeze(self, host: str) -> None:
        """Stop every process of a host, its sshd among them; its kernel still takes connections."""
        deadline = time.monotonic() + 10
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
        """End every process of a host by SIGKILL, at once."""
        process = self.hosts[host].process
        if process is not None:
            os.kill(self.hosts[host].init, signal.SIGKILL)
            process.wait(timeout=30)

    def restore(self, host: str) -> None:
        """Plug the cable in, let frozen processes go on, start a killed host again, with its disk
        as it was."""
        here = self.hosts[host]
        _do("ip", "-n", self.switch, "link", "set", here.port, "up")
        if here.process is not None and here.process.poll() is None:
            for pid in _members(here.init):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        else:
            self._boot(here)
        self._wait_for_ssh(here)

    def _boot(self, host: Host) -> None:
        """Start a host's init and sshd."""
        said = {
            "name": host.name,
            "hosts": str(host.directory / "hosts"),
            "shadow": _unlocked_shadow(host.directory),
            "binds": {str(self.workspace): str(host.directory / "workspace")},
            "sshd": str(host.directory / "sshd_config"),
        }
        own = [
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
            *own,
            sys.executable,
            "-S",
            str(_INIT),
        ]
        with open(host.directory / "log", "ab") as log:
            process = subprocess.Popen(
                [*command, json.dumps(said)],
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
        deadline = time.monotonic() + 20
        while (tried := self.run(host.name, words, timeout=20)).returncode != 0:
            if time.monotonic() > deadline:
                raise RigError(
                    f"ssh does not reach {host.name}: {tried.stderr} {host.directory / 'log'}"
                )
            time.sleep(0.1)

    def close(self) -> None:
        """End all hosts and all that runs on them."""
        for host in self.hosts.values():
            if host.process is not None and host.process.poll() is None and host.init:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(host.init, signal.SIGKILL)
            if host.process is not None:
                host.process.kill()
                host.process.wait(timeout=30)
        for process in self._started:
            process.kill()
            process.wait(timeout=30)
        for namespace in (*(host.namespace for host in self.hosts.values()), self.switch):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


@contextlib.contextmanager
def hosts(directory: Path, names: Sequence[str] = ("a", "b")) -> Iterator[Rig]:
    """Hosts `names`, with what they need in `directory`, which must be empty or absent.

    Raises RigError.
    """
    _remove_dead()
    directory.mkdir(parents=True, exist_ok=True)
    prefix = f"{_PREFIX}{os.getpid()}-{os.urandom(2).hex()}"
    made = {
        name: Host(
            name, f"10.77.0.{number}", f"{prefix}-{name}", f"to{number}", directory / "hosts" / name
        )
        for number, name in enumerate(names, start=1)
    }
    rig = Rig(directory, made, f"{prefix}-switch")
    try:
        _lay_out(rig)
        for host in made.values():
            rig._boot(host)
        for host in made.values():
            rig._wait_for_ssh(host)
        yield rig
    finally:
        rig.close()


def _lay_out(rig: Rig) -> None:
    """Keys, configurations, directories and the network, before any host runs."""
    for place in (rig.workspace, rig.shared):
        place.mkdir(parents=True)
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
    # Of several values ssh takes the first: those of a host come before those of all.
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
    """A copy of /etc/shadow for a host where sshd would refuse a locked root.

    None where it would not.
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
    """Processes of the namespace whose first one is `init`."""
    try:
        namespace = os.stat(f"/proc/{init}/ns/pid").st_ino
    except FileNotFoundError:
        return []
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.stat(path / "ns" / "pid").st_ino == namespace:
                found.append(int(path.name))
    return found


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
    """Remove network namespaces of rigs whose process was killed."""
    known = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=False
    ).stdout
    for line in known.splitlines():
        name = line.split()[0]
        owner = name.removeprefix(_PREFIX).partition("-")[0]
        if name.startswith(_PREFIX) and owner.isdecimal() and not Path("/proc", owner).exists():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
