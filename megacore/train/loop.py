"""The training loop: resume, iterate, look, save."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megacore.checkpoint.collective import RankGroup
from megacore.checkpoint.format import Marker, complete_checkpoints, iteration_of, read_state, verify
from megacore.checkpoint.load import latest_complete, load_checkpoint, names_of_all
from megacore.checkpoint.retain import apply_retention, remove_stale
from megacore.checkpoint.save import save_checkpoint
from megacore.checkpoint.spec import MODEL_KEY, check_same_model, read_spec
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec
from megacore.data.sampler import PrefetchingIterator, micro_batches
from megacore.data.samples import Batch, Dataset
from megacore.engine.base import Engine, Update
from megacore.errors import DataFormatError, TrainingError
from megacore.observe.flops import TransformerShape
from megacore.observe.logging import logger
from megacore.observe.recorder import Recorder
from megacore.observe.timers import Timers
from megacore.parallel.mesh import ProcessMesh
from megacore.train.batch_schedule import BatchSchedule
from megacore.train.evaluate import evaluate
from megacore.train.loss_check import LossCheck
from megacore.train.memory import memory_errors
from megacore.train.report import RateMeter
from megacore.train.state import TrainState
from megacore.train.step import Stepper, reader

CHECKPOINTS_NAME = "checkpoints"
WEIGHTS_PREFIX = "model."
"""Of the names of a checkpoint's weights."""


@dataclass(frozen=True)
class Datasets:
    """The splits that training reads."""

    train: Dataset
    valid: Dataset


class Trainer:
    """One run on one rank; every rank runs the same loop."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        mesh: ProcessMesh,
        datasets: Datasets,
        recorder: Recorder,
        run_directory: Path,
        *,
        spec: ModelSpec,
        peak: float | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            config: the run.
            engine: model and optimizer with their initial weights.
            mesh: this process's groups.
            datasets: train and validation split.
            recorder: where the run's account goes.
            run_directory: with the run's checkpoints, if any.
            spec: the model by itself, which every checkpoint names.
            peak: this rank's peak rate in TFLOP/s for MFU, None where it is not known.

        Raises:
            DataFormatError: the training split has fewer samples than the run reads.
        """
        self._config = config
        self._engine = engine
        self._mesh = mesh
        self._data = datasets
        self._recorder = recorder
        self._spec = spec
        self._checkpoints = run_directory / CHECKPOINTS_NAME
        self._ranks = RankGroup(None)
        self._timers = mesh.timers or Timers(engine.device)
        self._stepper = Stepper(config, engine, mesh, LossCheck(config, mesh, recorder.warning))
        shape = TransformerShape.of(config, engine.padded_vocab_size)
        self._meter = RateMeter(config, shape, self._timers, ranks=mesh.world_size, peak=peak)
        self.state = TrainState()
        wanted = BatchSchedule.of(config).consumed_after(config.train.train_iters)
        if len(datasets.train) < wanted:
            rampup = "" if config.train.rampup_batch_size is None else ", less during the ramp-up,"
            raise DataFormatError(
                f"the index maps of the train split have {len(datasets.train)} samples but train.train_iters "
                f"{config.train.train_iters} x train.global_batch_size {config.train.global_batch_size}{rampup} = "
                f"{wanted} are read: build the index maps again for this train_iters"
            )

    def run(self) -> None:
        """Train until `train.train_iters`; a run that is already there ends at once.

        Raises:
            TrainingError: a loss or gradient is not finite, or memory does not suffice.
            CheckpointError: the newest checkpoint, or the pretrained one, is of another model or damaged.
            WorkspaceError: a checkpoint or an event cannot be written.
        """
        with memory_errors(self._config, self._mesh.rank, self.state):
            self._resume()
            train = self._config.train
            read = reader(self._data.train, self._engine.device)
            with PrefetchingIterator(read, self._upcoming()) as batches:
                self._meter.start(self.state.iteration, self.state.consumed_samples)
                while self.state.iteration < train.train_iters:
                    self._iterate(batches)
        self._recorder.event("exit", reason="finished", iteration=self.state.iteration)

    def _resume(self) -> None:
        """Load the newest complete checkpoint, if there is one, and say how the run starts."""
        path = self._ranks.on_first(self._find_checkpoint)
        if path is not None:
            tensors = self._engine.tensors()
            saved = load_checkpoint(path, tensors, expected=names_of_all(tensors))
            self._engine.load_state(saved["engine"], tensors)
            restored = TrainState.from_json(saved["train"])
            vars(self.state).update(vars(restored))
            logger.info("resumed from %s at iteration %d", path, self.state.iteration)
        elif self._config.train.pretrained_checkpoint is not None:
            self._begin_with(Path(self._config.train.pretrained_checkpoint))
        self._recorder.event(
            "start",
            iteration=self.state.iteration,
            ranks=self._mesh.world_size,
            device=self._engine.device.type,
            precision=self._engine.precision,
            parameters=self._engine.parameters,
            kernels=self._engine.kernels,
            resumed_from=None if path is None else iteration_of(path),
            train_iters=self._config.train.train_iters,
        )

    def _begin_with(self, path: Path) -> None:
        """Take the weights of a pretrained checkpoint, whatever layout wrote it; the optimizer starts afresh."""

        def check() -> None:
            verify(path)
            check_same_model(path, read_spec(path), self._spec)

        self._ranks.on_first(check)
        weights = {name: tensor for name, tensor in self._engine.tensors().items() if name.startswith(WEIGHTS_PREFIX)}
        load_checkpoint(path, weights, prefix=WEIGHTS_PREFIX, expected=names_of_all(weights))
        self._engine.load_state(self._engine.state(), weights)  # brings the weights into the model
        logger.info("began with the weights of %s", path)

    def _find_checkpoint(self) -> Path | None:
        """On the first rank: clear what a crash left, and report what it kept from being reported."""
        if self._checkpoints.is_dir():
            remove_stale(self._checkpoints)
        present = {marker.iteration: path for path, marker in complete_checkpoints(self._checkpoints).items()}
        reported = self._recorder.reported_checkpoints()
        for iteration in sorted(present.keys() - reported.keys()):
            marker, train = Marker.read(present[iteration]), read_state(present[iteration])["train"]
            self._report_checkpoint(present[iteration], marker, TrainState.from_json(train).consumed_samples, None)
        for iteration in sorted(reported.keys() - present.keys()):
            self._recorder.event("checkpoint_deleted", iteration=iteration, path=reported[iteration])
        return latest_complete(self._checkpoints, log=self._recorder.warning)

    def _upcoming(self) -> Iterator[range]:
        """Samples of this rank's micro batches; none on pipeline stages that do not read them."""
        if not self._engine.reads_tokens:
            return iter(())
        train, replicas = self._config.train, self._mesh.data_parallel
        return micro_batches(
            self.state.consumed_samples,
            micro_batch_size=train.micro_batch_size,
            schedule=BatchSchedule.of(self._config),
            dp_rank=replicas.rank,
            dp_size=replicas.size,
            steps=max(0, train.train_iters - self.state.iteration),
        )

    def _iterate(self, batches: Iterator[Batch]) -> None:
        """One iteration and what is due after it; validation comes first, so that a checkpoint knows its loss."""
        config, state = self._config, self.state
        try:
            update = self._stepper.step(batches, state)
        except TrainingError as error:
            raise TrainingError(f"{error}; {self._last_good()}") from error
        last = state.iteration == config.train.train_iters
        if state.iteration % config.train.log_interval == 0 or last:
            self._log(update)
        evaluates = state.iteration % config.train.eval_interval == 0 or last
        saves = state.iteration % config.checkpoint.save_interval == 0 or last
        if evaluates or saves:
            with self._meter.paused():
                validation_loss = self._evaluate() if evaluates else None
                if saves:
                    self._save(validation_loss)

    def _log(self, update: Update) -> None:
        """Report the interval; what is left of one at the last iteration stays open for a run that is extended."""
        state, interval = self.state, self.state.interval
        report, milliseconds = self._meter.report(state, update, self._engine.loss_scale, self._engine.device)
        self._recorder.step(report, milliseconds)
        if state.iteration % self._config.train.log_interval == 0:
            interval.clear()

    def _evaluate(self) -> float | None:
        """Validation loss over the same samples each time; None when the split has none."""
        train, data = self._config.train, self._data.valid
        samples = min(train.eval_iters * train.global_batch_size, len(data))
        if samples == 0:
            return None
        result = evaluate(
            self._engine,
            data,
            samples=samples,
            micro_batch_size=train.micro_batch_size,
            mesh=self._mesh,
            device=self._engine.device,
        )
        self._recorder.evaluation(
            self.state.iteration,
            result.losses,
            samples=result.samples,
            consumed_samples=self.state.consumed_samples,
            consumed_tokens=self._consumed_tokens,
        )
        return result.loss

    def _last_good(self) -> str:
        """Where a run that stops can be taken up again."""
        newest = max(complete_checkpoints(self._checkpoints), default=None)
        return "no checkpoint was saved before" if newest is None else f"the last good checkpoint is {newest}"

    def _save(self, validation_loss: float | None) -> None:
        """Write a checkpoint, then delete those that no rule keeps."""
        started = time.monotonic()
        path = save_checkpoint(
            self._checkpoints,
            self.state.iteration,
            self._engine.tensors(),
            {
                "train": self.state.to_json(),
                "engine": self._engine.state(),
                MODEL_KEY: self._spec.model_dump(mode="json"),
            },
            validation_loss=validation_loss,
        )
        seconds = time.monotonic() - started
        self._report_checkpoint(path, Marker.read(path), self.state.consumed_samples, seconds)
        logger.info("saved checkpoint %s in %.1f s", path, seconds)
        self._retain()

    def _report_checkpoint(self, path: Path, marker: Marker, consumed_samples: int, seconds: float | None) -> None:
        self._recorder.event(
            "checkpoint",
            iteration=marker.iteration,
            consumed_samples=consumed_samples,
            consumed_tokens=consumed_samples * self._config.data.seq_length,
            path=str(path),
            size_bytes=marker.size_bytes,
            seconds=seconds,
            validation_loss=marker.validation_loss,
        )

    def _retain(self) -> None:
        keep = self._config.checkpoint
        deleted = self._ranks.on_first(
            lambda: apply_retention(
                self._checkpoints, keep_last=keep.keep_last, keep_every=keep.keep_every, keep_best=keep.keep_best
            )
        )
        for path in deleted:
            self._recorder.event("checkpoint_deleted", iteration=iteration_of(path), path=str(path))

    @property
    def _consumed_tokens(self) -> int:
        return self.state.consumed_samples * self._config.data.seq_length
