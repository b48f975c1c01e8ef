"""Plan of a job on several hosts: a file next to the job file that the head reads.

The plan contains no values of variables. It determines the command that starts the ranks of each
host; each rank finds its GPUs and reads the job itself. Imports no torch.
"""

import base64
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from megacore.artifact.files import read_json, regular, write_json
from megacore.cluster.hosts.network import local_address
from megacore.cluster.hosts.ssh import Ssh, python
from megacore.config.hostfile import is_this_machine
from megacore.errors import ConfigError, LaunchError
from megacore.hardware import SHARED_PACKAGES
from megacore.launch.failure import REPEATS, RESUMES
from megacore.paths import is_file

RESUMED = frozenset({"megacore.ranks.pretrain", "megacore.ranks.finetune"})
"""Entry points of the ranks that save checkpoints and resume from them."""
LOOPBACK = "127.0.0.1"
DEFAULT_ENV_FILE = ".deepspeed_env"
"""Name of the default file of variables, in the working directory or else in the home directory.

DeepSpeed's launcher reads the same file.
"""
_LOCAL = "CUDA_VISIBLE_DEVICES"
_ENDPOINT = re.compile(r"(?:\[(?P<address>[^][]+)\]|(?P<host>[^][:]+))(?::(?P<port>[0-9]{1,9}))?")
"""Value of `launch.rdzv_endpoint`; the colons of an IPv6 address need brackets before a port."""
_JOIN_LIMIT = 300
"""Seconds for the rendezvous of all hosts' launchers; some load torch from a slow file system."""


@dataclass(frozen=True)
class Plan:
    """Start of a job's ranks on several hosts."""

    kind: str
    """torchrun or deepspeed."""
    module: str
    """Entry point of each rank."""
    job_file: str
    """Path of the job's JSON file."""
    hosts: dict[str, int]
    """Number of ranks of each host, in the order of the ranks."""
    devices: dict[str, list[int]]
    """GPUs of the ranks of each host whose GPUs were selected."""
    ssh_config: str | None
    forward_env: list[str]
    """Variables whose values here are passed to the other hosts: names, or prefixes that end in *.
    """
    own_env: list[str]
    """Names of the variables that megacore sets for the ranks."""
    env_file: str | None
    interface: str
    rdzv_endpoint: str | None
    host_timeout: float
    stop_grace: float
    stall_limit: float | None
    exit_directory: str
    copy_files: bool
    """True if the other hosts have separate workspaces."""
    retried: bool
    """True if this is not the first attempt: a host that does not answer was reachable before."""
    packages: list[str] = field(default_factory=lambda: [*SHARED_PACKAGES])
    """Packages whose versions must be the same on all hosts."""

    def write(self, path: Path) -> None:
        """Write the plan as JSON, atomically. Raises WorkspaceError."""
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a plan. Raises OSError, ValueError or TypeError."""
        values: dict[str, Any] = read_json(path)
        return cls(**values)

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the ranks' variables, from `environment` and the file. Raises ConfigError."""
        local = {name: value for name, value in environment.items() if name in self.own_env}
        return {**local, **forwarded(environment, self.forward_env, self.env_file)}

    def command(self, number: int, master: str, port: int | str) -> list[str]:
        """Return the command that starts the ranks of host `number`."""
        job_file = Path(self.job_file)
        if self.kind == "torchrun":
            return torchrun_command(
                self.hosts, number, self.module, job_file, master=master, port=port
            )
        devices = {host: self._devices(host, ranks) for host, ranks in self.hosts.items()}
        return deepspeed_command(devices, number, self.module, job_file, master=master, port=port)

    def gpus(self, host: str) -> dict[str, str]:
        """Return the variable with the GPUs of a host's ranks; empty if none were selected."""
        return {_LOCAL: ",".join(map(str, self.devices[host]))} if host in self.devices else {}

    def _devices(self, host: str, ranks: int) -> list[int | str]:
        if host in self.devices:
            return [*self.devices[host]]
        return visible_devices(ranks) if is_this_machine(host) else [*range(ranks)]


def after_retry(module: str) -> str:
    """Return the verb phrase on a retry of ranks with an entry point."""
    return RESUMES if module in RESUMED else REPEATS


def plan_ssh(plan: Plan) -> Ssh:
    """Return the ssh settings of a plan.

    ssh sends no keep-alive messages, because the head and the agents watch each other.
    """
    return Ssh(Path(plan.ssh_config) if plan.ssh_config else None, keep_alive=False)


def meeting_addresses(ssh: Ssh, hosts: Iterable[str], rdzv_endpoint: str | None) -> tuple[str, str]:
    """Return the first host's address for the other hosts, and the second's for the first.

    The address of this host is its local address on the route to the other; nothing is sent. A
    single host has the loopback address. Raises LaunchError.
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
    """Return host and port of `launch.rdzv_endpoint`, with None for what it leaves out.

    An IPv6 address is returned without its brackets. Raises ConfigError.
    """
    if setting is None:
        return None, None
    match = _ENDPOINT.fullmatch(setting)
    if match is None or (match["port"] is not None and not 0 < int(match["port"]) < 2**16):
        raise ConfigError(
            f"launch.rdzv_endpoint is {setting!r}: write `host` or `host:port`, and an IPv6 "
            "address in brackets"
        )
    return match["address"] or match["host"], None if match["port"] is None else int(match["port"])


def torchrun_command(
    hosts: Mapping[str, int],
    number: int,
    module: str,
    job_file: Path,
    *,
    master: str,
    port: int | str,
) -> list[str]:
    """Return torchrun's command for host `number`, with a static rendezvous.

    The static rendezvous suffices because all ranks are known beforehand. The dynamic one unpickles
    data that anybody who reaches the port can write.
    """
    job_file = job_file.absolute()
    return [
        *python("torch.distributed.run", f"--nnodes={len(hosts)}", f"--node-rank={number}"),
        f"--nproc-per-node={[*hosts.values()][number]}",
        *("--max-restarts=0", "--rdzv-backend=static", f"--rdzv-conf=timeout={_JOIN_LIMIT}"),
        *(f"--master-addr={master}", f"--master-port={port}"),
        *(f"--log-dir={job_file.parent / 'torchrun'}", "-m", module, "--config", str(job_file)),
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
    """Return the command of DeepSpeed's launcher for host `number`.

    `devices` contains the GPUs of each host's ranks.
    """
    world = base64.urlsafe_b64encode(json.dumps(devices).encode()).decode()
    return [
        *python("deepspeed.launcher.launch", "--log_level=warning", f"--world_info={world}"),
        *(f"--master_addr={master}", f"--master_port={port}", f"--node_rank={number}"),
        *("--module", module, "--config", str(job_file.absolute())),
    ]


def visible_devices(ranks: int) -> list[int | str]:
    """Return the GPUs of this host's ranks, from CUDA_VISIBLE_DEVICES.

    DeepSpeed's launcher sets that variable without regard to its value.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [*range(ranks)]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [*names[:ranks]] if len(names) >= ranks else ["-1"] * ranks  # hidden GPUs stay hidden


def env_file_of(setting: str | None) -> str | None:
    """Return the path of `launch.env_file`, else of the default file; None without either."""
    if setting is not None:
        return str(Path(setting).absolute())
    defaults = [
        path
        for path in (Path.cwd() / DEFAULT_ENV_FILE, Path.home() / DEFAULT_ENV_FILE)
        if is_file(path)
    ]
    return str(defaults[0]) if defaults else None


def read_env_file(path: Path) -> dict[str, str]:
    """Read variables from a file with lines NAME=VALUE.

    Empty lines and lines that begin with # are ignored.

    Raises:
        ConfigError: the file cannot be read; the message contains no value.
    """
    try:
        lines = regular(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"launch.env_file {path} cannot be read: {reason}: correct launch.env_file"
        ) from error
    variables = {}
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, equals, value = line.strip().partition("=")
            if not equals or not name.replace("_", "a").isalnum() or name[0].isdigit():
                raise ConfigError(
                    f"launch.env_file {path}, line {number} is not of the form NAME=VALUE: correct "
                    "it"
                )
            variables[name] = value
    return variables


def forwarded(
    environment: Mapping[str, str], patterns: Iterable[str], env_file: str | None
) -> dict[str, str]:
    """Return the variables of the ranks on other hosts; those of `env_file` take precedence.

    CUDA_VISIBLE_DEVICES is forwarded only by its full name: it counts this host's GPUs, and on
    other hosts it would hide the wrong ones or replace the scheduler's choice.

    Args:
        environment: variables of this process.
        patterns: `launch.forward_env`, names and prefixes of the variables to forward.
        env_file: path of the file of variables, as `env_file_of` returns it.

    Raises:
        ConfigError: the file cannot be read.
    """
    names = {*patterns}
    prefixes = tuple(pattern[:-1] for pattern in names if pattern.endswith("*"))
    passed = {
        name: value
        for name, value in environment.items()
        if name in names or (name.startswith(prefixes) and name != _LOCAL)
    }
    return passed if env_file is None else passed | read_env_file(Path(env_file))
