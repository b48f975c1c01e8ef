"""DeepSpeed's launcher: on this machine, or on those of a hostfile through pdsh and ssh.

DeepSpeed is started as a program and not imported. Of its two programs this is the inner one, which starts the ranks
of one machine (`deepspeed.launcher.launch`). The outer one (`deepspeed`, `deepspeed.launcher.runner`) passes on few
variables, reads files of the home directory, and ends a job by killing every DeepSpeed launcher of the user on all
hosts, those of other jobs too: its part is done here.
"""

import base64
import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megacore.errors import LaunchError

_PASSED_ON = ("MEGACORE_", "DS_", "PYTHON", "TORCH_", "NCCL_", "GLOO_", "UCX_")
"""Beginnings of the variables that the other machines get as they are here; DeepSpeed's own are among them."""


def command(module: str, config_path: Path, ranks: int) -> list[str]:
    """What starts `python -m module --config config_path` as `ranks` processes of this machine.

    They meet at 127.0.0.1, on a port that is free now; the GPUs are the first ones that are visible.
    """
    node = _node({"localhost": _devices(ranks)}, "127.0.0.1", free_port())
    return [sys.executable, *node, "--node_rank=0", *_program(module, config_path)]


def command_on(
    hosts: Mapping[str, int], module: str, config_path: Path, *, environment: Mapping[str, str], grace: float
) -> list[str]:
    """What starts `python -m module --config config_path` on every host, once per slot.

    pdsh says to each its position in the list (%n). Each host's ranks run under a guard, which ends them when the
    connection to it does. They meet at MASTER_ADDR, else at the first host as the hostfile names it, on port
    MASTER_PORT, else one that is free here.

    Args:
        hosts: ranks of each.
        module: entry point of each rank.
        config_path: the job, at the same path on every host.
        environment: variables for the ranks, beside those of this process that concern them.
        grace: seconds between asking ranks to stop and killing them.

    Raises:
        LaunchError: pdsh or ssh is not installed.
    """
    check_programs(hosts)
    master = os.environ.get("MASTER_ADDR") or next(iter(hosts)).rpartition("@")[2]
    port = int(os.environ.get("MASTER_PORT") or free_port())
    variables = {**_passed_on(), **environment}
    node = [
        *("exec", "env", *(f"{name}={value}" for name, value in sorted(variables.items()))),
        *(sys.executable, "-m", "megacore.launch.guard", f"--grace={grace:g}", "--"),
        *(sys.executable, *_node({host: list(range(slots)) for host, slots in hosts.items()}, master, port)),
    ]
    line = f"cd {_quoted([os.getcwd()])} && {_quoted(node)} --node_rank=%n {_quoted(_program(module, config_path))}"
    return ["pdsh", "-S", "-R", "ssh", "-f", str(len(hosts)), "-w", ",".join(hosts), line]


def check_programs(hosts: Iterable[str]) -> None:
    """Raise LaunchError where what reaches other machines is not installed."""
    for program in ("pdsh", "ssh"):
        if shutil.which(program) is None:
            raise LaunchError(
                f"the ranks of {', '.join(hosts)} are started by pdsh over ssh, and {program} is not installed: "
                f"install it (apt-get install pdsh openssh-client), or let launch.hostfile name this machine alone"
            )


def free_port() -> int:
    """A port that is free on this machine now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _node(devices: Mapping[str, Sequence[int | str]], master: str, port: int) -> list[str]:
    """Python's arguments for DeepSpeed's launcher on one of the hosts, up to the host's position."""
    world = base64.urlsafe_b64encode(json.dumps(devices).encode()).decode()
    return [
        *("-m", "deepspeed.launcher.launch", "--log_level=warning", f"--world_info={world}"),
        *(f"--master_addr={master}", f"--master_port={port}"),
    ]


def _program(module: str, config_path: Path) -> list[str]:
    return ["--module", module, "--config", str(config_path.absolute())]


def _devices(ranks: int) -> list[int | str]:
    """The GPUs of this machine's ranks: DeepSpeed's launcher sets CUDA_VISIBLE_DEVICES without looking at it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [*range(ranks)]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [*names[:ranks]] if len(names) >= ranks else ["-1"] * ranks  # hidden GPUs stay hidden


def _passed_on() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}


def _quoted(arguments: Sequence[str]) -> str:
    """As a shell reads them, after pdsh has replaced what begins with %."""
    return shlex.join(arguments).replace("%", "%%")
