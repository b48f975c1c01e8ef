"""Stages of a fine-tuning that start ranks.

Each writes its job file and runs the ranks under the guard.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megacore.artifact.files import read_object, workspace_errors
from megacore.artifact.workspace import PARITY_FILE, RUN_FILE
from megacore.cluster.hosts.ssh import check_ssh
from megacore.cluster.placement.prepare import prepare_finetune_hosts
from megacore.cluster.start import ssh_of, start_here, start_ranks
from megacore.config.hostfile import hosts_of, is_only_here
from megacore.finetune.resolve import memory_advice
from megacore.jobs.finetune import FinetuneExportJob, FinetuneJob
from megacore.ranks.stages import advising, attempt_log, first_read, nothing, supervise_job

FINETUNE_VERSION = 1
FINETUNE_EXPORT_VERSION = 2


def finetune(
    job: FinetuneJob, on_poll: Callable[[], None] = nothing, inherited: Sequence[int] = ()
) -> None:
    """Fine-tune to the last step, from the newest complete checkpoint of the run directory.

    Args:
        job: the job of the ranks.
        on_poll: callback, a few times a second.
        inherited: descriptors that stay open until all ranks have ended, even if this process is
            killed, such as that of the run's lock.

    Raises:
        MegacoreError: the typed error of the rank that failed first.
        RankLostError: a rank died without a reason.
        StageTimeoutError: the ranks exceeded `launch.timeout_minutes`.
        LaunchError: a launcher is missing, or a host does not see the directories.
        ArtifactError: a file that the ranks read is damaged.
        MemoryExhaustedError: memory ran out; the message contains advice, even if the kernel killed
            the rank.
    """
    run_directory = Path(job.run_directory)
    log = attempt_log(job)
    with workspace_errors(run_directory):
        log.parent.mkdir(parents=True, exist_ok=True)
        job_file = run_directory / RUN_FILE
        job.write(job_file)
    reads = [Path(job.pretrained_directory), Path(job.examples_directory)]
    minutes = job.config.launch.timeout_minutes
    with first_read(job, reads, on_poll) as polled:
        run_ranks(job, "megacore.ranks.finetune", job_file, log, polled, minutes, inherited)


def run_ranks(
    job: FinetuneJob,
    module: str,
    job_file: Path,
    log: Path,
    on_poll: Callable[[], None] = nothing,
    minutes: float | None = None,
    inherited: Sequence[int] = (),
) -> None:
    """Start the job's ranks with the settings of `config.launch`, and supervise them.

    Before the start, all hosts are checked: each must see the job's directories.

    Args:
        job: the job of the ranks, already written to `job_file`.
        module: entry point of each rank.
        job_file: path of the job's JSON file.
        log: path of the ranks' log.
        on_poll: callback, a few times a second.
        minutes: time limit in minutes; None means no limit.
        inherited: see `supervise`.

    Raises:
        MegacoreError: the errors of `finetune`.
    """
    launch = job.config.launch
    hosts = job.hosts or hosts_of(launch)
    if not is_only_here(hosts):
        check_ssh(hosts)
        prepare_finetune_hosts(job, hosts, ssh_of(launch))
    start = start_ranks(launch, module, job, job_file)
    with advising(Path(job.exit_directory), lambda: memory_advice(job.config)):
        supervise_job(start, job, log, on_poll, minutes, inherited)


def export(
    job: FinetuneExportJob, scratch: Path, on_poll: Callable[[], None] = nothing
) -> dict[str, Any]:
    """Fill `job.output_directory` with `model/`, `parity.json` and `sample.txt`.

    Returns:
        The gate's report.

    Raises:
        ConversionError: the export differs from the trained model.
    """
    job_file = scratch / "job.json"
    job.write(job_file)
    start = start_here("megacore.ranks.finetune_export", job, job_file)
    supervise_job(start, job, scratch / "export.log", on_poll, None)
    return read_object(Path(job.output_directory) / PARITY_FILE)
