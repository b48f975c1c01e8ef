"""Start of ranks through a scheduler: checks, the follower's command, and the dry run."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.artifact.workspace import workspace_root
from megacore.cluster.batch.follow import SCHEDULERS
from megacore.cluster.batch.spec import FOLLOWER_LIMIT, STOP_MARGIN, BatchSpec, ranks_per_node
from megacore.cluster.hosts.plan import env_file_of, forwarded
from megacore.cluster.hosts.ssh import python
from megacore.config.launch import LaunchConfig
from megacore.errors import LaunchError, ParallelLayoutError
from megacore.jobs.run import Job, RankJob
from megacore.launch.guard import JOB_VARIABLE
from megacore.plan.layouts import layout_of

if TYPE_CHECKING:
    from megacore.cluster.start import Start

_PLACEHOLDER = "00000000"
"""Placeholder in a dry run for the random part of a job's name."""


def check_batch(launch: LaunchConfig) -> None:
    """Check the configuration and the programs of a batch job, before anything runs.

    Raises:
        ConfigError: a value is missing or cannot be used.
        LaunchError: the scheduler's programs are not installed.
    """
    ranks_per_node(launch)
    scheduler = SCHEDULERS[launch.kind]
    scheduler.check(launch)
    for program in scheduler.programs:
        if shutil.which(program) is None:
            raise LaunchError(
                f"launch.kind is {launch.kind} and {program} is not installed here: run the flow "
                "where it is, or set launch.kind to torchrun"
            )


def start_batch(
    launch: LaunchConfig,
    module: str,
    job: RankJob,
    job_file: Path,
    env: Mapping[str, str],
) -> "Start":
    """Build the command that submits the ranks to the scheduler of `launch` and follows them.

    The job file has the same path on all nodes, and `env` has additional variables for each rank.

    Raises:
        ConfigError: a value is missing or cannot be used, including launch.env_file.
        ParallelLayoutError: the model cannot be divided among the ranks of a number of nodes that
            the scheduler may grant.
        LaunchError: the scheduler's programs are not installed.
        WorkspaceError: the specification cannot be written.
    """
    from megacore.cluster.start import Start

    check_batch(launch)
    spec = _specification(launch, module, job, job_file, env)
    _check_layouts(spec, job)
    spec.write()
    return Start(
        python("megacore.cluster.batch.follow", f"--spec={spec.path}"),
        {},
        stop_margin=STOP_MARGIN,
        again=spec.again,
    )


def show_batch(
    launch: LaunchConfig, module: str, job: RankJob, job_file: Path
) -> tuple[list[str], str]:
    """Return the command and the script or manifest of a batch job, for a dry run.

    Nothing is written. Raises the other errors of `start_batch`.
    """
    check_batch(launch)
    spec = _specification(launch, module, job, job_file, {})
    _check_layouts(spec, job)
    scheduler = SCHEDULERS[launch.kind](spec)
    return scheduler.command(), scheduler.text(_PLACEHOLDER)


def _specification(
    launch: LaunchConfig, module: str, job: RankJob, job_file: Path, env: Mapping[str, str]
) -> BatchSpec:
    from megacore.cluster.start import TUNABLES

    names = (*launch.forward_env, TUNABLES)
    passed = forwarded(os.environ, names, env_file_of(launch.env_file))
    passed.pop(JOB_VARIABLE, None)
    job_file = job_file.absolute()
    return BatchSpec(
        module=module,
        job_file=str(job_file),
        exit_directory=str(Path(job.exit_directory).absolute()),
        launch=launch,
        environment={**passed, **env},
        directory=os.getcwd(),
        python=sys.executable,
        workspace=str(workspace_root()),
        follower_limit=FOLLOWER_LIMIT,
        packages=job.packages,
    )


def _check_layouts(spec: BatchSpec, job: RankJob) -> None:
    """Raise ParallelLayoutError unless the minimum number of nodes can share the model.

    Otherwise a job could wait in the queue and then fail at its start.
    """
    if not isinstance(job, Job):
        return
    minimum, maximum = spec.nodes
    try:
        layout_of(job.config, minimum * spec.ranks_per_node, job.vocab_size)
    except ParallelLayoutError as error:
        if minimum == maximum:
            raise
        raise ParallelLayoutError(
            f"launch.nnodes is {spec.launch.nnodes}, and {spec.launch.kind} may give {minimum} "
            f"machines: {error}"
        ) from error
