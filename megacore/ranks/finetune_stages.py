"""The stages of a fine-tuning that start processes.

Each writes its job file and runs it under the guard.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacore.artifact.files import read_json, workspace_errors
from megacore.cluster.hosts.ssh import check_ssh
from megacore.cluster.placement.prepare import prepare_finetune_hosts
from megacore.cluster.start import ssh_of, start_here, start_ranks
from megacore.config.hostfile import hosts_of, is_only_here
from megacore.finetune.resolve import memory_advice
from megacore.jobs.finetune import FinetuneExportJob, FinetuneJob
from megacore.ranks.stages import advising, attempt_log, nothing, supervise_job

FINETUNE_VERSION = 1
FINETUNE_EXPORT_VERSION = 1


def finetune(job: FinetuneJob, on_poll: Callable[[], None] = nothing) -> None:
    """Fine-tune to the last step, from the newest complete checkpoint of the run directory.

    Raises the typed error of the rank that failed first, RankLostError or StageTimeoutError;
    LaunchError when a launcher is missing, or a host does not see the directories;
    MemoryExhaustedError, with what helps, also for a rank that the kernel killed.
    """
    run_directory = Path(job.run_directory)
    log = attempt_log(job)
    with workspace_errors(run_directory):
        log.parent.mkdir(parents=True, exist_ok=True)
        job_file = run_directory / "run.json"
        job.write(job_file)
    run_ranks(
        job, "megacore.ranks.finetune", job_file, log, on_poll, job.config.launch.timeout_minutes
    )


def run_ranks(
    job: FinetuneJob,
    module: str,
    job_file: Path,
    log: Path,
    on_poll: Callable[[], None] = nothing,
    minutes: float | None = None,
) -> None:
    """Start the job's ranks as `config.launch` says, and supervise.

    Hosts were proven to see its directories.

    Args:
        job: what the ranks do; it is written to `job_file` already.
        module: entry point of each.
        job_file: its JSON.
        log: where their output goes.
        on_poll: called a few times a second.
        minutes: that they may take at most; None means any time.

    Raises as `finetune`.
    """
    launch = job.config.launch
    hosts = job.hosts or hosts_of(launch)
    if not is_only_here(hosts):
        check_ssh(hosts)
        prepare_finetune_hosts(job, hosts, ssh_of(launch))
    start = start_ranks(launch, module, job, job_file)
    with advising(Path(job.exit_directory), lambda: memory_advice(job.config)):
        supervise_job(start, job, log, on_poll, minutes)


def export(
    job: FinetuneExportJob, scratch: Path, on_poll: Callable[[], None] = nothing
) -> dict[str, Any]:
    """Fill `job.output_directory` with `model/`, `parity.json` and `sample.txt`.

    Returns the gate's report.

    Raises ConversionError when the export is not the model that was trained.
    """
    job_file = scratch / "job.json"
    job.write(job_file)
    start = start_here("megacore.ranks.finetune_export", job, job_file)
    supervise_job(start, job, scratch / "export.log", on_poll, None)
    report: dict[str, Any] = read_json(Path(job.output_directory) / "parity.json")
    return report
