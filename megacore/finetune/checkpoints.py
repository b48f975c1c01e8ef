"""Checkpoints of a fine-tuning: the Trainer's files with a marker of completeness.

`checkpoints/iter_0000120/` contains `checkpoint-120/`, `progress.json` with the position, and
`complete.json`, written last, with size and sha256 of every other file. transformers' Trainer
writes `checkpoint-120/`: with DDP model.safetensors, optimizer.pt and scheduler.pt, with DeepSpeed
`global_step120/*.pt`, and the random number state of each rank. A checkpoint can only be loaded
with the same distribution and number of ranks.

Only files of the run's own directory are read, and only after their hashes were verified. The
Trainer reads them with `weights_only`. DeepSpeed unpickles its files, which can execute code: never
load a checkpoint from an untrusted source.
"""

import hashlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from megacore.artifact.files import sync_tree, workspace_errors, write_json
from megacore.artifact.workspace import CHECKPOINTS_NAME
from megacore.checkpoint.collective import RankGroup, latest_complete_together, refuse_only_damaged
from megacore.checkpoint.format import (
    STALE_SUFFIX,
    FileRecord,
    Marker,
    complete_checkpoints,
    directory_name,
    finite_or_none,
    iteration_of,
    read_state,
    reading,
)
from megacore.checkpoint.retain import (
    apply_retention,
    clean_up_and_report,
    publish,
)
from megacore.checkpoint.save import sync_file
from megacore.errors import CheckpointError, WorkspaceError
from megacore.observe.logging import logger
from megacore.paths import is_file, rglob

if TYPE_CHECKING:
    from megacore.observe.recorder import Recorder

_TORN = (
    "pytorchstreamwriter failed",
    "unexpected pos",
    "iostream error",
    "os error",
    "i/o error",
)
"""Messages of torch and safetensors, instead of an OSError, when a disk is full or fails."""


class AtomicDirectory:
    """Atomic writer of `iter_*` directories below a root.

    Every rank calls the same methods in the same order.
    """

    def __init__(self, root: Path, ranks: RankGroup) -> None:
        """Initialize without writing any file."""
        self.root, self._ranks = root, ranks

    def stage(self, iteration: int) -> Path:
        """Create an empty directory and return its path on all ranks. Collective.

        Raises WorkspaceError.
        """

        def make() -> Path:
            path = self.root / f"{directory_name(iteration)}{STALE_SUFFIX}{secrets.token_hex(4)}"
            with workspace_errors(path):
                path.mkdir(parents=True)
            return path

        return self._ranks.on_first(make)

    def finish(self, staged: Path, iteration: int, validation_loss: float | None) -> Marker:
        """Rename the complete directory `staged` to the final name of its iteration. Collective.

        Each rank hashes and syncs a share of the files. The last rename gives the directory its
        final name and replaces what has that name.
        """
        final = self.root / directory_name(iteration)
        names = self._ranks.on_first(lambda: _names(staged))
        local_names = names[self._ranks.rank :: self._ranks.size]
        records = {
            name: record
            for part in self._ranks.everywhere(lambda: _measure(staged, local_names))
            for name, record in part
        }

        def complete() -> Marker:
            marker = Marker(
                iteration, finite_or_none(validation_loss), {name: records[name] for name in names}
            )
            with workspace_errors(staged):
                sync_tree(staged)
                marker.write(staged)
                publish(staged, final)
            return marker

        return self._ranks.on_first(complete)


def _names(directory: Path) -> list[str]:
    return sorted(
        path.relative_to(directory).as_posix() for path in rglob(directory, "*") if is_file(path)
    )


def _measure(directory: Path, names: list[str]) -> list[tuple[str, FileRecord]]:
    with workspace_errors(directory):
        for name in names:
            sync_file(directory / name)
        return [(name, FileRecord.of(directory / name)) for name in names]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Translate errors of libraries for a full or failing disk into WorkspaceError."""
    try:
        with workspace_errors(path):
            yield
    except WorkspaceError:
        raise
    except Exception as error:
        if not any(phrase in str(error).lower() for phrase in _TORN):
            raise
        raise WorkspaceError(
            f"cannot write {path}: {str(error).splitlines()[0]}: free some space, or write "
            "elsewhere (MEGACORE_WORKSPACE names another workspace)"
        ) from error


def barrier() -> None:
    """Wait for the other ranks, if there are any."""
    if dist.is_initialized():
        dist.barrier()


PROGRESS_NAME = "progress.json"
_VERSION = 3
_READABLE = (2, _VERSION)
"""Versions that can be read. Version 1 was stored next to files of Accelerate's save_state; version
2 has no `interval_losses`."""


@dataclass
class Progress:
    """Position and statistics of a run; the position determines the next samples."""

    iteration: int = 0
    """Optimizer steps taken."""
    epoch: int = 0
    """Complete passes over the training split."""
    batches: int = 0
    """Forward passes of each rank in the current epoch."""
    consumed_samples: int = 0
    """Samples read by all ranks together."""
    consumed_tokens: int = 0
    """Tokens read by all ranks together, without padding."""
    evaluation_due: bool = True
    """True if the current model still has to be evaluated."""
    start_metrics: dict[str, float] | None = None
    """Metrics of the model before the first step."""
    metrics: dict[str, float] | None = None
    """Metrics of the last evaluation."""
    evaluated: int | None = None
    """Step after which the last evaluation took place."""
    epoch_seconds: float = 0.0
    """Training time in the current epoch."""
    train_seconds: list[float] = field(default_factory=list)
    """Training time of each complete epoch."""
    evaluation_seconds: float = 0.0
    """Duration of the last evaluation."""
    skipped: int = 0
    """Number of consecutive steps that fp16 skipped because a gradient overflowed."""
    interval_losses: list[float] = field(default_factory=list)
    """Loss of each step since the last step event, so that a run resumed within a log interval
    reports the mean of the whole interval."""

    @property
    def own_metrics(self) -> dict[str, float] | None:
        """Metrics of the current model; None if it was not evaluated."""
        return self.metrics if self.evaluated == self.iteration else None

    def to_json(self) -> dict[str, Any]:
        """Return the values for a checkpoint."""
        return {"version": _VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Read the values of a checkpoint. Raises CheckpointError."""
        fields = dict(values)
        version = fields.pop("version", None)
        if version not in _READABLE:
            raise CheckpointError(
                f"a checkpoint's {PROGRESS_NAME} has version {version}, this version reads "
                f"{' and '.join(map(str, _READABLE))}: install the version of megacore that wrote "
                "it"
            )
        try:
            return cls(**fields)
        except TypeError as error:
            raise CheckpointError(
                f"a checkpoint's {PROGRESS_NAME} cannot be read: {error}"
            ) from error


class FinetuneCheckpoints:
    """Checkpoints of one rank; every rank calls the same methods in the same order."""

    def __init__(
        self,
        write_state: Callable[[Path], None],
        recorder: "Recorder",
        run_directory: Path,
        *,
        keep_last: int,
        beat: Callable[[str], None],
    ) -> None:
        """Initialize without reading or writing any file.

        Args:
            write_state: collective function that writes the training state below a directory.
            recorder: recorder of checkpoint events and warnings.
            run_directory: directory of the run, the parent of `checkpoints`.
            keep_last: number of newest checkpoints to keep.
            beat: callback, called with the current phase of this rank.
        """
        self.root = run_directory / CHECKPOINTS_NAME
        self._run_directory = run_directory
        self._write_state, self._recorder, self._keep_last, self._beat = (
            write_state,
            recorder,
            keep_last,
            beat,
        )
        self._ranks = RankGroup(None)
        self._random_state: tuple[Path, str] | None = None
        self._damaged: set[Path] = set()
        self._directory = AtomicDirectory(self.root, self._ranks)

    def resume(self) -> tuple[Progress, Path | None]:
        """Load the progress of the newest complete checkpoint. Collective.

        Incomplete and damaged checkpoints are skipped, with a warning that is also an event.

        Returns:
            The progress and the path of the checkpoint; initial progress and None if there is none.

        Raises:
            CheckpointError: the checkpoint is from another number of ranks, or another version, or
                all complete checkpoints are damaged.
        """
        beat = partial(self._beat, "load")
        beat()
        self._ranks.on_first(
            partial(clean_up_and_report, self.root, self._recorder, self._report_earlier, beat),
            beat,
        )
        path = latest_complete_together(
            self.root,
            self._ranks,
            log=self._recorder.warning,
            progress=beat,
            damaged=self._damaged,
        )
        if path is None:
            refuse_only_damaged(self.root, self._ranks)
            return Progress(), None
        with reading(path):
            values = read_state(path, PROGRESS_NAME)
            random_state = values.pop("random_state", [])
            if len(random_state) != self._ranks.size:
                raise CheckpointError(
                    f"{path} is of {len(random_state)} ranks and the job has {self._ranks.size}: "
                    "start it with as many ranks as before"
                )
        progress = Progress.from_json(values)
        self._random_state = path, random_state[self._ranks.rank]
        self._report_deleted(self._ranks.on_first(partial(self._retain, path)))
        logger.info("resumed from %s at step %d", path, progress.iteration)
        return progress, path

    def save(self, progress: Progress) -> None:
        """Write a checkpoint of the current state. Collective.

        Raises WorkspaceError.
        """
        self._beat("save")
        staged = self._directory.stage(progress.iteration)
        with writing(staged):
            self._write_state(staged)
        digests = self._ranks.everywhere(_random_digest)
        values = progress.to_json() | {"random_state": digests}
        self._ranks.on_first(lambda: write_json(staged / PROGRESS_NAME, values))
        barrier()  # the files of all ranks must be complete before they are hashed
        marker = self._directory.finish(
            staged, progress.iteration, (progress.own_metrics or {}).get("loss")
        )
        path = self.path_of(progress.iteration)
        self._report(path, marker, progress)
        logger.info("saved checkpoint %s", path)
        self._report_deleted(self._ranks.on_first(partial(self._retain, path)))

    def state_of(self, path: Path) -> Path:
        """Return the directory of the Trainer's files in a checkpoint."""
        return path / f"checkpoint-{iteration_of(path)}"

    def check_random_state(self) -> None:
        """Raise CheckpointError if this rank's random number state differs from the checkpoint's.

        Collective.
        """
        assert self._random_state is not None
        self._ranks.everywhere(partial(_check_random_state, *self._random_state))

    def path_of(self, iteration: int) -> Path:
        """Return the path of the checkpoint of an iteration."""
        return self.root / directory_name(iteration)

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint; only the sizes of its files are checked."""
        return next(reversed(complete_checkpoints(self.root)), None)

    def kept(self) -> list[dict[str, Any]]:
        """Return the complete checkpoints, oldest first."""
        return [
            {
                "iteration": marker.iteration,
                "path": path.relative_to(self._run_directory).as_posix(),
                "validation_loss": marker.validation_loss,
            }
            for path, marker in complete_checkpoints(self.root).items()
        ]

    def _retain(self, path: Path) -> list[Path]:
        self._damaged.discard(path)  # saved again at the same step
        return apply_retention(
            self.root,
            keep_last=self._keep_last,
            keep_best=False,
            in_use=path,
            damaged=self._damaged,
        )

    def _report_earlier(self, path: Path, marker: Marker) -> None:
        """Record a checkpoint of an earlier attempt. Raises CheckpointError if it is damaged."""
        values = read_state(path, PROGRESS_NAME)
        values.pop("random_state", None)
        self._report(path, marker, Progress.from_json(values))

    def _report(self, path: Path, marker: Marker, progress: Progress) -> None:
        self._recorder.event(
            "checkpoint",
            iteration=marker.iteration,
            path=path.relative_to(self._run_directory).as_posix(),
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            size_bytes=marker.size_bytes,
            validation_loss=marker.validation_loss,
            metrics=progress.own_metrics or {},
        )

    def _report_deleted(self, paths: list[Path]) -> None:
        for path in paths:
            relative = path.relative_to(self._run_directory).as_posix()
            self._recorder.event("checkpoint_deleted", iteration=iteration_of(path), path=relative)


def _random_digest() -> str:
    """Return the digest of this rank's random number state."""
    states = [
        torch.get_rng_state(),
        *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else []),
    ]
    return hashlib.sha256(torch.cat(states).numpy().tobytes()).hexdigest()


def _check_random_state(path: Path, digest: str) -> None:
    if _random_digest() != digest:
        raise CheckpointError(
            f"{path}: the random state of this rank cannot be restored: use another checkpoint"
        )
