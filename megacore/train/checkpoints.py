"""Checkpoints of one run: resuming, saving, retention and events."""

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.artifact.workspace import CHECKPOINTS_NAME, CONFIG_KEY, WEIGHTS_PREFIX
from megacore.checkpoint.background import CheckpointSaver, SaveFinished
from megacore.checkpoint.collective import (
    RankGroup,
    latest_complete_together,
    refuse_only_damaged,
    verify_together,
)
from megacore.checkpoint.format import (
    Marker,
    complete_checkpoints,
    directory_name,
    finite_or_none,
    iteration_of,
    read_state,
    reading,
)
from megacore.checkpoint.retain import clean_up_and_report
from megacore.checkpoint.spec import (
    MODEL_KEY,
    changed_rotations,
    check_same_model,
    read_spec,
)
from megacore.config.blend_schedule import BLEND_SCHEDULE, check_past_weights
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec
from megacore.engine.base import Engine
from megacore.errors import CheckpointError, ConfigError
from megacore.observe.logging import logger
from megacore.observe.recorder import Recorder
from megacore.parallel.mesh import ProcessMesh
from megacore.train.evaluate import Evaluation
from megacore.train.state import PLANNED_KEY, TrainState

if TYPE_CHECKING:
    from megacore.config.difference import Change

PRECISION_KEY = "precision"
"""Key of the run's precision in a checkpoint's state; it is stored because `auto` depends on the
machine."""
VALIDATION_KEY = "validation"
"""Key of the loss and the number of samples of the validation before the save."""
_PROGRESS_INTERVAL = 5.0
"""Seconds between two progress events of a save in the background."""


class RunCheckpoints:
    """Loader and saver of one rank's checkpoints.

    Every rank calls the same methods in the same order.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        mesh: ProcessMesh,
        recorder: Recorder,
        run_directory: Path,
        spec: ModelSpec,
        *,
        planned_samples: int | None = None,
    ) -> None:
        """Create the loader and saver without reading or writing anything. Collective.

        Args:
            config: configuration of the run.
            engine: owner of the tensors to load and save.
            mesh: this process's groups.
            recorder: receiver of the checkpoint events.
            run_directory: directory that contains the run's checkpoints.
            spec: model specification, stored in every checkpoint.
            planned_samples: samples for which the order was planned, stored in every checkpoint;
                None stores nothing.
        """
        keep = config.checkpoint
        self.root = run_directory / CHECKPOINTS_NAME
        self.changes: list[Change] = []
        """Differences between this configuration and that of the checkpoint from which the run
        resumed."""
        self._config, self._engine, self._mesh, self._recorder, self._spec = (
            config,
            engine,
            mesh,
            recorder,
            spec,
        )
        self._planned_samples = planned_samples
        self._ranks = RankGroup(None)
        self._saver = CheckpointSaver(
            self.root,
            asynchronous=keep.asynchronous,
            beat=mesh.beat,
            keep_last=keep.keep_last,
            keep_every=keep.keep_every,
            keep_best=keep.keep_best,
        )
        self._consumed_samples: dict[int, int] = {}
        self._begun_at: dict[int, Path] = {}
        self._progress_due = 0.0

    def resume(self, state: TrainState) -> Path | None:
        """Resume from the run's newest complete checkpoint, or from the configured one.

        Fills the engine and `state`. A new run starts at iteration 0, with the weights of
        `train.pretrained_checkpoint` if it is set.

        Returns:
            Path of the checkpoint from which the run resumes; None for a new run.

        Raises:
            CheckpointError: the checkpoint is damaged, of another model, or contains only weights,
                or the run has complete checkpoints and all are damaged.
            ConfigError: the configuration differs from the checkpoint's in a field that must not
                change.
        """
        self._beat_load()
        self._ranks.on_first(
            partial(
                clean_up_and_report,
                self.root,
                self._recorder,
                self._report_earlier,
                self._beat_load,
            ),
            self._beat_load,
        )
        self._saver.losses.update(self._recorder.validation_losses())
        self._beat_load()
        path = latest_complete_together(
            self.root,
            self._ranks,
            log=self._recorder.warning,
            progress=self._beat_load,
            damaged=self._saver.damaged,
        )
        if path is None:
            refuse_only_damaged(self.root, self._ranks)
        configured = self._config.resume.checkpoint
        if path is not None:
            self._load(path, state, another_run=False)
            self._beat_load()
            # A kill may have prevented the retention after the last save.
            self._report_deleted(self._ranks.on_first(partial(self._saver.retain, path)))
        elif configured is not None:
            path = Path(configured)
            self._check(path)
            with reading(path):
                self._load(path, state, another_run=True)
            self._begun_at[state.iteration] = path
        elif self._config.train.pretrained_checkpoint is not None:
            first = Path(self._config.train.pretrained_checkpoint)
            self._check(first, extends=True)
            with reading(first):
                self._begin_with(first)
        return path

    def save(self, state: TrainState, validation: Evaluation | None) -> None:
        """Start saving a checkpoint of `state`; the next update needs `finish_copy` before it.

        `validation` is the evaluation behind its `valid_ppl`, None if there was no time for it.
        Collective. Raises the error of the previous save, if it failed.
        """
        values: dict[str, Any] = {
            "train": state.to_json(),
            "engine": self._engine.state(),
            MODEL_KEY: self._spec.model_dump(mode="json"),
            CONFIG_KEY: self._config.model_dump(mode="json"),
            PRECISION_KEY: self._engine.precision,
        }
        if self._planned_samples is not None:
            values[PLANNED_KEY] = self._planned_samples
        loss = None if validation is None else validation.loss
        if validation is not None:
            values[VALIDATION_KEY] = {
                "loss": finite_or_none(validation.loss),
                "samples": validation.samples,
            }
        self._consumed_samples[state.iteration] = state.consumed_samples
        self._saver.save(state.iteration, self._engine.tensors(), values, validation_loss=loss)
        self._recorder.event("checkpoint_started", iteration=state.iteration)
        self._progress_due = time.monotonic() + _PROGRESS_INTERVAL
        self.poll()

    def finish_copy(self) -> None:
        """Wait until the weights and the optimizer's state may change."""
        self._saver.finish_copy()

    def add_loss(self, iteration: int, loss: float) -> None:
        """Let the retention know a validation loss that was measured after the save."""
        if math.isfinite(loss):
            self._saver.losses[iteration] = loss

    @property
    def failed(self) -> bool:
        """True if a background save has failed on this rank; `wait` raises its error."""
        return self._saver.failed

    @property
    def saving(self) -> bool:
        """True while this rank saves in the background, which slows it down."""
        return self._saver.saving

    def poll(self) -> None:
        """Report the progress and the result of a background save.

        A failure is left to `wait`, which raises it on all ranks together.
        """
        self._report(self._saver.poll())
        if time.monotonic() < self._progress_due:
            return
        self._progress_due = time.monotonic() + _PROGRESS_INTERVAL
        progress = self._saver.progress()
        if progress is not None:
            written, size = progress
            self._recorder.event("checkpoint_progress", bytes_written=written, size_bytes=size)

    def wait(self) -> None:
        """Wait until the last save is complete. Raises its error."""
        self._report(self._saver.wait())

    def close(self) -> None:
        """Release the saver's threads and memory."""
        self._saver.close()

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint of this run, checking only file sizes.

        Those that the resume passed over are left out.
        """
        complete = reversed(complete_checkpoints(self.root))
        return next((path for path in complete if path not in self._saver.damaged), None)

    def path_of(self, iteration: int) -> Path:
        """Return the path of an iteration's checkpoint, another run's where this one began."""
        return self._begun_at.get(iteration, self.root / directory_name(iteration))

    def _beat_load(self) -> None:
        """Report progress: reading a large checkpoint may take longer than the stall limit."""
        self._mesh.beat("load")

    def _report_earlier(self, path: Path, marker: Marker) -> None:
        """Record a checkpoint of an earlier attempt. Raises CheckpointError if it is damaged."""
        consumed = TrainState.from_json(read_state(path).get("train", {})).consumed_samples
        self._report_checkpoint(path, marker, consumed)

    def _check(self, path: Path, *, extends: bool = False) -> None:
        """Refuse a damaged checkpoint and one of another model, on all ranks.

        It comes before a rank's own errors: one that is missing on one host would leave the others
        waiting.
        """
        verify_together(path, self._ranks, progress=self._beat_load)
        self._ranks.on_first(
            lambda: check_same_model(path, read_spec(path), self._spec, extends=extends)
        )

    def _load(self, path: Path, state: TrainState, *, another_run: bool) -> None:
        saved = read_state(path)
        if "train" not in saved or "engine" not in saved:
            raise CheckpointError(
                f"{path} holds weights without the state of a training: begin with them through "
                "train.pretrained_checkpoint instead of resume.checkpoint"
            )
        restored = TrainState.from_json(saved["train"])
        before = saved.get(CONFIG_KEY)
        if before is None:
            logger.info(
                "%s does not say with which configuration it was written: nothing was compared",
                path,
            )
        else:
            self._compare(path, before, saved.get(PRECISION_KEY), another_run=another_run)
            self._check_past_weights(path, before, restored)
            self._check_warmup(path, before, restored)
        check_skipped(self._config.train.skipped_ranges, restored, path)
        from megacore.checkpoint.load import load_checkpoint, names_of_all

        tensors = self._engine.tensors()
        load_checkpoint(path, tensors, expected=names_of_all(tensors), progress=self._beat_load)
        self._engine.load_state(saved["engine"], tensors)
        vars(state).update(vars(restored))
        logger.info("resumed from %s at iteration %d", path, state.iteration)

    def _compare(
        self,
        path: Path,
        saved_config: dict[str, Any],
        precision: str | None,
        *,
        another_run: bool,
    ) -> None:
        """Log the differences from a checkpoint's configuration and refuse forbidden ones.

        The precision is compared as well.
        """
        now = self._config
        if precision is not None:
            saved_config = {
                **saved_config,
                "train": saved_config["train"] | {"precision": precision},
            }
            train = now.train.model_copy(update={"precision": self._engine.precision})
            now = now.model_copy(update={"train": train})
        from megacore.config.difference import check_resume, compare_configurations

        self.changes = compare_configurations(saved_config, now, another_run=another_run)
        for change in self.changes:
            logger.info("changed since the checkpoint: %s", change)
        check_resume(self.changes, self._config.resume.override, str(path))

    def _check_past_weights(
        self, path: Path, saved_config: dict[str, Any], state: TrainState
    ) -> None:
        """Refuse other weights of a blend for samples that the checkpoint was trained on."""
        allowed = self._config.resume.override
        if BLEND_SCHEDULE not in allowed and "data" not in allowed:
            check_past_weights(
                saved_config.get("data", {}), self._config.data, state.consumed_samples, str(path)
            )

    def _check_warmup(self, path: Path, saved_config: dict[str, Any], state: TrainState) -> None:
        """Refuse another batch size within a warm-up in samples, and warn of it in the decay.

        Raises ConfigError, CheckpointError.
        """
        from megacore.config.difference import changed_warmup

        changed = changed_warmup(
            saved_config,
            self._config,
            str(path),
            consumed_samples=state.consumed_samples,
            applied_iterations=state.applied_iterations,
        )
        if changed is not None:
            self._recorder.warning(changed)

    def _begin_with(self, path: Path) -> None:
        """Load the weights of a pretrained checkpoint, whatever layout wrote it.

        The optimizer starts from its initial state.
        """
        weights = {
            name: tensor
            for name, tensor in self._engine.tensors().items()
            if name.startswith(WEIGHTS_PREFIX)
        }
        from megacore.checkpoint.load import load_checkpoint, names_of_all

        load_checkpoint(
            path,
            weights,
            prefix=WEIGHTS_PREFIX,
            expected=names_of_all(weights),
            progress=self._beat_load,
        )
        self._engine.load_state(self._engine.state(), weights)  # copies the weights into the model
        logger.info("began with the weights of %s", path)
        self._ranks.on_first(lambda: self._report_extension(path))

    def _report_extension(self, path: Path) -> None:
        """Log how the context grows, and warn of a scaling for another length."""
        saved = read_spec(path)
        before, now = saved.max_position_embeddings, self._spec.max_position_embeddings
        changed = changed_rotations(saved, self._spec)
        if before < now or changed:
            logger.info(
                "the context changes from %d to %d tokens%s",
                before,
                now,
                "".join(f", {change}" for change in changed),
            )
        scaling = self._spec.model.rope_scaling
        original = getattr(scaling, "original_max_position_embeddings", before)
        if changed and original != before:
            self._recorder.warning(
                f"model.rope_scaling.original_max_position_embeddings is {original}, but "
                f"{path} is of a model of {before} tokens: the frequencies are scaled for another "
                "length"
            )

    def _report(self, finished: SaveFinished | None) -> None:
        if finished is None:
            return
        iteration = finished.marker.iteration
        consumed = self._consumed_samples.pop(iteration)
        self._report_checkpoint(
            finished.path,
            finished.marker,
            consumed,
            seconds=finished.seconds,
            stall_seconds=finished.stall_seconds,
        )
        logger.info(
            "saved checkpoint %s in %.1f s, for which training waited %.2f s",
            finished.path,
            finished.seconds,
            finished.stall_seconds,
        )
        self._report_deleted(finished.deleted)

    def _report_deleted(self, paths: list[Path]) -> None:
        for path in paths:
            self._recorder.event("checkpoint_deleted", iteration=iteration_of(path), path=str(path))

    def _report_checkpoint(
        self,
        path: Path,
        marker: Marker,
        consumed_samples: int,
        *,
        seconds: float | None = None,
        stall_seconds: float | None = None,
    ) -> None:
        """Record one event; times are None if another attempt wrote the checkpoint."""
        self._recorder.event(
            "checkpoint",
            iteration=marker.iteration,
            consumed_samples=consumed_samples,
            consumed_tokens=consumed_samples * self._config.data.seq_length,
            path=str(path),
            size_bytes=marker.size_bytes,
            seconds=seconds,
            stall_seconds=stall_seconds,
            validation_loss=marker.validation_loss,
        )


def check_skipped(skipped: Sequence[range], state: TrainState, checkpoint: Path) -> None:
    """Refuse to skip samples that the checkpoint has already been trained on.

    Raises a ConfigError that names them.
    """
    learned = [samples for samples in skipped if _learned(samples, state)]
    if learned:
        ranges = ", ".join(f"{samples.start}-{samples.stop - 1}" for samples in learned)
        raise ConfigError(
            f"train.skip_samples names {ranges}, but {checkpoint} was trained on samples up to "
            f"{state.consumed_samples - 1}, some of these among them: take them out of "
            "train.skip_samples, or move newer checkpoints away to resume from one before them"
        )


def _learned(samples: range, state: TrainState) -> bool:
    """Return True if a sample of a range was consumed and not skipped."""
    # Every sample between the range's start and `learned` was skipped.
    learned = samples.start
    for first, last in sorted(state.passed_over):
        if first > learned:
            break
        learned = max(learned, last + 1)
    return learned < min(samples.stop, state.consumed_samples)
