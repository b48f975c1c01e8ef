"""Stages that start ranks: each writes its job file and runs the ranks under the guard."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megacore.artifact.files import read_json, read_object, workspace_errors
from megacore.artifact.manifest import FirstRead, verified_record
from megacore.artifact.workspace import PARITY_FILE, RUN_FILE
from megacore.checkpoint.format import MARKER_NAME, STALE_SUFFIX
from megacore.cluster.hosts.hardware import hardware_of
from megacore.cluster.placement.prepare import prepare_hosts
from megacore.cluster.start import Start, start_here, start_ranks
from megacore.config.launch import LaunchConfig
from megacore.errors import ArtifactError, MegacoreError, MemoryExhaustedError
from megacore.finetune.resolve import memory_advice as finetune_memory_advice
from megacore.jobs.finetune import FinetuneExportJob, FinetuneJob
from megacore.jobs.model import ModelJob, ResultJob
from megacore.jobs.run import ConvertJob, EvaluateJob, Job, TrainJob
from megacore.launch.exit_reason import read_reasons
from megacore.launch.supervise import supervise
from megacore.paths import glob
from megacore.plan.advice import Deployment, memory_advice
from megacore.plan.layouts import ranks_per_host
from megacore.plan.memory import GIB
from megacore.ranks.operators import prepare_operators

TRAIN_VERSION = 2
EVALUATE_VERSION = 3
CONVERT_VERSION = 2
CONVERT_VERSION_OF_BERT = 3
FINETUNE_VERSION = 1
FINETUNE_EXPORT_VERSION = 2


def nothing() -> None:
    """Do nothing; the default callback of a poll."""


def next_attempt(run_directory: Path) -> int:
    """Return the number of this run's next attempt, counted from 1."""
    try:
        return int(read_json(run_directory / RUN_FILE)["attempt"]) + 1
    except (OSError, ValueError, KeyError, TypeError):
        return 1


def train(
    job: TrainJob, on_poll: Callable[[], None] = nothing, inherited: Sequence[int] = ()
) -> None:
    """Train until `train.train_iters`, from the newest complete checkpoint of the run directory.

    DeepSpeed's operators are compiled first, on this host.

    Args:
        job: the job of the ranks.
        on_poll: callback, a few times a second.
        inherited: descriptors that stay open until all ranks have ended, even if this process is
            killed, such as that of the run's lock.

    Raises:
        MegacoreError: the typed error of the rank that failed first.
        RankLostError: a rank died without a reason.
        StageTimeoutError: the ranks or the compilation exceeded their time limit.
        LaunchError: a launcher or a compiler is missing.
        ArtifactError: a file that the ranks read is damaged.
        MemoryExhaustedError: memory ran out; the message contains the predicted memory and advice,
            even if the kernel killed the rank.
    """
    log, job_file = job.attempt_log, _written(job)
    env = prepare_operators(job, job_file, log, on_poll)
    prepare_hosts(job, job.config.launch)
    start = start_ranks(job.config.launch, "megacore.ranks.pretrain", job, job_file, env)
    reads = [Path(job.index_directory), Path(job.tokenizer_directory)]
    reads += [Path(prefix).parent for prefix in job.token_prefixes]
    with (
        first_read(job, reads, on_poll) as polled,
        advising(Path(job.exit_directory), lambda: _memory_advice(job)),
    ):
        minutes = job.config.launch.timeout_minutes
        supervise_job(start, job, log, polled, minutes, inherited)


def finetune(
    job: FinetuneJob, on_poll: Callable[[], None] = nothing, inherited: Sequence[int] = ()
) -> None:
    """Fine-tune to the last step, from the newest complete checkpoint of the run directory.

    Arguments and errors are those of `train`; nothing is compiled. A LaunchError may also say that
    a host does not see the directories.
    """
    log, job_file = job.attempt_log, _written(job)
    reads = [Path(job.pretrained_directory), Path(job.examples_directory)]
    minutes = job.config.launch.timeout_minutes
    with first_read(job, reads, on_poll) as polled:
        run_ranks(job, "megacore.ranks.finetune", job_file, log, polled, minutes, inherited)


def _written(job: TrainJob | FinetuneJob) -> Path:
    """Write the job of an attempt into the run's directory, and return its path."""
    job_file = Path(job.run_directory) / RUN_FILE
    with workspace_errors(job_file.parent):
        job.attempt_log.parent.mkdir(parents=True, exist_ok=True)
        job.write(job_file)
    return job_file


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

    Before the start, all hosts are checked: each must see the job's directories. The job is already
    written to `job_file`; the other arguments are those of `supervise_job`. Raises the errors of
    `train`.
    """
    prepare_hosts(job, job.config.launch)
    start = start_ranks(job.config.launch, module, job, job_file)
    with advising(Path(job.exit_directory), lambda: finetune_memory_advice(job.config)):
        supervise_job(start, job, log, on_poll, minutes, inherited)


@contextmanager
def first_read(
    job: TrainJob | FinetuneJob, directories: Sequence[Path], on_poll: Callable[[], None]
) -> Iterator[Callable[[], None]]:
    """Compare the digests of the artifacts in `directories` during the body, if `verify` is once.

    Yields `on_poll` with a check for damage. The end of the body waits for the comparison.

    Raises:
        ArtifactError: an artifact is damaged; names the run's checkpoints that were saved since its
            digests were last right, by this attempt or an earlier one.
    """
    if job.config.verify != "once":
        yield on_poll
        return
    reading = FirstRead(directories)

    def polled() -> None:
        reading.check()
        on_poll()

    try:
        with reading:
            yield polled
            reading.finish()
    except ArtifactError as error:
        if error is not reading.error:
            raise
        compared = _last_compared(reading.damaged)
        saved = [
            shlex.quote(str(path))
            for path, written in _checkpoints(Path(job.run_directory)).items()
            if written >= compared
        ]
        more = f"; delete {' '.join(saved)} as well, trained on these data" if saved else ""
        raise ArtifactError(f"{error}{more}") from error


def _last_compared(directory: Path | None) -> int:
    """Return the time (ns) of the last successful digest check, or 0 if there was none."""
    try:
        return 0 if directory is None else verified_record(directory).stat().st_mtime_ns
    except OSError:
        return 0


def _checkpoints(run_directory: Path) -> dict[Path, int]:
    """Return the checkpoints of a run with the modification time of their markers."""
    return {
        marker.parent: marker.stat().st_mtime_ns
        for marker in sorted(glob(run_directory, f"*/iter_*/{MARKER_NAME}"))
        if STALE_SUFFIX not in marker.parent.name
    }


@contextmanager
def advising(exit_directory: Path, advice: Callable[[], str]) -> Iterator[None]:
    """Add `advice` to the error of the body if the kernel killed a rank because memory ran out.

    A rank that could still write its reason to `exit_directory` has included the advice itself.
    """
    try:
        yield
    except MemoryExhaustedError as error:
        name = type(error).__name__
        if any(reason.error == name for reason in read_reasons(exit_directory)):
            raise
        try:
            text = advice()
        except MegacoreError:  # such as a host that does not answer, perhaps for lack of memory
            raise error from None
        if not text:
            raise
        raise MemoryExhaustedError(f"{error}; {text}") from error


def _memory_advice(job: TrainJob) -> str:
    """Return the planner's advice for a job whose rank the kernel killed.

    It is empty for a scheduler's GPUs, whose hosts this host does not resemble if it has none.
    """
    hardware = hardware_of(job.config.launch)
    if job.config.launch.requests_gpus and not hardware.gpus:
        return ""
    precision = hardware.resolve_precision(job.precision or job.config.train.precision)
    together = max(job.hosts.values(), default=ranks_per_host(job.config.launch, job.ranks))
    host = hardware.memory // together
    deployment = Deployment(job.ranks, job.vocab_size, precision, hardware.device_type, host)
    advice = memory_advice(job.config, deployment)
    return f"{advice} ({hardware.memory / GIB:.1f} GiB of host memory on {hardware.owner})"


def evaluate(job: EvaluateJob, scratch: Path, on_poll: Callable[[], None] = nothing) -> None:
    """Run the ranks that write the perplexities of each checkpoint into `job.output`."""
    job_file = scratch / "job.json"
    job.write(job_file)
    prepare_hosts(job, job.config.launch)
    start = start_ranks(job.config.launch, "megacore.ranks.evaluate", job, job_file)
    supervise_job(start, job, evaluation_log(scratch), on_poll, None)


def evaluation_log(scratch: Path) -> Path:
    """Return the path of the log of the ranks that score checkpoints."""
    return scratch / "evaluate.log"


def convert(
    job: ConvertJob | FinetuneExportJob, scratch: Path, on_poll: Callable[[], None] = nothing
) -> dict[str, Any]:
    """Fill `job.output_directory` and return the gate's report. Raises ConversionError."""
    job_file = scratch / "job.json"
    job.write(job_file)
    name = "convert" if isinstance(job, ConvertJob) else "finetune_export"
    start = start_here(f"megacore.ranks.{name}", job, job_file)
    supervise_job(start, job, conversion_log(scratch), on_poll, None)
    return read_object(Path(job.output_directory) / PARITY_FILE)


def conversion_log(scratch: Path) -> Path:
    """Return the path of the log of the rank that exports a model."""
    return scratch / "convert.log"


def supervise_job(
    start: Start,
    job: Job | FinetuneJob,
    log: Path,
    on_poll: Callable[[], None],
    minutes: float | None,
    inherited: Sequence[int] = (),
) -> None:
    """Run the command of `start` to its end, with the settings of the job's `config.launch`.

    The output is appended to `log`, `on_poll` is called at each poll, and `minutes` is the time
    limit, None for none. For `inherited` and the errors see `supervise`.
    """
    launch = job.config.launch
    supervise(
        start.command,
        log=log,
        exit_directory=Path(job.exit_directory),
        env=start.env,
        stop_grace=launch.stop_grace,
        timeout=None if minutes is None else minutes * 60,
        on_poll=on_poll,
        stall_limit=launch.stall_limit,
        # A scheduler may grant fewer hosts.
        ranks=None if launch.elastic and launch.has_scheduler else job.ranks,
        hosts=start.hosts,
        stop_margin=start.stop_margin,
        again=start.again,
        inherited=inherited,
    )


def run_job(
    module: str,
    job: ResultJob,
    scratch: Path,
    *,
    launch: LaunchConfig = LaunchConfig(),  # noqa: B008  the default is frozen
    on_poll: Callable[[], None] = nothing,
) -> dict[str, Any]:
    """Run the job's ranks and return the result that they wrote to `job.output`.

    The job file and the log are in `scratch`; `on_poll` is called a few times a second.

    Raises:
        MegacoreError: the typed error of the rank that failed first.
        RankLostError: a rank died without a reason.
        LaunchError: a host lacks files that its ranks read.
    """
    job_file = scratch / "job.json"
    job.write(job_file)
    if isinstance(job, ModelJob):  # the others run on this host
        prepare_hosts(job, launch)
    start = start_ranks(launch, module, job, job_file)
    supervise(
        start.command,
        log=scratch / log_name(module),
        exit_directory=Path(job.exit_directory),
        env=start.env,
        stop_grace=launch.stop_grace,
        hosts=start.hosts,
        stop_margin=start.stop_margin,
        again=start.again,
        on_poll=on_poll,
    )
    return read_object(Path(job.output))


def log_name(module: str) -> str:
    """Return the name of the log of the ranks of `module`."""
    return f"{module.rpartition('.')[2]}.log"
