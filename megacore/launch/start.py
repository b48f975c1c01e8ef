"""Which launcher starts a job's ranks, where, and in which environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megacore.config.train import LaunchConfig
from megacore.launch import deepspeed_launcher, torchrun
from megacore.launch.deepspeed_launcher import check_programs, command_on
from megacore.launch.hostfile import is_only_here, read_hostfile
from megacore.launch.job import RankJob
from megacore.plan.hardware import Hardware


@dataclass(frozen=True)
class Start:
    """A command for the supervisor."""

    command: list[str]
    env: dict[str, str]
    """Variables beside those of this process."""


def start_here(module: str, job: RankJob, job_file: Path) -> Start:
    """The job's ranks on this machine through torchrun, one of them as a plain process."""
    return Start(torchrun.command(module, job_file, job.ranks), torchrun.rank_environment(job.threads_per_rank))


def check_launcher(launch: LaunchConfig) -> None:
    """Raise, before anything runs, what `start_ranks` would for want of a hostfile or a program."""
    hosts = read_hostfile(launch.hostfile) if launch.hostfile else {}
    if not is_only_here(hosts):
        check_programs(hosts)


def start_ranks(
    launch: LaunchConfig, module: str, job: RankJob, job_file: Path, env: Mapping[str, str] | None = None
) -> Start:
    """The job's ranks as `launch` says, on the hosts of its hostfile if there is one.

    Args:
        launch: what starts them.
        module: entry point of each.
        job: what they do.
        job_file: where that is written.
        env: variables for each, beside the usual ones.

    Raises:
        ConfigError: the hostfile cannot be read.
        LaunchError: other machines are to be reached and pdsh or ssh is not installed.
    """
    hosts = read_hostfile(launch.hostfile) if launch.hostfile else {}
    alone = is_only_here(hosts)
    env = {**torchrun.rank_environment(job.threads_per_rank, one_machine=alone), **(env or {})}
    if not alone:
        return Start(command_on(hosts, module, job_file, environment=env, grace=launch.stop_grace), {})
    if launch.launcher == "torchrun" or job.ranks == 1:
        return Start(torchrun.command(module, job_file, job.ranks), env)
    if not Hardware.detect().gpus:
        env["DS_ACCELERATOR"] = os.environ.get("DS_ACCELERATOR", "cpu")
    return Start(deepspeed_launcher.command(module, job_file, job.ranks), env)
