"""Lists of the files that the ranks of a job read, for the check on every host."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megacore.artifact.manifest import MANIFEST_NAME, Manifest, depth_of, file_digest
from megacore.artifact.workspace import CHECKPOINTS_NAME, RUN_FILE
from megacore.checkpoint.format import (
    MARKER_NAME,
    Marker,
    complete_checkpoints,
    latest_complete,
    verify,
)
from megacore.cluster.placement.files import Entry, Item
from megacore.engine.deepspeed.operators import operator_directories
from megacore.errors import ArtifactError, CheckpointError, LaunchError
from megacore.jobs.finetune import FinetuneJob
from megacore.jobs.model import ModelJob, ZeroShotJob
from megacore.jobs.run import EvaluateJob, Job, TrainJob
from megacore.paths import glob, is_file, rglob
from megacore.token_files.indexed_dataset import bin_path, idx_path

PlacedJob = Job | FinetuneJob | ModelJob
"""Jobs whose ranks may run on several hosts."""
JOB_FILES = (RUN_FILE, "job.json", "operators.json")
"""Names of the job's files next to the directory of exit reasons."""

JOB_FILES_ROLE = "job files"


@dataclass
class _Loose:
    """Items of files without a manifest, by directory."""

    full: bool
    items: dict[Path, Item] = field(default_factory=dict)

    def add(self, role: str, paths: Sequence[Path]) -> None:
        for path in paths:
            item = self.items.setdefault(path.parent, Item(role, path.parent, False, {}, self.full))
            item.entries.setdefault(path.name, _entry(role, path, hashed=self.full))


def items_of(job: PlacedJob, checkpoints: Sequence[Path]) -> list[Item]:
    """List the files that the job's ranks read: its inputs, `checkpoints`, and the job files.

    Raises:
        LaunchError: a file is missing on this host.
        CheckpointError: a checkpoint is incomplete.
    """
    full = not isinstance(job, ModelJob) and job.config.verify == "full"
    loose, directories = _Loose(full), dict[Path, Item]()
    for role, directory, files in _read_by(job):
        if is_file(directory / MANIFEST_NAME):
            directories.setdefault(directory, _artifact(role, directory, full))
        elif files:
            loose.add(role, files)
        else:
            raise LaunchError(
                f"{role}: {directory} is not there on this machine, or has no file: build it again"
            )
    job_directory = Path(job.exit_directory).absolute().parent
    job_files = [job_directory / name for name in JOB_FILES if is_file(job_directory / name)]
    for item in map(_checkpoint, checkpoints):
        directories.setdefault(item.directory, item)
    listed = [*directories.values(), *loose.items.values()]
    if job_files:
        entries = {path.name: _entry("job", path, hashed=True) for path in job_files}
        listed.append(Item(JOB_FILES_ROLE, job_directory, False, entries))
    return listed


def loaded_checkpoints(job: PlacedJob) -> list[Path]:
    """Return the absolute paths of the checkpoints that the job's ranks load.

    These are the checkpoints to score, the checkpoint that a run resumes from, or the model.

    Raises:
        CheckpointError: a checkpoint in the job's configuration is damaged.
    """
    match job:
        case EvaluateJob():
            return [Path(path).absolute() for path in job.checkpoints]
        case ModelJob():
            return [] if job.source.exported else [Path(job.source.directory).absolute()]
        case TrainJob() | FinetuneJob():
            root = Path(job.run_directory).absolute() / CHECKPOINTS_NAME
        case _:
            return []
    if job.config.launch.data_placement == "node_local":  # the ranks verify it in full, too
        newest = latest_complete(root)
    else:
        newest = next(reversed(complete_checkpoints(root)), None)
    if newest is not None:
        return [newest]
    if isinstance(job, FinetuneJob):
        return []
    configured = job.config.resume.checkpoint or job.config.train.pretrained_checkpoint
    if configured is None:
        return []
    verify(Path(configured).absolute(), depth_of(job.config.verify))
    return [Path(configured).absolute()]


_Read = tuple[str, Path, list[Path]]
"""Role, directory and files; the files count only if the directory is not an artifact."""


def _read_by(job: PlacedJob) -> Iterator[_Read]:
    """Yield the inputs of the job's ranks other than checkpoints."""
    match job:
        case Job():
            yield _directory("index maps", job.index_directory)
            for prefix in job.token_prefixes:
                path = Path(prefix).absolute()
                yield "token files", path.parent, [bin_path(path), idx_path(path)]
            yield _tokenizer(job.tokenizer_directory)
        case FinetuneJob():
            yield _directory("pretrained model", job.pretrained_directory)
            yield _directory("examples", job.examples_directory)
        case ModelJob() if job.source.exported:
            yield _directory("transformers model", job.source.directory)
    if isinstance(job, TrainJob):
        for directory in operator_directories(job.config):
            yield "DeepSpeed's operator", directory, []
    if isinstance(job, ZeroShotJob):
        yield _tokenizer(job.tokenizer_directory)
        texts = {"wikitext": job.settings.wikitext, "lambada": job.settings.lambada}
        for name, text in texts.items():
            if text is not None:
                path = Path(text).absolute()
                yield f"text {name}", path, [path]


def _directory(role: str, name: str) -> _Read:
    path = Path(name).absolute()
    return role, path, sorted(file for file in rglob(path, "*") if is_file(file))


def _tokenizer(directory: str) -> _Read:
    path = Path(directory).absolute()
    return "tokenizer", path, sorted(file for file in glob(path, "*") if is_file(file))


def _artifact(role: str, directory: Path, full: bool) -> Item:
    try:
        manifest = Manifest.read(directory)
    except ArtifactError as error:
        raise LaunchError(f"{role}: {error}") from error
    entries = {
        name: Entry(file.size, file.mtime_ns, file.sha256) for name, file in manifest.files.items()
    }
    entries[MANIFEST_NAME] = _entry(role, directory / MANIFEST_NAME, hashed=True)
    return Item(role, directory, True, entries, full)


def _checkpoint(directory: Path) -> Item:
    """Return the item of a checkpoint.

    It is always compared by digests, because each rank verifies and reads its part on its own host.
    """
    marker = Marker.read(directory)
    entries = {name: Entry(file.size, 0, file.sha256) for name, file in marker.files.items()}
    entries[MARKER_NAME] = _entry("checkpoint", directory / MARKER_NAME, hashed=True)
    for name in marker.files:
        if not is_file(directory / name):
            raise CheckpointError(f"checkpoint {directory} lacks {name}: use another checkpoint")
    return Item("checkpoint", directory, True, entries, full=True, checkpoint=True)


def _entry(role: str, path: Path, *, hashed: bool) -> Entry:
    try:
        status = path.stat()
        return Entry(status.st_size, status.st_mtime_ns, file_digest(path) if hashed else None)
    except OSError as error:
        raise LaunchError(
            f"{role}: {path} cannot be read on this machine: {error.strerror}: build it again"
        ) from error
