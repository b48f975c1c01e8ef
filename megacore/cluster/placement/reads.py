"""What the processes of a job read, file by file.

So every machine can be asked whether it has it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.artifact.manifest import MANIFEST_NAME, Manifest, file_digest
from megacore.artifact.workspace import CHECKPOINTS_NAME
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

JOB_FILES = ("run.json", "job.json", "operators.json")
"""Beside the directory of exit reasons: what the ranks are told."""

JOB_FILES_ROLE = "job files"


@dataclass
class _Loose:
    """Files without a manifest, by directory."""

    full: bool
    items: dict[Path, Item] = field(default_factory=dict)

    def add(self, role: str, paths: Sequence[Path]) -> None:
        for path in paths:
            item = self.items.setdefault(path.parent, Item(role, path.parent, False, {}, self.full))
            item.entries.setdefault(path.name, _entry(role, path, hashed=self.full))


def items_of(job: Job, checkpoints: Sequence[Path]) -> list[Item]:
    """Everything that ranks of the job read.

    Index maps, tokens, tokenizer, operators, job files and `checkpoints`.

    Raises LaunchError when something is not there on this machine, CheckpointError for an
    incomplete checkpoint.
    """
    return _items(
        _read_by(job), checkpoints, Path(job.exit_directory), full=job.config.verify == "full"
    )


def directory_items(
    reads: Mapping[str, Path], checkpoints: Sequence[Path], exit_directory: Path, *, full: bool
) -> list[Item]:
    """Everything that ranks read, by roles.

    Whole directories, those of `checkpoints`, and the job files.

    Raises as `items_of`.
    """
    listed = [(role, path.absolute(), _below(path.absolute())) for role, path in reads.items()]
    return _items(listed, checkpoints, exit_directory, full=full)


def model_items_of(job: "ModelJob") -> list[Item]:
    """Everything that ranks of a job with a finished model read.

    The model, and the tokenizer and texts of a score.

    Raises as `items_of`.
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
        if text := getattr(job, name, None):
            path = Path(text).absolute()
            reads.append((f"text {name}", path, [path]))
    return _items(reads, checkpoints, Path(job.exit_directory), full=False)


def _items(
    reads: Iterable["_Read"], checkpoints: Sequence[Path], exit_directory: Path, *, full: bool
) -> list[Item]:
    loose, whole = _Loose(full), dict[Path, Item]()
    for role, directory, files in reads:
        if (directory / MANIFEST_NAME).is_file():
            whole.setdefault(directory, _artifact(role, directory, full))
        elif files:
            loose.add(role, files)
        else:
            raise LaunchError(
                f"{role}: {directory} is not there on this machine, or has no file: build it again"
            )
    beside = exit_directory.absolute().parent
    told = [beside / name for name in JOB_FILES if (beside / name).is_file()]
    for item in map(_checkpoint, checkpoints):
        whole.setdefault(item.directory, item)
    listed = [*whole.values(), *loose.items.values()]
    if told:
        entries = {path.name: _entry("job", path, hashed=True) for path in told}
        listed.append(Item(JOB_FILES_ROLE, beside, False, entries))
    return listed


def loaded_checkpoints(job: Job) -> list[Path]:
    """The checkpoints that the job's ranks will load, absolute.

    Those to be scored, or where the run goes on from.

    Raises CheckpointError when one that the job names is damaged.
    """
    if isinstance(job, EvaluateJob):
        return [Path(path).absolute() for path in job.checkpoints]
    if not isinstance(job, TrainJob):
        return []
    root = Path(job.run_directory).absolute() / CHECKPOINTS_NAME
    if job.config.launch.data_placement == "node_local":  # the one that the ranks will find whole
        newest = latest_complete(root)
    else:
        newest = next(reversed(complete_checkpoints(root)), None)
    named = job.config.resume.checkpoint or job.config.train.pretrained_checkpoint
    if newest is not None or named is None:
        return [newest] if newest is not None else []
    verify(Path(named).absolute(), job.config.verify)
    return [Path(named).absolute()]


_Read = tuple[str, Path, list[Path]]
"""Role, directory and, where that is no artifact, files."""


def _read_by(job: Job) -> Iterator[_Read]:
    """What the ranks of a training or a scoring read beside checkpoints."""
    index = Path(job.index_directory).absolute()
    yield "index maps", index, _below(index)
    for prefix in job.token_prefixes:
        place = Path(prefix).absolute()
        yield "token files", place.parent, [bin_path(place), idx_path(place)]
    yield _tokenizer(job.tokenizer_directory)
    if isinstance(job, TrainJob):
        for directory in operator_directories(job.config):
            yield "DeepSpeed's operator", directory, []


def _tokenizer(directory: str) -> _Read:
    place = Path(directory).absolute()
    return "tokenizer", place, sorted(path for path in place.glob("*") if path.is_file())


def _below(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _artifact(role: str, directory: Path, full: bool) -> Item:
    try:
        manifest = Manifest.read(directory)
    except ArtifactError as error:
        raise LaunchError(f"{role}: {error}") from error
    entries = {
        name: Entry(each.size, each.mtime_ns, each.sha256) for name, each in manifest.files.items()
    }
    entries[MANIFEST_NAME] = _entry(role, directory / MANIFEST_NAME, hashed=True)
    return Item(role, directory, True, entries, full)


def _checkpoint(directory: Path) -> Item:
    """Always compared by hashes, as on this machine: a rank reads its part on its own machine."""
    marker = Marker.read(directory)
    entries = {name: Entry(each.size, 0, each.sha256) for name, each in marker.files.items()}
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
