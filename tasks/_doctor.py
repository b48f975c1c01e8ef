"""Examination of a run's hosts before its ranks start; its report is kept with the run."""

from pathlib import Path
from typing import TYPE_CHECKING

from megacore.artifact import Workspace
from megacore.artifact.files import write_json
from megacore.artifact.manifest import file_digest
from megacore.config.hostfile import hosts_of
from megacore.errors import LaunchError
from megacore.jobs.finetune import FinetuneJob
from megacore.jobs.run import Job
from megacore.paths import is_file

if TYPE_CHECKING:
    from tasks._mlflow import Tracking

PREFLIGHT_FILE = "preflight.json"
"""Name of the file in the run directory with the doctor's report of the last start."""
_TAG_PREFLIGHT = "megacore.preflight_sha256"


def check_hosts(job: Job | FinetuneJob) -> None:
    """Examine the hosts of a job with several hosts, as `launch.preflight` requires.

    A job on one host is not examined. Neither is a retry of the same task run: its hosts have
    already passed, and the launcher names those that are lost later. Raises LaunchError for the
    first problem that keeps the job from running.
    """
    from prefect import get_run_logger
    from prefect.runtime import task_run

    launch = job.config.launch
    if (
        launch.preflight == "off"
        or len(job.hosts or hosts_of(launch)) < 2
        or (task_run.run_count or 0) > 1
    ):
        return
    from megacore.doctor.examine import examine
    from megacore.doctor.subject import RunData, Subject

    log = get_run_logger()
    subject = (
        Subject.of_run(job)
        if isinstance(job, Job)
        # Its inputs are in the workspace, and the doctor cannot estimate its memory.
        else Subject.of_launch(launch, Workspace.of().root, None, RunData())
    )
    examination = examine(subject, full=launch.preflight == "full")
    path = Path(job.run_directory) / PREFLIGHT_FILE
    write_json(path, examination.as_json())
    for finding in examination.sorted_findings():
        if finding.verdict == "warning":
            log.warning("doctor: %s", finding.sentence())
    error = examination.first_error()
    if error is not None:
        raise LaunchError(
            f"the machines are not fit for this run: {error.sentence()} ({path} has the full "
            "report; launch.preflight: off starts without asking)"
        )
    hosts, seconds = len(examination.hosts), examination.seconds
    log.info("doctor: %d hosts examined in %.1f s, nothing prevents the run", hosts, seconds)


def send_preflight(tracking: "Tracking", run_id: str, run_directory: Path) -> None:
    """Log the report as an artifact of the MLflow run, unless the run already has the same report.

    Raises TrackingError.
    """
    path = run_directory / PREFLIGHT_FILE
    if not is_file(path):
        return
    digest = file_digest(path)
    with tracking.errors("take the doctor's report"):
        if tracking.client.get_run(run_id).data.tags.get(_TAG_PREFLIGHT) != digest:
            tracking.client.log_artifact(run_id, str(path))
            tracking.client.set_tag(run_id, _TAG_PREFLIGHT, digest)
