"""The entry point of each machine of a Slurm job, which srun starts once on each.

python -m megacore.cluster.batch.slurm_node --spec FILE --token TOKEN
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from megacore.cluster.batch.meeting import meeting_place
from megacore.cluster.batch.node import Place, run_node
from megacore.cluster.batch.spec import BatchSpec
from megacore.cluster.hosts.network import local_address
from megacore.errors import LaunchError, MegacoreError

_TIMEOUT = 60.0


def main(arguments: list[str] | None = None) -> int:
    """Run this machine's part of the batch job; what to exit with."""
    parser = argparse.ArgumentParser(
        prog="megacore.cluster.batch.slurm_node", description=main.__doc__
    )
    parser.add_argument("--spec", type=Path, required=True, help="the batch job, as JSON")
    parser.add_argument("--token", required=True, help="of the submission")
    options = parser.parse_args(arguments)
    try:
        spec = BatchSpec.read(options.spec)
        return run_node(spec, options.token, place_of(spec, os.environ))
    except MegacoreError as error:
        parser.exit(error.exit_code, f"{error}\n")


def place_of(spec: BatchSpec, environment: Mapping[str, str]) -> Place:
    """Where this process stands, from Slurm's variables. Raises LaunchError."""
    try:
        rank, nodes = int(environment["SLURM_NODEID"]), int(environment["SLURM_JOB_NUM_NODES"])
        tasks, listed = int(environment["SLURM_NTASKS"]), environment["SLURM_JOB_NODELIST"]
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"this process is to be started by srun, and {error} is not as srun sets it"
        ) from error
    names = _hostnames(listed)
    if len(names) != nodes or tasks != nodes:
        raise LaunchError(
            f"Slurm started {tasks} processes on {nodes} machines ({listed}): the batch script "
            "must let srun start one on each (--ntasks-per-node=1)"
        )
    cores = len(os.sched_getaffinity(0))
    cpus = min(cores, int(environment.get("SLURM_CPUS_ON_NODE", cores)))
    # srun runs on the first machine, and says under which address the others reach it.
    first = environment.get("SLURM_LAUNCH_NODE_IPADDR") or names[0]
    if rank == 0:
        return Place(rank, names, cpus, *meeting_place(spec.launch.rdzv_endpoint, first))
    return Place(rank, names, cpus, _own_address(names[rank], first), 0)


def _own_address(name: str, first: str) -> str:
    """This machine's address on the way to the first one.

    No name of a machine need be known to others.
    """
    try:
        return local_address(first)
    except OSError as error:
        raise LaunchError(
            f"{name} finds no way to {first}, the job's first machine: {error}"
        ) from error


def _hostnames(listed: str) -> list[str]:
    """The machines of a list as `node[1-3]`, one by one."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", listed],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"scontrol cannot say which machines {listed} are: {error}") from error
    return done.stdout.split()


if __name__ == "__main__":
    sys.exit(main())
