"""Which launcher starts a job's ranks, where, and in which environment."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megacore.cluster import rank_commands
from megacore.cluster.hosts.connection import agent_words
from megacore.cluster.hosts.plan import (
    Plan,
    endpoint,
    env_file_of,
    meeting_addresses,
    plan_ssh,
    read_env_file,
)
from megacore.cluster.hosts.ssh import Ssh, check_ssh, python
from megacore.config.hostfile import devices_of, hosts_of, is_only_here
from megacore.config.launch import LaunchConfig
from megacore.errors import ConfigError
from megacore.hardware import Hardware
from megacore.jobs.run import RankJob

PLAN_NAME = "hosts.json"
"""Beside the job: what is started on which machine."""
_STOP_MARGIN = 4.0
"""Seconds by which the machines' ends may come later than the grace of their ranks."""


@dataclass(frozen=True)
class Start:
    """A command for the supervisor."""

    command: list[str]
    env: dict[str, str]
    """Variables beside those of this process."""
    hosts: tuple[str, ...] = ()
    """Machines whose agents watch their ranks; empty where the supervisor itself does."""
    stop_margin: float = 0.0
    """Seconds that the command needs beyond the ranks' own grace when it is asked to stop."""


def start_ranks(
    launch: LaunchConfig,
    module: str,
    job: RankJob,
    job_file: Path,
    env: Mapping[str, str] | None = None,
) -> Start:
    """The job's ranks as `launch` says, on its hosts if there are some.

    Args:
        launch: what starts them.
        module: entry point of each.
        job: what they do.
        job_file: where that is written.
        env: variables for each, beside the usual ones.

    Raises:
        ConfigError: the hostfile or the file of variables cannot be read.
        LaunchError: other machines are to be reached and ssh is not installed.
    """
    hosts = job.hosts or hosts_of(launch)
    if launch.kind in ("slurm", "kubernetes"):
        from megacore.cluster.batch.start import start_batch

        return start_batch(launch, module, job, job_file, env)
    if not is_only_here(hosts):
        check_ssh(hosts)
        variables = {
            **rank_commands.rank_environment(job.threads_per_rank, one_machine=len(hosts) == 1),
            **(env or {}),
        }
        plan_path = job_file.absolute().with_name(PLAN_NAME)
        plan_of(launch, module, job, job_file, hosts, own_env=[*variables]).write(plan_path)
        return Start(
            python("megacore.cluster.hosts.fanout", "--plan", str(plan_path)),
            variables,
            tuple(hosts),
            _STOP_MARGIN,
        )
    return _start_alone(launch, module, job, job_file, env or {})


def _start_alone(
    launch: LaunchConfig,
    module: str,
    job: RankJob,
    job_file: Path,
    env: Mapping[str, str],
    *,
    shown: bool = False,
) -> Start:
    """The job's ranks on this machine, without ssh."""
    variables = {**rank_commands.rank_environment(job.threads_per_rank), **env}
    hosts = job.hosts or hosts_of(launch)
    devices = next((slots for host, slots in devices_of(launch).items() if host in hosts), None)
    if devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    # of which this one is left, and keeps the variables that all had
    several = not is_only_here(hosts_of(launch))
    env_file = env_file_of(launch.env_file) if several else launch.env_file
    if env_file is not None:
        variables |= read_env_file(Path(env_file))
    if launch.kind == "torchrun" or job.ranks == 1:
        return Start(
            rank_commands.torchrun_alone(module, job_file, job.ranks, shown=shown), variables
        )
    if not Hardware.detect().gpus:
        variables["DS_ACCELERATOR"] = os.environ.get("DS_ACCELERATOR", "cpu")
    command = rank_commands.deepspeed_alone(
        module, job_file, job.ranks, devices=devices, shown=shown
    )
    return Start(command, variables)


def start_here(module: str, job: RankJob, job_file: Path) -> Start:
    """The job's ranks on this machine through torchrun, one of them as a plain process."""
    return Start(
        rank_commands.torchrun_alone(module, job_file, job.ranks),
        rank_commands.rank_environment(job.threads_per_rank),
    )


def plan_of(
    launch: LaunchConfig,
    module: str,
    job: RankJob,
    job_file: Path,
    hosts: Mapping[str, int],
    *,
    own_env: list[str],
) -> Plan:
    """What the head of a job on `hosts` has to know.

    `own_env` are the names of the variables set for it.
    """
    return Plan(
        kind=launch.kind,
        module=module,
        job_file=str(job_file.absolute()),
        hosts=dict(hosts),
        devices={host: [*slots] for host, slots in devices_of(launch).items() if host in hosts},
        ssh_config=None if launch.ssh_config is None else str(Path(launch.ssh_config).absolute()),
        forward_env=[*launch.forward_env],
        own_env=own_env,
        env_file=env_file_of(launch.env_file),
        interface=launch.interface,
        rdzv_endpoint=launch.rdzv_endpoint,
        host_timeout=launch.host_timeout,
        stop_grace=launch.stop_grace,
        stall_limit=launch.stall_limit,
        exit_directory=str(Path(job.exit_directory).absolute()),
        copy_files=launch.data_placement == "node_local",
        retried=getattr(job, "attempt", 1) > 1,
    )


def shown_commands(launch: LaunchConfig, module: str, job: RankJob, job_file: Path) -> list[str]:
    """For a dry run: the command of each host, as one line with its name.

    With a scheduler, its command and its batch job.

    Nothing is written, no host is reached, and no value of a variable is shown but those that
    choose GPUs. What a start finds out by itself stands in angle brackets. Raises what
    `start_ranks` does.
    """
    if launch.kind in ("slurm", "kubernetes"):
        from megacore.cluster.batch.start import show_batch

        command, text = show_batch(launch, module, job, job_file)
        return [shlex.join(command), *text.splitlines()]
    hosts = job.hosts or hosts_of(launch)
    if is_only_here(hosts):
        start = _start_alone(launch, module, job, job_file, {}, shown=True)
        gpus = {name: value for name, value in start.env.items() if name == "CUDA_VISIBLE_DEVICES"}
        return [f"{next(iter(hosts), 'this machine')}: {_line(gpus, start.command)}"]
    check_ssh(hosts)
    own = rank_commands.rank_environment(job.threads_per_rank, one_machine=len(hosts) == 1)
    plan = plan_of(launch, module, job, job_file, hosts, own_env=[*own])
    ssh, names = plan_ssh(plan), sorted(plan.variables({**os.environ, **own}))
    master, _ = meeting_addresses(ssh, hosts, launch.rdzv_endpoint)
    port = endpoint(launch.rdzv_endpoint)[1] or "<free port>"
    lines = []
    for number, host in enumerate(hosts):
        lines.append(
            f"{host}: "
            f"{shlex.join(ssh.command(host, agent_words('<job>', host, number, os.environ)))}"
        )
        gpus = plan.gpus(host)
        lines.append(f"{host}: its agent runs {_line(gpus, plan.command(number, master, port))}")
    return [*lines, f"with the variables {', '.join(names)}"]


def _line(variables: Mapping[str, str], command: list[str]) -> str:
    words = [f"{name}={value}" for name, value in variables.items()]
    return shlex.join([*(["env", *words] if words else []), *command])


def check_launcher(launch: LaunchConfig) -> None:
    """Raise, before anything runs, what `start_ranks` would for want of a file or a program."""
    if launch.kind in ("slurm", "kubernetes"):
        from megacore.cluster.batch.start import check_batch

        check_batch(launch)
    check_ssh(hosts_of(launch))
    if launch.ssh_config is not None and not Path(launch.ssh_config).is_file():
        raise ConfigError(
            f"launch.ssh_config {launch.ssh_config} is not there: correct launch.ssh_config"
        )
    endpoint(launch.rdzv_endpoint)
    if launch.env_file is not None:
        read_env_file(Path(launch.env_file))


def ssh_of(launch: LaunchConfig) -> Ssh:
    """How the hosts are reached."""
    return Ssh(None if launch.ssh_config is None else Path(launch.ssh_config).absolute())
