"""Hardware of the hosts on which the ranks of a job run."""

import json
from functools import cache
from pathlib import Path

from megacore.cluster.hosts.ssh import Ssh, check_ssh, python, run_on_hosts
from megacore.config.hostfile import hosts_of, is_this_machine
from megacore.config.launch import LaunchConfig
from megacore.errors import HostsSilentError
from megacore.hardware import Hardware

ANSWER_LIMIT = 30.0
"""Seconds for a host to answer, which may read Python from a cold file share first."""


def hardware_of(launch: LaunchConfig) -> Hardware:
    """Return the hardware of the hosts that `launch` names, which are assumed to be equal.

    That is this host's, unless the hostfile has only other hosts: then the first of them that
    answers is asked, once per process. The hosts of a scheduler are not known before a job starts;
    this host's hardware is returned for them.

    Raises:
        ConfigError: the hostfile cannot be used.
        HostsSilentError: no host of the hostfile answers.
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
                try:  # a shell may greet before the answer
                    answer = json.loads(result.output.splitlines()[-1])
                    return Hardware.from_json(answer, host=result.host)
                except (IndexError, KeyError, TypeError, ValueError):
                    problem = f"its answer is {result.output[-100:]!r}"
            problems.append(f"{result.host}: {problem}")
    raise HostsSilentError(
        "no host of launch.hostfile tells its GPUs and memory, by which the run is checked and "
        f"divided ({'; '.join(problems)}): correct launch.hostfile or ssh"
    )
