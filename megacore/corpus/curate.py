"""The curate stage, which removes and changes documents of a corpus with datatrove's blocks.

`megacore.corpus.curate_job` describes the tasks. Those that are done are not repeated when a stage
that was killed starts again.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from megacore.artifact.files import workspace_errors, write_json
from megacore.config.curate import (
    CurateStep,
    DedupStep,
    ExtractTextStep,
    LanguageStep,
    MinhashDedupStep,
)
from megacore.corpus import extract
from megacore.corpus.curate_job import (
    DOCUMENTS_FOLDER,
    CurateOptions,
    Job,
    Phase,
    check_installed,
    discarding_job,
    fingerprint,
    label_of,
    publish_documents,
)
from megacore.corpus.curate_report import Tally, summarize_clusters
from megacore.corpus.curate_task import run_task
from megacore.corpus.documents import names_sources, read_sources
from megacore.corpus.segments import Segment, segments
from megacore.errors import ConfigError, DataFormatError, DownloadError, WorkerLostError, one_line
from megacore.launch.workers import WorkerPool
from megacore.paths import exists

REPORT_NAME = "report.json"
_SIGNATURES = 1.0
"""Bytes of signatures per byte of text in short documents."""
_WORK_FACTOR = 2.2 + _SIGNATURES
"""Bytes on disk per byte of text while a deduplication runs: documents twice, and signatures."""


def check_steps(steps: Sequence[CurateStep]) -> None:
    """Build each step once, so that a missing package or file is found now and not after hours.

    Models of languages that are not given are neither checked nor downloaded. Raises ConfigError,
    DataFormatError.
    """
    check_installed("data.curate")
    from megacore.corpus import curate_blocks

    fingerprint(steps)
    for number, step in enumerate(steps):
        try:
            if isinstance(step, MinhashDedupStep):
                curate_blocks.words_of(step.language)
            elif isinstance(step, LanguageStep):
                import fasttext  # noqa: F401

                if step.model is not None:
                    curate_blocks.load_model(step.model)
            elif isinstance(step, ExtractTextStep):
                extract.check_installed()
            elif not isinstance(step, DedupStep):
                label = label_of(number, step)
                curate_blocks.filter_blocks([(label, step)], Tally(), {})
        except ImportError as error:  # datatrove's blocks name what they need
            raise ConfigError(f"data.curate: {error}") from error


def find_models(steps: Sequence[CurateStep]) -> dict[str, str]:
    """Return the paths of the fastText models by the labels of their steps.

    Models that are not given are downloaded once. Raises DownloadError.
    """
    return {
        label_of(number, step): step.model or _download_model(step.backend)
        for number, step in enumerate(steps)
        if isinstance(step, LanguageStep)
    }


def _download_model(backend: str) -> str:
    from datatrove.io import cached_asset_path_or_download
    from datatrove.utils.lid import FT176LID, GlotLID

    kind = FT176LID() if backend == "ft176" else GlotLID()
    try:
        path: str = cached_asset_path_or_download(
            kind.MODEL_URL, progress=False, namespace="lid", subfolder=kind.MODEL_SUBFOLDER
        )
    except Exception as error:  # that of any file system of fsspec
        reason = one_line(error) or type(error).__name__
        raise DownloadError(
            "the model of data.curate's step language_id cannot be downloaded from "
            f"{kind.MODEL_URL} ({reason}): download it elsewhere and give its path as model"
        ) from error
    return path


def needed_bytes(size: int, steps: Sequence[CurateStep], earlier: int = 0) -> int:
    """Return about how many bytes of disk the curation of `size` bytes of text takes at most.

    `earlier` is the size of the earlier sources' documents, of which signatures are written.
    """
    several = any(isinstance(step, DedupStep) for step in steps)
    return int(size * (_WORK_FACTOR if several else 1.1) + earlier * _SIGNATURES)


RunTasks = Callable[[Job, Phase, Sequence[int]], None]
"""Function that runs tasks of a phase, and raises the error of one that fails."""
Executor = Callable[[Path], AbstractContextManager[RunTasks]]
"""Function of the work directory that prepares the execution of tasks, and ends it."""


def curate_corpus(
    corpus: Path,
    directory: Path,
    work: Path,
    steps: Sequence[CurateStep],
    options: CurateOptions,
    *,
    earlier: Sequence[Path] = (),
    executor: Executor | None = None,
) -> dict[str, Any]:
    """Write the documents of a corpus directory that the steps keep into another one.

    Returns counts. Raises ConfigError, DataFormatError, WorkerLostError, WorkspaceError. Arguments
    as for `curate_segments`.
    """
    counts = curate_segments(
        segments(corpus),
        directory,
        work,
        steps,
        options,
        named=names_sources(corpus),
        earlier=[segments(each) for each in earlier],
        executor=executor,
    )
    with discarding_job(work):
        for each in (corpus, *earlier):
            read_sources(each)
    return counts


def curate_segments(
    parts: Sequence[Segment],
    directory: Path,
    work: Path,
    steps: Sequence[CurateStep],
    options: CurateOptions,
    *,
    named: bool = False,
    earlier: Sequence[Sequence[Segment]] = (),
    executor: Executor | None = None,
) -> dict[str, Any]:
    """Write the documents that the steps keep into the empty `directory`, with `report.json`.

    Args:
        parts: the documents, in order.
        directory: corpus directory, on the file system of `work`.
        work: directory of intermediate files, in which an earlier call with the same steps and
            documents continues; the caller removes it when `directory` is safe.
        steps: steps in order.
        options: sizes and number of processes.
        named: True if the field `source` of a document says where it came from; otherwise its file
            and line do.
        earlier: documents that each earlier source keeps, for steps that compare sources.
        executor: executor of the tasks; None means processes of this host.
    """
    check_steps(steps)
    models = find_models(steps)
    with workspace_errors(work):
        work.mkdir(parents=True, exist_ok=True)
        with (executor or _local(options.processes))(work.absolute()) as run_tasks:
            job = Job.prepare(
                work.absolute(), parts, steps, models, options, named=named, earlier=earlier
            )
            for phase in job.phases:
                _run_phase(job, phase, run_tasks)
        report = job.report()
        publish_documents(work / DOCUMENTS_FOLDER, directory, len(job.shards))
    read, kept = report["documents"]["read"], report["documents"]["kept"]
    if not read:
        skipped = (
            f": all {report['skipped_lines']} lines were skipped" if report["skipped_lines"] else ""
        )
        raise DataFormatError(
            f"the source of {parts[0].path} has no documents to curate{skipped}: give another "
            "data.source"
        )
    if not kept:
        worst = max(report["steps"], key=lambda row: row["removed"])
        raise DataFormatError(
            f"data.curate keeps none of {read:,} documents; {worst['step']} removed "
            f"{worst['removed']:,}: relax or remove a step"
        )
    write_json(directory / REPORT_NAME, report)
    return {
        "documents": kept,
        "files": len(job.shards),
        "skipped_files": 0,
        "bytes": report["bytes"]["kept"],
        "words": report["words"]["kept"],
        "documents_read": read,
        "bytes_read": report["bytes"]["read"],
        "words_read": report["words"]["read"],
        "skipped_lines": report["skipped_lines"],
    }


def _local(processes: int) -> Executor:
    """Return the executor that runs tasks in processes, or with one of them in this one.

    It raises the error of the first task that fails; then the others are ended.
    """

    @contextmanager
    def execute(work: Path) -> Iterator[RunTasks]:
        if processes <= 1:
            yield _run_here
            return

        def run(job: Job, phase: Phase, ranks: Sequence[int]) -> None:
            if len(job.shards) == 1:  # processes take longer to start
                _run_here(job, phase, ranks)
                return
            tasks = [pool.submit(run_task, job.work, phase.name, rank) for rank in ranks]
            for future in as_completed(tasks):
                future.result()

        try:
            with WorkerPool(processes) as pool:
                yield run
        except BrokenExecutor as error:
            raise WorkerLostError(
                "a process of data.curate was killed, perhaps because memory ran out: the tasks "
                "that are done are kept; run it again with fewer processes (data.curate_workers) "
                "or smaller shards (data.curate_shard_mb)"
            ) from error

    return execute


def _run_here(job: Job, phase: Phase, ranks: Sequence[int]) -> None:
    for rank in ranks:
        run_task(job.work, phase.name, rank)


def _run_phase(job: Job, phase: Phase, run_tasks: RunTasks) -> None:
    """Run the tasks of a phase that are not done, then delete what only this phase reads."""
    marker = job.folder(phase) / "done.json"
    if not exists(marker):
        job.folder(phase).mkdir(parents=True, exist_ok=True)
        missing = [rank for rank in range(phase.tasks) if not job.is_done(phase, rank)]
        if missing:
            run_tasks(job, phase, missing)
        if phase.pending is not None:
            number = phase.pending
            summary = summarize_clusters(job.dedup_folder(number), job.steps[number])
            write_json(job.clusters_file(number), summary)
        write_json(marker, {})
    stale = [] if phase.reads is None else [job.work / phase.reads]
    if phase.pending is not None:
        stale.append(job.dedup_folder(phase.pending))
    for folder in stale:
        if exists(folder):
            shutil.rmtree(folder)
