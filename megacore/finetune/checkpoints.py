"""The checkpoints of a fine-tuning: the Trainer's, believed only with their marker.

`checkpoints/iter_0000120/` holds `checkpoint-120/`, which transformers' Trainer writes (of DDP
model.safetensors, optimizer.pt and scheduler.pt, of DeepSpeed `global_step120/*.pt`, and each
rank's random numbers), `progress.json` with the position, and `complete.json`, written last, with
size and sha256 of every other file. It is for one way to divide the model and one number of ranks.

Only files of the run's own directory are read, and those after their hashes were compared. The
Trainer reads them with `weights_only`; DeepSpeed unpickles its own, which can execute code: never
take a checkpoint from elsewhere.
"""

import hashlib
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from megacore.artifact.files import sync_directory, sync_tree, workspace_errors, write_json
from megacore.artifact.workspace import CHECKPOINTS_NAME
from megacore.checkpoint.collective import RankGroup, latest_complete_together
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
from megacore.checkpoint.retain import apply_retention, remove_stale, rename_away
from megacore.checkpoint.save import sync_file
from megacore.errors import CheckpointError, WorkspaceError
from megacore.observe.logging import logger

if TYPE_CHECKING:
    from megacore.observe.recorder import Recorder

_TORN = ("pytorchstreamwriter failed", "unexpected pos", "os error", "i/o error")
"""What torch and safetensors say instead of an OSError when a disk takes no more."""


class WholeDirectory:
    """Writes `iter_*` directories below one root.

    Every rank calls the same methods in the same order.
    """

    def __init__(self, root: Path, ranks: RankGroup) -> None:
        """Nothing is written yet."""
        self.root, self._ranks = root, ranks

    def stage(self, iteration: int) -> Path:
        """An empty directory to fill, the same on every rank. Collective. Raises WorkspaceError."""

        def make() -> Path:
            path = self.root / f"{directory_name(iteration)}{STALE_SUFFIX}{secrets.token_hex(4)}"
            with workspace_errors(path):
                path.mkdir(parents=True)
            return path

        return self._ranks.on_first(make)

    def finish(self, staged: Path, iteration: int, validation_loss: float | None) -> Marker:
        """Make what all ranks have written into `staged` the one directory of its iteration.

        Collective.

        Each rank hashes and syncs a share of the files. Until the last rename nothing has the final
        name; what had it before, and was not believed, is moved away first.
        """
        final = self.root / directory_name(iteration)
        names = self._ranks.on_first(lambda: _names(staged))
        own = names[self._ranks.rank :: self._ranks.size]
        records = {
            name: record
            for part in self._ranks.everywhere(lambda: _measure(staged, own))
            for name, record in part
        }

        def complete() -> Marker:
            marker = Marker(
                iteration, finite_or_none(validation_loss), {name: records[name] for name in names}
            )
            with workspace_errors(staged):
                sync_tree(staged)
                marker.write(staged)
                if final.exists():
                    shutil.rmtree(rename_away(final))
                staged.rename(final)
                sync_directory(self.root)
            return marker

        return self._ranks.on_first(complete)


def _names(directory: Path) -> list[str]:
    return sorted(
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    )


def _measure(directory: Path, names: list[str]) -> list[tuple[str, FileRecord]]:
    with workspace_errors(directory):
        for name in names:
            sync_file(directory / name)
        return [(name, FileRecord.of(directory / name)) for name in names]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn every way in which a library says that the disk takes no more into WorkspaceError."""
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


def silent(phase: str) -> None:
    """Called with each phase where nobody watches."""


Beat = Callable[[str], None]


PROGRESS_NAME = "progress.json"
_VERSION = 2
"""Version 1 lay beside files of Accelerate's save_state."""


@dataclass
class Progress:
    """Position and account of a run; the samples that come next follow from it."""

    iteration: int = 0
    """Optimizer steps taken."""
    epoch: int = 0
    """Passes over the training split that are complete."""
    batches: int = 0
    """Forward passes of each rank in the pass that is under way."""
    consumed_samples: int = 0
    """Read by all ranks together."""
    consumed_tokens: int = 0
    """Read by all ranks together, padding left out."""
    evaluation_due: bool = True
    """Whether the model as it is now is to be evaluated, which was not done yet."""
    start_metrics: dict[str, float] | None = None
    """Of the model before the first step."""
    metrics: dict[str, float] | None = None
    """Of the last evaluation."""
    evaluated: int | None = None
    """Step after which that was."""
    epoch_seconds: float = 0.0
    """Training time in the pass that is under way."""
    train_seconds: list[float] = field(default_factory=list)
    """Training time of each complete pass."""
    evaluation_seconds: float = 0.0
    """Of the last evaluation."""
    skipped: int = 0
    """Steps in a row that fp16 has skipped since a gradient overflowed."""

    @property
    def own_metrics(self) -> dict[str, float] | None:
        """Of the model as it is now; None where it was not evaluated."""
        return self.metrics if self.evaluated == self.iteration else None

    def to_json(self) -> dict[str, Any]:
        """Values for a checkpoint."""
        return {"version": _VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Read them back. Raises CheckpointError."""
        kept = dict(values)
        version = kept.pop("version", None)
        if version != _VERSION:
            raise CheckpointError(
                f"a checkpoint's {PROGRESS_NAME} has version {version}, this version reads "
                f"{_VERSION}: install the version of megacore that wrote it"
            )
        try:
            return cls(**kept)
        except TypeError as error:
            raise CheckpointError(
                f"a checkpoint's {PROGRESS_NAME} cannot be read: {error}"
            ) from error


class FinetuneCheckpoints:
    """Loads and saves for one rank; every rank calls the same methods in the same order."""

    def __init__(
        self,
        write_state: Callable[[Path], None],
        recorder: "Recorder",
        run_directory: Path,
        *,
        keep_last: int,
        beat: Beat = silent,
    ) -> None:
        """Nothing is read or written yet.

        Args:
            write_state: writes what training goes on from below a directory; collective.
            recorder: where the account of checkpoints goes.
            run_directory: below which they lie.
            keep_last: the newest ones that are kept.
            beat: is told what this rank does.
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
        self._directory = WholeDirectory(self.root, self._ranks)

    def resume(self) -> tuple[Progress, Path | None]:
        """Choose the newest complete checkpoint; the beginning, and None, where there is none.

        Collective.

        Incomplete and damaged ones are passed over, with a warning that is also an event.

        Raises:
            CheckpointError: it is of another number of ranks, or of another version.
        """
        self._beat("load")
        self._ranks.on_first(self._take_stock)
        path = latest_complete_together(self.root, self._ranks, log=self._recorder.warning)
        if path is None:
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
        """Write a checkpoint of where the run stands. Collective.

        Raises WorkspaceError.
        """
        self._beat("save")
        staged = self._directory.stage(progress.iteration)
        with writing(staged):
            self._write_state(staged)
        digests = self._ranks.everywhere(_random_digest)
        values = progress.to_json() | {"random_state": digests}
        self._ranks.on_first(lambda: write_json(staged / PROGRESS_NAME, values))
        barrier()  # what the others have written is hashed now
        marker = self._directory.finish(
            staged, progress.iteration, (progress.own_metrics or {}).get("loss")
        )
        path = self.path_of(progress.iteration)
        self._report(path, marker, progress)
        logger.info("saved checkpoint %s", path)
        self._report_deleted(self._ranks.on_first(partial(self._retain, path)))

    def state_of(self, path: Path) -> Path:
        """Where the Trainer's own files lie below a checkpoint."""
        return path / f"checkpoint-{iteration_of(path)}"

    def check_random_state(self) -> None:
        """Raise CheckpointError unless this rank's random numbers are those of the checkpoint.

        Collective.
        """
        assert self._random_state is not None
        self._ranks.everywhere(partial(_check_random_state, *self._random_state))

    def path_of(self, iteration: int) -> Path:
        """Where the checkpoint of an iteration lies."""
        return self.root / directory_name(iteration)

    def newest(self) -> Path | None:
        """The newest complete checkpoint, its files' sizes alone looked at."""
        return next(reversed(complete_checkpoints(self.root)), None)

    def kept(self) -> list[dict[str, Any]]:
        """The complete checkpoints, oldest first."""
        return [
            {
                "iteration": marker.iteration,
                "path": path.relative_to(self._run_directory).as_posix(),
                "validation_loss": marker.validation_loss,
            }
            for path, marker in complete_checkpoints(self.root).items()
        ]

    def _retain(self, path: Path) -> list[Path]:
        return apply_retention(self.root, keep_last=self._keep_last, keep_best=False, in_use=path)

    def _take_stock(self) -> None:
        """On the first rank: clear what a crash left, and report what it kept unreported."""
        if self.root.is_dir():
            remove_stale(self.root)
        markers = complete_checkpoints(self.root)
        present = {marker.iteration: path for path, marker in markers.items()}
        reported = self._recorder.reported_checkpoints()
        for iteration in sorted(present.keys() - reported.keys()):
            path = present[iteration]
            try:
                values = read_state(path, PROGRESS_NAME)
                values.pop("random_state", None)
                progress = Progress.from_json(values)
            except CheckpointError:
                continue  # whoever goes on from it finds the damage, and passes it over
            self._report(path, markers[path], progress)
        for iteration in sorted(reported.keys() - present.keys()):
            self._recorder.event(
                "checkpoint_deleted", iteration=iteration, path=reported[iteration]
            )

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
    """Of what this rank's next random numbers follow from."""
    states = [
        torch.get_rng_state(),
        *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else []),
    ]
    return hashlib.sha256(torch.cat(states).numpy().tobytes()).hexdigest()


def _check_random_state(path: Path, digest: str) -> None:
    if _random_digest() != digest:
        raise CheckpointError(
            f"{path}: the random numbers of this rank cannot be taken up: use another checkpoint"
        )
