"""Starting ranks through a scheduler.

What is checked beforehand, the follower's command, and what a dry run shows.
"""

import fnmatch
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.cluster.batch.kubernetes import KubernetesJob
from megacore.cluster.batch.slurm import SlurmJob
from megacore.cluster.batch.spec import FOLLOWER_LIMIT, STOP_MARGIN, BatchSpec, ranks_per_node
from megacore.cluster.hosts.plan import env_file_of, read_env_file
from megacore.cluster.hosts.ssh import python
from megacore.config.launch import LaunchConfig
from megacore.errors import ConfigError, LaunchError, ParallelLayoutError
from megacore.jobs.run import Job, RankJob
from megacore.launch.guard import JOB_VARIABLE
from megacore.plan.layouts import layout_of

if TYPE_CHECKING:
    from megacore.cluster.start import Start

_PROGRAMS = {"slurm": ("sbatch", "scontrol", "squeue", "scancel"), "kubernetes": ("kubectl",)}
_NOT_TO_FOLLOW = (
    *(
        "-a",
        "--array",
        "-o",
        "--output",
        "-e",
        "--error",
        "-W",
        "--wait",
        "--wrap",
        "--test-only",
        "-Q",
        "--quiet",
    ),
    *("-J", "--job-name", "-M", "--clusters", "--open-mode"),
)
"""Options of sbatch with which the job, or its output, would not be found."""
_PLACEHOLDER = "00000000"
"""Stands for the random part of a job's name in what a dry run shows."""


def check_batch(launch: LaunchConfig) -> None:
    """Raise, before anything runs, what a batch job could not be started for.

    Raises:
        ConfigError: a value is missing or cannot be used.
        LaunchError: the scheduler's programs are not installed.
    """
    ranks_per_node(launch)
    for word in launch.slurm.arguments:
        _check_argument(word)
    if launch.kind == "kubernetes":
        _check_kubernetes(launch)
    own = launch.slurm if launch.kind == "slurm" else launch.kubernetes
    if own.template is not None and not Path(own.template).is_file():
        raise ConfigError(
            f"launch.{launch.kind}.template is {own.template!r}, and there is no such file: "
            "correct it, or set it to null"
        )
    for program in _PROGRAMS[launch.kind]:
        if shutil.which(program) is None:
            raise LaunchError(
                f"launch.kind is {launch.kind} and {program} is not installed here: run the flow "
                "where it is, or set launch.kind to torchrun"
            )


def _check_argument(word: str) -> None:
    """A word that is no option would be taken for the script.

    sbatch takes the beginning of a long option for it.
    """
    if not word.startswith("-"):
        raise ConfigError(
            f"launch.slurm.arguments has {word!r}, which is no option: write each option with its "
            "value as one word, as --constraint=h100"
        )
    name = word.partition("=")[0] if word.startswith("--") else word[:2]
    if any(
        option == name or (option.startswith(name) and len(name) > len("--"))
        for option in _NOT_TO_FOLLOW
    ):
        raise ConfigError(
            f"launch.slurm.arguments has {word}, with which the job could not be followed: leave "
            "it out"
        )


def _check_kubernetes(launch: LaunchConfig) -> None:
    own = launch.kubernetes
    if own.image is None:
        raise ConfigError(
            "launch.kind is kubernetes without launch.kubernetes.image: name the image that pods "
            "run"
        )
    if own.workspace_claim is None:
        raise ConfigError(
            "launch.kind is kubernetes without launch.kubernetes.workspace_claim: name the "
            "PersistentVolumeClaim with the workspace"
        )
    if launch.elastic:
        raise ConfigError(
            f"launch.nnodes is {launch.nnodes}, and a JobSet has a fixed number of pods: give one "
            "number"
        )


def start_batch(
    launch: LaunchConfig,
    module: str,
    job: RankJob,
    job_file: Path,
    env: Mapping[str, str] | None = None,
) -> "Start":
    """The command that submits the ranks to the scheduler of `launch` and follows them.

    Args:
        launch: the scheduler and what it is asked for.
        module: entry point of each rank.
        job: what they do.
        job_file: where that is written, seen by all machines at this path.
        env: variables for each rank, beside the usual ones.

    Raises:
        ConfigError: a value is missing or cannot be used, launch.env_file among them.
        ParallelLayoutError: the model does not fit a number of machines that the scheduler may
            give.
        LaunchError: the scheduler's programs are not installed.
        WorkspaceError: the specification cannot be written.
    """
    from megacore.cluster.start import Start

    check_batch(launch)
    spec = _specification(launch, module, job, job_file, env or {})
    _check_layouts(spec, job)
    spec.write()
    return Start(
        python("megacore.cluster.batch.follow", f"--spec={spec.path}"), {}, stop_margin=STOP_MARGIN
    )


def show_batch(
    launch: LaunchConfig, module: str, job: RankJob, job_file: Path
) -> tuple[list[str], str]:
    """For a dry run.

    The command that would submit the job, and the script or manifest that it would submit.

    Nothing is written. Raises ConfigError, LaunchError or ParallelLayoutError as `start_batch`
    does.
    """
    check_batch(launch)
    spec = _specification(launch, module, job, job_file, {})
    _check_layouts(spec, job)
    scheduler = SlurmJob(spec) if launch.kind == "slurm" else KubernetesJob(spec)
    return scheduler.command(), scheduler.text(_PLACEHOLDER)


def _specification(
    launch: LaunchConfig, module: str, job: RankJob, job_file: Path, env: Mapping[str, str]
) -> BatchSpec:
    env_file = env_file_of(launch.env_file)
    forwarded = {name: value for name, value in os.environ.items() if _is_forwarded(name, launch)}
    job_file = job_file.absolute()
    return BatchSpec(
        module=module,
        job_file=str(job_file),
        exit_directory=str(Path(job.exit_directory).absolute()),
        launch=launch,
        environment={**forwarded, **(read_env_file(Path(env_file)) if env_file else {}), **env},
        directory=os.getcwd(),
        python=sys.executable,
        workspace=str(_workspace()),
        follower_limit=FOLLOWER_LIMIT,
    )


def _is_forwarded(name: str, launch: LaunchConfig) -> bool:
    return name != JOB_VARIABLE and any(
        fnmatch.fnmatchcase(name, pattern) for pattern in launch.forward_env
    )


def _workspace() -> Path:
    """Where stages take it from."""
    return Path(os.environ.get("MEGACORE_WORKSPACE") or "workspace").absolute()


def _check_layouts(spec: BatchSpec, job: RankJob) -> None:
    """A job that waited must not end since its ranks do not divide.

    Of a range the least number of machines must do.
    """
    if not isinstance(job, Job):
        return
    least, most = spec.nodes
    try:
        layout_of(job.config, least * spec.ranks_per_node, job.vocab_size)
    except ParallelLayoutError as error:
        if least == most:
            raise
        raise ParallelLayoutError(
            f"launch.nnodes is {spec.launch.nnodes}, and {spec.launch.kind} may give {least} "
            f"machines: {error}"
        ) from error
