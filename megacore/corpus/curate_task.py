"""Execution of one task of a curation, on any host that sees its work directory."""

import os
import resource
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megacore.artifact.build import lock
from megacore.artifact.files import workspace_errors
from megacore.config.curate import ExtractTextStep, PythonStep, UrlStep
from megacore.corpus.curate_job import Job, Phase, document_file, finders, label_of
from megacore.corpus.curate_report import Tally
from megacore.corpus.curate_sources import Attribution, SourceNames
from megacore.errors import WorkspaceError
from megacore.paths import glob, is_dir

_LATE = 60.0
"""Seconds to wait until a file share shows the files of the phase before."""


def run_task(work: Path, phase_name: str, rank: int) -> None:
    """Run one task of a job in this process, unless it is done.

    The task's lock keeps it from running twice at once, as after the loss of the process that
    submitted it: the second one waits, and finds the receipt of the first.
    """
    # A comparison reads a file of each shard at a time.
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    job = Job.read(work)
    phase = next(phase for phase in job.phases if phase.name == phase_name)
    with workspace_errors(work), lock(job.folder(phase) / f"{rank:05d}"):
        if not job.is_done(phase, rank):
            _run(job, phase, rank, _await_inputs(job, phase, rank))


def _run(job: Job, phase: Phase, rank: int, inputs: int) -> None:
    from megacore.corpus import curate_blocks as blocks

    for pattern in phase.outputs(rank):
        for stale in glob(job.work, pattern):
            stale.unlink()
    tally = Tally()
    match phase.kind:
        case "documents":
            pipeline = _pass_over_documents(job, phase, rank, tally)
        case "earlier":
            pipeline = _earlier_signatures(job, phase, rank)
        case _:
            pipeline = _finding(job, phase, inputs)
    executor = blocks.Executor(
        pipeline,
        phase.tasks,
        job.folder(phase) / "datatrove",
        lambda: job.complete(phase, rank, tally.content()),
    )
    executor.run_task(phase.first + rank)


def _await_inputs(job: Job, phase: Phase, rank: int) -> int:
    """Wait until this host sees the files of earlier phases that a task reads.

    A file share may show them late, and datatrove takes a missing file for one without duplicates.
    Returns the number of files that a comparison reads. Raises WorkspaceError.
    """
    if phase.kind == "earlier":
        return 0
    number = phase.pending if phase.kind == "documents" else phase.compares
    kinds = {"documents": ("find", "cluster"), "cluster": ("buckets",)}
    tasks = [
        (each, task)
        for each in job.phases[: job.phases.index(phase)]
        if each.compares == number and each.kind in kinds.get(phase.kind, ("documents", "earlier"))
        for task in range(each.tasks)
    ]
    _await(job.work, {job.receipt(each, task).relative_to(job.work) for each, task in tasks})
    names = {
        Path(name)
        for each, task in tasks
        for name in job.files(each, task)
        if name.startswith("dedup-")
    }
    if phase.kind == "documents":
        names = {name for name in names if int(name.name.partition(".")[0]) == rank}
        if phase.reads is not None:
            names.add(Path(phase.reads, document_file(rank)))
    _await(job.work, names)
    # Signatures lie in a folder for each task that compares them, `0007` or `bucket_007`.
    folders = {"find": f"{rank:04d}", "buckets": f"bucket_{rank:03d}", "cluster": "pairs"}
    return sum(name.parent.name == folders.get(phase.kind) for name in names)


def _await(work: Path, names: Iterable[Path]) -> None:
    """Wait until files below the work directory are listed. Raises WorkspaceError."""
    started = time.monotonic()
    while missing := _unseen(work, names):
        if time.monotonic() - started > _LATE:
            raise WorkspaceError(
                f"{work / missing} was written, but this host does not see it after "
                f"{_LATE:g} s: mount the workspace with the same content on all hosts"
            )
        time.sleep(0.5)


def _unseen(work: Path, names: Iterable[Path]) -> Path | None:
    """Return a file that its directory does not list, or None."""
    listed: dict[Path, set[str]] = {}
    for name in names:
        folder = name.parent
        if folder not in listed:
            listed[folder] = set(os.listdir(work / folder)) if is_dir(work / folder) else set()
        if name.name not in listed[folder]:
            return name
    return None


def _finding(job: Job, phase: Phase, inputs: int) -> list[Any]:
    from megacore.corpus.curate_blocks import finding_block

    assert phase.compares is not None
    number = phase.compares
    step, folder = job.steps[number], job.dedup_folder(number)
    pipeline: list[Any] = [finding_block(step, folder, phase.kind, inputs)]
    if job.compares_sources(number) and phase.kind != "buckets":
        owners = [source for source, _ in job.earlier]
        pipeline.append(Attribution(folder, owners, len(job.shards), near=phase.kind == "cluster"))
    return pipeline


def _earlier_signatures(job: Job, phase: Phase, rank: int) -> list[Any]:
    from megacore.corpus import curate_blocks as blocks
    from megacore.corpus.curate_documents import ReadShard

    assert phase.compares is not None
    step, folder = job.steps[phase.compares], job.dedup_folder(phase.compares)
    _, shard = job.earlier[rank]
    reader = ReadShard(
        shard,
        None,
        all_fields=False,
        named=True,
        on_bad_line="stop",
        document_bytes=job.document_bytes,
    )
    return [reader, blocks.signature_block(step, folder, rank, finders(len(job.shards)))]


def _pass_over_documents(job: Job, phase: Phase, rank: int, tally: Tally) -> list[Any]:
    from megacore.corpus import curate_blocks as blocks
    from megacore.corpus.curate_documents import ReadDocuments, ReadShard, WriteDocuments

    steps, work = job.steps, job.work
    # The source is read twice if the first step is a deduplication, but counted once.
    counted = tally if phase.name == "pass-0" else None
    pipeline: list[Any] = [
        ReadShard(
            job.shards[rank],
            counted,
            all_fields=any(isinstance(step, UrlStep | PythonStep) for step in steps),
            named=job.named,
            on_bad_line=job.on_bad_line,
            document_bytes=job.document_bytes,
            extracts=any(isinstance(step, ExtractTextStep) for step in steps),
        )
        if phase.reads is None
        else ReadDocuments(work / phase.reads / document_file(rank))
    ]
    if phase.pending is not None:
        number = phase.pending
        folder, label = job.dedup_folder(number), label_of(number, steps[number])
        if job.compares_sources(number):
            pipeline.append(SourceNames(folder))
        pipeline.append(blocks.duplicate_filter(steps[number], label, folder, tally))
    filters = [(label_of(number, steps[number]), steps[number]) for number in phase.steps]
    pipeline += blocks.filter_blocks(filters, tally, dict(job.models))
    if phase.writes is not None:
        kept = tally if phase.is_last else None
        path = work / phase.writes / document_file(rank)
        pipeline.append(WriteDocuments(path, kept, job.document_bytes))
    if phase.compares is not None:
        number = phase.compares
        # Of exact duplicates that of the first place is kept: those of earlier sources come first.
        place = rank + (len(job.earlier) if job.compares_sources(number) else 0)
        pipeline.append(
            blocks.signature_block(
                steps[number], job.dedup_folder(number), place, finders(len(job.shards))
            )
        )
    return pipeline
