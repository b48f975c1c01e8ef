"""Lists of the files that the ranks of a job read, for the check on every host."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

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
from megacore.jobs.run import EvaluateJob, Job, TrainJob
from megacore.token_files.indexed_dataset import bin_path, idx_path

if TYPE_CHECKING:
    from megacore.jobs.model import ModelJob

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


def items_of(job: Job, checkpoints: Sequence[Path]) -> list[Item]:
    """List the files that the job's ranks read.

    These are index maps, token files, tokenizer, operators, job files and `checkpoints`.

    Raises:
        LaunchError: a file is missing on this host.
        CheckpointError: a checkpoint is incomplete.
    """
    return _items(
        _read_by(job), checkpoints, Path(job.exit_directory), full=job.config.verify == "full"
    )


def directory_items(
    reads: Mapping[str, Path], checkpoints: Sequence[Path], exit_directory: Path, *, full: bool
) -> list[Item]:
    """List the files in the directories `reads`, in `checkpoints`, and the job files.

    Args:
        reads: directories by role.
        checkpoints: directories of checkpoints.
        exit_directory: directory of the exit reasons; the job files are next to it.
        full: True to compare digests of all files.

    Raises:
        LaunchError: a file is missing on this host.
        CheckpointError: a checkpoint is incomplete.
    """
    listed = [(role, path.absolute(), _below(path.absolute())) for role, path in reads.items()]
    return _items(listed, checkpoints, exit_directory, full=full)


def model_items_of(job: "ModelJob") -> list[Item]:
    """List the files that the ranks of a job on a finished model read.

    These are the model and, for zero-shot scores, the tokenizer and the texts.

    Raises:
        LaunchError: a file is missing on this host.
        CheckpointError: the checkpoint is incomplete.
    """
    reads, checkpoints = list[_Read](), list[Path]()
    model = Path(job.source.directory).absolute()
    if job.source.exported:
        reads.append(("transformers model", model, _below(model)))
    else:
        checkpoints.append(model)
    if directory := getattr(job, "tokenizer_directory", None):
        reads.append(_tokenizer(directory))
    for name in ("wikitext", "lambada"):
        if text_path := getattr(job, name, None):
            path = Path(text_path).absolute()
            reads.append((f"text {name}", path, [path]))
    return _items(reads, checkpoints, Path(job.exit_directory), full=False)


def _items(
    reads: Iterable["_Read"], checkpoints: Sequence[Path], exit_directory: Path, *, full: bool
) -> list[Item]:
    loose, directories = _Loose(full), dict[Path, Item]()
    for role, directory, files in reads:
        if (directory / MANIFEST_NAME).is_file():
            directories.setdefault(directory, _artifact(role, directory, full))
        elif files:
            loose.add(role, files)
        else:
            raise LaunchError(
                f"{role}: {directory} is not there on this machine, or has no file: build it again"
            )
    job_directory = exit_directory.absolute().parent
    job_files = [job_directory / name for name in JOB_FILES if (job_directory / name).is_file()]
    for item in map(_checkpoint, checkpoints):
        directories.setdefault(item.directory, item)
    listed = [*directories.values(), *loose.items.values()]
    if job_files:
        entries = {path.name: _entry("job", path, hashed=True) for path in job_files}
        listed.append(Item(JOB_FILES_ROLE, job_directory, False, entries))
    return listed


def loaded_checkpoints(job: Job) -> list[Path]:
    """Return the absolute paths of the checkpoints that the job's ranks load.

    These are the checkpoints to score, or the checkpoint that the run resumes from.

    Raises:
        CheckpointError: a checkpoint in the job's configuration is damaged.
    """
    if isinstance(job, EvaluateJob):
        return [Path(path).absolute() for path in job.checkpoints]
    if not isinstance(job, TrainJob):
        return []
    root = Path(job.run_directory).absolute() / CHECKPOINTS_NAME
    if job.config.launch.data_placement == "node_local":  # the ranks verify it in full, too
        newest = latest_complete(root)
    else:
        newest = next(reversed(complete_checkpoints(root)), None)
    configured = job.config.resume.checkpoint or job.config.train.pretrained_checkpoint
    if newest is not None or configured is None:
        return [newest] if newest is not None else []
    verify(Path(configured).absolute(), depth_of(job.config.verify))
    return [Path(configured).absolute()]


_Read = tuple[str, Path, list[Path]]
"""Role, directory and files; the files count only if the directory is not an artifact."""


def _read_by(job: Job) -> Iterator[_Read]:
    """Yield the inputs of a training or an evaluation other than checkpoints."""
    index = Path(job.index_directory).absolute()
    yield "index maps", index, _below(index)
    for prefix in job.token_prefixes:
        path = Path(prefix).absolute()
        yield "token files", path.parent, [bin_path(path), idx_path(path)]
    yield _tokenizer(job.tokenizer_directory)
    if isinstance(job, TrainJob):
        for directory in operator_directories(job.config):
            yield "DeepSpeed's operator", directory, []


def _tokenizer(directory: str) -> _Read:
    path = Path(directory).absolute()
    return "tokenizer", path, sorted(file for file in path.glob("*") if file.is_file())


def _below(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


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
        if not (directory / name).is_file():
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
