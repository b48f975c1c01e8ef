"""Hardware of the hosts on which the ranks of a job run."""

import logging
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from megacore.artifact.files import read_json, write_json
from megacore.artifact.workspace import workspace_root
from megacore.cluster.hosts.ssh import Ssh, check_ssh, python, run_on_hosts
from megacore.config.hostfile import hosts_of, is_this_machine
from megacore.config.launch import LaunchConfig
from megacore.errors import FileAccessError, HostsSilentError
from megacore.hardware import Hardware
from megacore.paths import is_dir

ANSWER_LIMIT = 30.0
"""Seconds for a host to answer, which may read Python from a cold file share first."""
ANSWERS_NAME = "host_hardware.json"
"""Name of the workspace's file with the last answer of each host."""

_log = logging.getLogger(__name__)


def hardware_of(launch: LaunchConfig) -> Hardware:
    """Return the hardware of the hosts that `launch` names, which are assumed to be equal.

    That is this host's, unless the hostfile has only other hosts: then the first of them that
    answers is asked, once per process. If none answers, the newest answer recorded in the workspace
    is used, with a warning: it suffices to find keys and cached stages, and ranks that start fail
    at the silent host. The hosts of a scheduler are not known before a job starts; this host's
    hardware is returned for them.

    Raises:
        ConfigError: the hostfile cannot be used.
        HostsSilentError: no host of the hostfile answers, or ever did.
        WorkspaceError: the answer cannot be written into the workspace.
        LaunchError: ssh is not installed, or torch is for an accelerator that megacore does not
            support.
    """
    hosts = tuple(hosts_of(launch))
    if launch.has_scheduler or not hosts or any(map(is_this_machine, hosts)):
        return Hardware.detect()
    return _first_answer(hosts, launch.ssh_config)


@cache
def _first_answer(hosts: tuple[str, ...], ssh_config: str | None) -> Hardware:
    """Return the hardware of the first host that answers: the first one, else any other."""
    check_ssh(hosts)
    ssh = Ssh(None if ssh_config is None else Path(ssh_config).absolute())
    problems = []
    for asked in filter(None, (hosts[:1], hosts[1:])):
        for result in run_on_hosts(ssh, asked, python("megacore.hardware"), timeout=ANSWER_LIMIT):
            problem = result.problem
            if problem is None:
                try:
                    hardware = Hardware.from_json(result.answer(), host=result.host)
                    _remember(hardware, ssh_config)
                    return hardware
                except (KeyError, TypeError, ValueError):
                    problem = f"its answer is {result.output[-100:]!r}"
            problems.append(f"{result.host}: {problem}")
    remembered = _remembered(hosts, ssh_config)
    if remembered is not None:
        hardware, since = remembered
        _log.warning(
            "no host of launch.hostfile answers (%s): the hardware that %s told on %s counts",
            "; ".join(problems),
            hardware.host,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since)),
        )
        return hardware
    raise HostsSilentError(
        "no host of launch.hostfile tells its GPUs and memory, by which the run is checked and "
        f"divided ({'; '.join(problems)}): correct launch.hostfile or ssh"
    )


def _remember(hardware: Hardware, ssh_config: str | None) -> None:
    """Write a host's answer into the workspace, if that exists."""
    if is_dir(workspace_root()):
        answer = {
            "time": time.time(),
            "ssh_config": ssh_config,
            "hardware": {**hardware.to_json(), "host": None},
        }
        write_json(workspace_root() / ANSWERS_NAME, _answers() | {str(hardware.host): answer})


def _remembered(hosts: tuple[str, ...], ssh_config: str | None) -> tuple[Hardware, float] | None:
    """Return the newest answer of one of the hosts, and its Unix time; None if there is none."""
    newest = None
    for host, answer in _answers().items():
        # Another ssh configuration may give the name to another host.
        if host not in hosts or answer.get("ssh_config") != ssh_config:
            continue
        with suppress(KeyError, TypeError, ValueError):  # of another version
            remembered = Hardware.from_json(answer["hardware"], host=host), float(answer["time"])
            newest = remembered if newest is None or remembered[1] > newest[1] else newest
    return newest


def _answers() -> dict[str, dict[str, Any]]:
    """Return the answers in the workspace by host; empty if there are none or they are damaged."""
    path = workspace_root() / ANSWERS_NAME
    try:
        answers = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, FileAccessError) as error:
        _log.warning("%s cannot be read (%s): the next answer of a host replaces it", path, error)
        return {}
    entries = answers.items() if isinstance(answers, dict) else ()
    return {host: answer for host, answer in entries if isinstance(answer, dict)}
