"""The checkpoints of a fine-tuning: Accelerate's states, believed only with their marker.

`checkpoints/iter_0000120/` holds what `Accelerator.save_state` writes (of DDP model.safetensors, optimizer.bin and
scheduler.bin, of DeepSpeed `pytorch_model/*.pt`, and each rank's random numbers), `progress.json` with the position,
and `complete.json`, written last, with size and sha256 of every other file. It is for one way to divide the model and
one number of ranks.

Only files of the run's own directory are read, and those after their hashes were compared. Accelerate reads them with
`weights_only`; DeepSpeed unpickles its own, which can execute code: never take a checkpoint from elsewhere.
"""

import hashlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megacore.artifact.files import write_json
from megacore.checkpoint.collective import RankGroup, latest_complete_together
from megacore.checkpoint.format import Marker, complete_checkpoints, directory_name, iteration_of, read_state, reading
from megacore.checkpoint.retain import apply_retention, remove_stale
from megacore.errors import CheckpointError
from megacore.finetune.files import Beat, WholeDirectory, barrier, silent, writing
from megacore.finetune.progress import PROGRESS_NAME, Progress
from megacore.observe.logging import logger
from megacore.train.names import CHECKPOINTS_NAME

if TYPE_CHECKING:
    from accelerate import Accelerator

    from megacore.observe.recorder import Recorder


class FinetuneCheckpoints:
    """Loads and saves for one rank; every rank calls the same methods in the same order."""

    def __init__(
        self,
        accelerator: "Accelerator",
        recorder: "Recorder",
        run_directory: Path,
        *,
        keep_last: int,
        beat: Beat = silent,
    ) -> None:
        """Nothing is read or written yet.

        Args:
            accelerator: of the job, with model, optimizer and scheduler prepared.
            recorder: where the account of checkpoints goes.
            run_directory: below which they lie.
            keep_last: the newest ones that are kept.
            beat: is told what this rank does.
        """
        self.root = run_directory / CHECKPOINTS_NAME
        self._run_directory = run_directory
        self._accelerator, self._recorder, self._keep_last, self._beat = accelerator, recorder, keep_last, beat
        self._ranks = RankGroup(None)
        self._directory = WholeDirectory(self.root, self._ranks)

    def resume(self) -> tuple[Progress, Path | None]:
        """Go on from the newest complete checkpoint; the beginning, and None, where there is none. Collective.

        Incomplete and damaged ones are passed over, with a warning that is also an event.

        Raises:
            CheckpointError: it is of another number of ranks, or its random numbers cannot be taken up.
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
                    f"{path} is of {len(random_state)} ranks and the job has {self._ranks.size}: start it with as many "
                    "ranks as before"
                )
            self._accelerator.load_state(str(path))
            # Accelerate goes on without them when it cannot take them up.
            self._ranks.everywhere(partial(_check_random_state, path, random_state[self._ranks.rank]))
        self._report_deleted(self._ranks.on_first(partial(self._retain, path)))
        progress = Progress.from_json(values)
        logger.info("resumed from %s at step %d", path, progress.iteration)
        return progress, path

    def save(self, progress: Progress) -> None:
        """Write a checkpoint of where the run stands. Collective.

        Raises WorkspaceError.
        """
        self._beat("save")
        staged = self._directory.stage(progress.iteration)
        with writing(staged):
            self._accelerator.save_state(str(staged))
        digests = self._ranks.everywhere(_random_digest)
        values = progress.to_json() | {"random_state": digests}
        self._ranks.on_first(lambda: write_json(staged / PROGRESS_NAME, values))
        barrier()  # what the others have written is hashed now
        marker = self._directory.finish(staged, progress.iteration, (progress.own_metrics or {}).get("loss"))
        path = self.path_of(progress.iteration)
        self._report(path, marker, progress)
        logger.info("saved checkpoint %s", path)
        self._report_deleted(self._ranks.on_first(partial(self._retain, path)))

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
        """On the first rank: clear what a crash left, and report what it kept from being reported."""
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
            self._recorder.event("checkpoint_deleted", iteration=iteration, path=reported[iteration])

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
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]
    return hashlib.sha256(torch.cat(states).numpy().tobytes()).hexdigest()


def _check_random_state(path: Path, digest: str) -> None:
    if _random_digest() != digest:
        raise CheckpointError(f"{path}: the random numbers of this rank cannot be taken up: use another checkpoint")
