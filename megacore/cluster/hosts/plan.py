"""What the head of a job over several machines has to know, in a file beside the job.

It holds no value of a variable. The command for each machine's ranks is made of it; each rank finds
its own GPUs and reads the job there. Imports no torch.
"""

import base64
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from megacore.artifact.files import read_json, write_json
from megacore.cluster.hosts.network import local_address
from megacore.cluster.hosts.ssh import Ssh
from megacore.config.hostfile import is_this_machine
from megacore.errors import ConfigError, LaunchError

LOOPBACK = "127.0.0.1"
DEFAULT_ENV_FILE = ".deepspeed_env"
"""Where DeepSpeed's launcher looks for variables, too: in the working directory, else in the home
directory."""
_JOIN_LIMIT = 300
"""Seconds in which the launchers of all machines must have met: some load torch from a slow file
system."""


@dataclass(frozen=True)
class Plan:
    """A job's ranks on several machines."""

    kind: str
    """torchrun or deepspeed."""
    module: str
    """Entry point of each rank."""
    job_file: str
    """What they do."""
    hosts: dict[str, int]
    """Ranks of each machine, in the order of the ranks."""
    devices: dict[str, list[int]]
    """GPUs of the ranks, of the machines where they were chosen."""
    ssh_config: str | None
    forward_env: list[str]
    """Variables that the other machines get as they are here, by name or with * at the end."""
    own_env: list[str]
    """Names of those that are set here for the ranks."""
    env_file: str | None
    interface: str
    rdzv_endpoint: str | None
    host_timeout: float
    stop_grace: float
    stall_limit: float | None
    exit_directory: str
    copy_files: bool
    """Whether the other machines have another workspace than this one."""
    retried: bool
    """Whether this is no first attempt, so that a machine that does not answer was there before."""

    def write(self, path: Path) -> None:
        """Write it as JSON, atomically. Raises WorkspaceError."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read it back. Raises OSError, ValueError or TypeError."""
        values: dict[str, Any] = read_json(path)
        return cls(**values)

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The ranks' variables, out of those of this process and the file. Raises ConfigError."""
        passed = {name: value for name, value in environment.items() if self._passes(name)}
        return {**passed, **({} if self.env_file is None else read_env_file(Path(self.env_file)))}

    def command(self, number: int, master: str, port: int | str) -> list[str]:
        """What starts the ranks of the machine with this number."""
        job_file = Path(self.job_file)
        if self.kind == "torchrun":
            return torchrun_command(
                self.hosts, number, self.module, job_file, master=master, port=port
            )
        devices = {host: self._devices(host, ranks) for host, ranks in self.hosts.items()}
        return deepspeed_command(devices, number, self.module, job_file, master=master, port=port)

    def gpus(self, host: str) -> dict[str, str]:
        """The variable that shows the ranks of a machine its GPUs, where they were chosen."""
        return (
            {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.devices[host]))}
            if host in self.devices
            else {}
        )

    def _devices(self, host: str, ranks: int) -> list[int | str]:
        if host in self.devices:
            return [*self.devices[host]]
        return visible_devices(ranks) if is_this_machine(host) else [*range(ranks)]

    def _passes(self, name: str) -> bool:
        return name in self.own_env or any(_matches(name, pattern) for pattern in self.forward_env)


def plan_ssh(plan: Plan) -> Ssh:
    """How the plan's machines are reached.

    Both sides of these connections see for themselves whether they live.
    """
    return Ssh(Path(plan.ssh_config) if plan.ssh_config else None, keep_alive=False)


def meeting_addresses(ssh: Ssh, hosts: Iterable[str], rdzv_endpoint: str | None) -> tuple[str, str]:
    """The first machine's address as others reach it, and the second's as the first does.

    That of this machine is its own on the way to the other; nothing is sent to find it out. A
    machine by itself is reached through its loopback interface. Raises LaunchError.
    """
    names = [*hosts]
    if len(names) == 1:
        return endpoint(rdzv_endpoint)[0] or LOOPBACK, LOOPBACK
    first, second = names[:2]
    return endpoint(rdzv_endpoint)[0] or _address(ssh, first, second), _address(ssh, second, first)


def _address(ssh: Ssh, host: str, other: str) -> str:
    if not is_this_machine(host):
        return ssh.address(host)
    address = ssh.address(other)
    try:
        return local_address(address)
    except OSError as error:
        raise LaunchError(
            f"no way leads from here to {other} ({address}: {error.strerror}): set "
            "launch.rdzv_endpoint to this machine's address"
        ) from error


def endpoint(setting: str | None) -> tuple[str | None, int | None]:
    """Host and port of `launch.rdzv_endpoint`, None for what it does not say.

    Raises ConfigError.
    """
    if setting is None:
        return None, None
    host, colon, port = setting.rpartition(":")
    if not colon:
        return setting, None
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ConfigError(f"launch.rdzv_endpoint is {setting!r}: write `host` or `host:port`")
    return host, int(port)


def torchrun_command(
    hosts: Mapping[str, int],
    number: int,
    module: str,
    job_file: Path,
    *,
    master: str,
    port: int | str,
) -> list[str]:
    """Torchrun on the machine with this number.

    All ranks are known beforehand: its rendezvous has nothing to find out.

    Its dynamic one unpickles what whoever reaches the port wrote.
    """
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(
            f"--nnodes={len(hosts)}",
            f"--node-rank={number}",
            f"--nproc-per-node={[*hosts.values()][number]}",
        ),
        *("--max-restarts=0", "--rdzv-backend=static", f"--rdzv-conf=timeout={_JOIN_LIMIT}"),
        *(f"--master-addr={master}", f"--master-port={port}"),
        *(
            f"--log-dir={job_file.absolute().parent / 'torchrun'}",
            "-m",
            module,
            "--config",
            str(job_file.absolute()),
        ),
    ]


def deepspeed_command(
    devices: Mapping[str, Sequence[int | str]],
    number: int,
    module: str,
    job_file: Path,
    *,
    master: str,
    port: int | str,
) -> list[str]:
    """DeepSpeed's launcher on the machine with this number.

    `devices` are the GPUs of each machine's ranks.
    """
    world = base64.urlsafe_b64encode(json.dumps(devices).encode()).decode()
    return [
        *(
            sys.executable,
            "-m",
            "deepspeed.launcher.launch",
            "--log_level=warning",
            f"--world_info={world}",
        ),
        *(f"--master_addr={master}", f"--master_port={port}", f"--node_rank={number}"),
        *("--module", module, "--config", str(job_file.absolute())),
    ]


def visible_devices(ranks: int) -> list[int | str]:
    """The GPUs of this machine's ranks.

    DeepSpeed's launcher sets CUDA_VISIBLE_DEVICES without looking at it.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [*range(ranks)]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [*names[:ranks]] if len(names) >= ranks else ["-1"] * ranks  # hidden GPUs stay hidden


def env_file_of(setting: str | None) -> str | None:
    """The file that `launch.env_file` names, else the default one where there is one."""
    if setting is not None:
        return str(Path(setting).absolute())
    found = [
        path
        for path in (Path.cwd() / DEFAULT_ENV_FILE, Path.home() / DEFAULT_ENV_FILE)
        if path.is_file()
    ]
    return str(found[0]) if found else None


def read_env_file(path: Path) -> dict[str, str]:
    """Variables of a file with lines NAME=VALUE.

    Empty lines and those that begin with # are left out.

    Raises ConfigError, which never holds a value.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"launch.env_file {path} cannot be read: {reason}: correct launch.env_file"
        ) from error
    found = {}
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, equals, value = line.strip().partition("=")
            if not equals or not name.replace("_", "a").isalnum() or name[0].isdigit():
                raise ConfigError(
                    f"launch.env_file {path}, line {number} is not of the form NAME=VALUE: correct "
                    "it"
                )
            found[name] = value
    return found


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
