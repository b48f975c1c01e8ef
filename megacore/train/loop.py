"""Training loop: resume, iterate, evaluate, save."""

import platform
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megacore
from megacore.checkpoint.collective import RankGroup
from megacore.checkpoint.format import Marker, iteration_of
from megacore.config.batch_schedule import BatchSchedule
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec
from megacore.data.sampler import PrefetchingIterator
from megacore.data.samples import Batch, Dataset
from megacore.engine.base import Engine, Update
from megacore.errors import DataFormatError, LossError
from megacore.hardware import Hardware
from megacore.observe.flops import Peaks, TransformerShape
from megacore.observe.logging import datetime_line, logger, memory_line, memory_logger
from megacore.observe.recorder import Recorder
from megacore.observe.timers import Timers
from megacore.parallel.mesh import ProcessMesh
from megacore.plan.throughput import planned_iteration, predict_run
from megacore.train.checkpoints import RunCheckpoints
from megacore.train.evaluate import Evaluation, evaluate, evaluated_samples
from megacore.train.loss_check import BadBatch, LossCheck
from megacore.train.memory import memory_errors
from megacore.train.profile import IterationProfiler
from megacore.train.report import RateMeter, SlowRanks, memory_use
from megacore.train.source_losses import SourceLossEstimator, named_losses
from megacore.train.state import TrainState
from megacore.train.step import Stepper, reader
from megacore.train.stop import StopReason, StopRequest


class _SignalledError(Exception):
    """A rank received a signal during an evaluation; raised on all ranks."""


@dataclass(frozen=True)
class Datasets:
    """Samples that a run reads."""

    train: Dataset
    valid: Dataset
    """Samples of the validations every `train.eval_interval` iterations."""
    valid_pass: Dataset
    """A single pass over the validation split, on which `valid_ppl` of checkpoints is measured."""


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
        peaks: Peaks | None = None,
        started: float | None = None,
        planned_samples: int | None = None,
        origins: Callable[[Sequence[int]], str] = lambda samples: "",
    ) -> None:
        """Create the parts of a run.

        Args:
            config: configuration of the run.
            engine: model and optimizer with their initial weights.
            mesh: this process's groups.
            datasets: training and validation split.
            recorder: receiver of the run's events and metrics.
            run_directory: directory of the run's checkpoints, if any.
            spec: model specification, stored in every checkpoint.
            peaks: peak rates of this rank's device, for MFU; None reports no MFU.
            started: time.monotonic() at the start of this attempt; None means now.
            planned_samples: samples for which the order was planned, stored in every checkpoint;
                None stores nothing.
            origins: function that describes the documents of training samples in one clause, for
                the error of a bad loss.
        """
        self._config = config
        self._engine = engine
        self._mesh = mesh
        self._data = datasets
        self._recorder = recorder
        self._vocab_size = spec.vocab_size
        self._ranks = RankGroup(None)
        self._hosts: list[str] = self._ranks.everywhere(socket.gethostname)
        self._checkpoints = RunCheckpoints(
            config,
            engine,
            mesh,
            recorder,
            run_directory,
            spec,
            planned_samples=planned_samples,
        )
        self._stop = StopRequest(config.train, run_directory, rank=mesh.rank, started=started)
        self._timers = mesh.timers or Timers(engine.device)
        check = LossCheck(
            config, mesh, recorder.warning, self._record_bad_batch, self._hosts, origins
        )
        self._read = reader(datasets.train, engine.device)
        self._stepper = Stepper(
            config,
            engine,
            mesh,
            check,
            self._read,
            recorder.warning,
            before_update=self._checkpoints.finish_copy,
        )
        self._profiler = IterationProfiler(
            config.train.profile, run_directory, engine.device, recorder
        )
        shape = TransformerShape.of(config, engine.padded_vocab_size)
        self._meter = RateMeter(config, shape, self._timers, ranks=mesh.world_size, peaks=peaks)
        self._source_losses = SourceLossEstimator(
            datasets.train, config.data, config.train.micro_batch_size
        )
        self._slow_ranks = SlowRanks(mesh.layout, self._hosts, engine.device, recorder.warning)
        self._reports_memory = mesh.data_context_parallel.rank == 0
        self.state = TrainState()

    def run(self) -> None:
        """Train until `train.train_iters` or until a stop is requested.

        Returns at once if the run is already complete.

        Raises:
            TrainingStoppedError: the run was asked to stop early; a checkpoint of its last
                iteration is saved.
            TrainingError: a loss or gradient is not finite, or memory is exhausted.
            DataFormatError: the training split has fewer samples than the run reads.
            CheckpointError: the checkpoint to resume from, or the pretrained one, is damaged or of
                another model.
            ConfigError: the configuration differs from that checkpoint's in a field that must not
                change.
            WorkspaceError: a checkpoint or an event cannot be written.
        """
        rank, vocab_size = self._mesh.rank, self._vocab_size
        with (
            self._stop.signals(),
            memory_errors(self._config, rank, self.state, vocab_size=vocab_size),
        ):
            reason = self._start()
            try:
                reason = reason or self._train()
                self._checkpoints.wait()
                logger.info(datetime_line("after training is done"))
            finally:
                self._checkpoints.close()
                self._profiler.close()
        self._stop.remove_stop_file()  # before the event: a later stop file is for the next attempt
        self._recorder.event("exit", reason=reason or "finished", iteration=self.state.iteration)
        if reason is not None:
            raise self._stop.error(
                reason, self.state.iteration, self._checkpoints.path_of(self.state.iteration)
            )

    def _train(self) -> StopReason | None:
        """Iterate to the end and return the reason of an early stop."""
        remaining = self._config.train.train_iters - self.state.iteration
        logger.info(datetime_line("before the start of training step"))
        with PrefetchingIterator(
            self._read, self._stepper.upcoming(self.state, remaining)
        ) as batches:
            self._meter.start(self.state.iteration, self.state.consumed_samples)
            while self.state.iteration < self._config.train.train_iters:
                reason = self._iterate(batches)
                if reason is not None:
                    return reason
        return None

    def _start(self) -> StopReason | None:
        """Resume from a checkpoint, if any, record the start, and run a missed validation.

        Returns the reason to stop at once: a signal during that validation, for which there is
        nothing to save.
        """
        path = self._checkpoints.resume(self.state)
        self._require_samples()
        self._recorder.event(
            "start",
            iteration=self.state.iteration,
            ranks=self._mesh.world_size,
            hosts=sorted(set(self._hosts)),
            device=self._engine.device.type,
            precision=self._engine.precision,
            parameters=self._engine.parameters,
            kernels=self._engine.kernels,
            versions=_versions(),
            resumed_from=None if path is None else iteration_of(path),
            changes=[str(change) for change in self._checkpoints.changes],
            train_iters=self._config.train.train_iters,
            **self._prediction(),
        )
        if path is None or Marker.read(path).validation_loss is not None:
            return None
        # The attempt that saved it skipped them because of a signal. An earlier start may have made
        # up for them: the marker does not change, because other runs' keys may have its digest.
        measured = self._ranks.on_first(lambda: self._recorder.measured_at(self.state.iteration))
        try:
            if self.state.iteration > 0 and self._evaluation_due and "evaluation" not in measured:
                self._evaluate()
            if "perplexity" not in measured:
                result = self._measure_perplexity()
                self._checkpoints.add_loss(self.state.iteration, result.loss)
        except _SignalledError:
            return "signal"
        return None

    def _require_samples(self) -> None:
        """Raise DataFormatError if the train split ends before the run does."""
        train, state, samples = self._config.train, self.state, len(self._data.train)
        remaining = train.train_iters - state.iteration
        required = BatchSchedule.of(train).consumed_after(max(0, remaining), state.consumed_samples)
        if remaining <= 0 or samples >= required:
            return
        rampup = "" if train.rampup_batch_size is None else ", less during the ramp-up,"
        if state.iteration == 0:
            product = f"train.train_iters {train.train_iters}"
        else:
            product = (
                f"{state.consumed_samples} consumed by iteration {state.iteration} + the remaining "
                f"{remaining} of train.train_iters {train.train_iters}"
            )
        raise DataFormatError(
            f"the index maps of the train split have {samples} samples but {product} x "
            f"train.global_batch_size {train.global_batch_size}{rampup} = {required} are read: "
            "build the index maps again for this run, or lower train.train_iters"
        )

    def _prediction(self) -> dict[str, Any]:
        """Return the predicted milliseconds of an iteration by phase, and the hardware's name.

        Only rank 0 records events.
        """
        if self._mesh.rank != 0:
            return {}
        layout, threads = self._mesh.layout, torch.get_num_threads()
        together = max(map(self._hosts.count, self._hosts))
        try:
            iteration = planned_iteration(
                self._config,
                self._vocab_size,
                Hardware.detect(),
                layout,
                threads,
                ranks_per_host=together,
            )
            time = predict_run(iteration)
        except Exception as error:  # a prediction must not end a training
            self._recorder.warning(f"no prediction of the time per iteration: {error!r}")
            return {}
        return {"predicted_ms": time.iteration.phase_ms, "hardware": time.hardware}

    def _iterate(self, batches: Iterator[Batch]) -> StopReason | None:
        """Run one iteration and the evaluation, logging and saving that are due after it.

        Validation comes before saving, so that a checkpoint contains its loss.

        Returns:
            Reason to stop now, after the save; None to continue.
        """
        config, state = self._config, self.state
        self._mesh.beat("iteration", state.iteration + 1)
        self._profiler.before(state.iteration + 1)
        first_sample = state.consumed_samples
        try:
            update = self._stepper.step(batches, state, self._notices)
        except LossError as error:
            raise LossError(f"{error}; {self._last_good()}") from error
        self._profiler.after(state.iteration)
        if self._mesh.rank == 0 and update.applied:  # the only rank that reports
            self._source_losses.add(first_sample, update.losses)
        # a skipped batch has no notices
        *requests, save_failed = update.notices or (False,)
        if save_failed:
            self._checkpoints.wait()  # raises the error, on all ranks after the same iteration
        self._checkpoints.poll()
        reason = self._reason(requests)
        if state.iteration % config.train.log_interval == 0 or self._is_last:
            self._log(update)
        saves = state.iteration % config.checkpoint.save_interval == 0 or self._is_last
        if self._evaluation_due or saves or reason is not None:
            with self._meter.paused():
                reason = self._evaluate_and_save(reason, saves=saves)
        return reason

    def _evaluate_and_save(self, reason: StopReason | None, *, saves: bool) -> StopReason | None:
        """Evaluate if it is due, and save if `saves` or if there is a reason to stop.

        Takes the reason that the update brought and returns the present one. A signal leaves only a
        few seconds, which the checkpoint needs: it skips or ends the measurements, and the next
        start makes up for them.
        """
        validation = None
        if reason != "signal":
            try:
                if self._evaluation_due:
                    self._evaluate()
                    reason = self._reason_after_validation()
                if reason != "signal" and (saves or reason is not None):
                    validation = self._measure_perplexity()
                    # Nothing is left to do after the last iteration.
                    reason = None if self._is_last else self._reason_after_validation()
            except _SignalledError:
                reason = "signal"
        if saves or reason is not None:
            self._mesh.beat("save")
            self._checkpoints.save(self.state, validation)
        return reason

    @property
    def _is_last(self) -> bool:
        return self.state.iteration == self._config.train.train_iters

    @property
    def _evaluation_due(self) -> bool:
        """True if the loss on the validation samples is due after this iteration."""
        return self.state.iteration % self._config.train.eval_interval == 0 or self._is_last

    def _reason(self, notices: Sequence[bool]) -> StopReason | None:
        """Return the reason to stop after this iteration; after the last one, only a signal is."""
        reason = self._stop.reason(notices, self.state.iteration)
        return None if self._is_last and reason != "signal" else reason

    def _reason_after_validation(self) -> StopReason | None:
        """Return the reason to stop after this iteration, which may be new since its update.

        Collective. A validation can take long, so the ranks exchange their notices again.
        """
        notices = zip(*self._ranks.everywhere(self._stop.notices), strict=True)
        return self._reason([any(each) for each in notices])

    def _between_rounds(self, seconds: float) -> float:
        """Return the slowest rank's seconds of a round of an evaluation. Collective.

        Raises _SignalledError on all ranks if one received a signal.
        """
        notices = torch.tensor(
            [float(self._stop.signal is not None), seconds], device=self._engine.device
        )
        if self._mesh.world_size > 1:
            with self._mesh.time("world wait"):
                dist.all_reduce(notices, dist.ReduceOp.MAX)
        signal, slowest = notices.tolist()
        if signal:
            raise _SignalledError
        return float(slowest)

    def _notices(self) -> tuple[bool, ...]:
        """Return this rank's notices for the exchange of losses."""
        return (*self._stop.notices(), self._checkpoints.failed)

    def _log(self, update: Update) -> None:
        """Report the log interval.

        An incomplete interval at the last iteration stays open, in case the run is extended.
        """
        state, interval = self.state, self.state.interval
        report, milliseconds = self._meter.report(
            state, update, self._engine.loss_scale, self._engine.device
        )
        by_source = tuple(self._source_losses.estimates())
        self._recorder.step(replace(report, by_source=by_source), milliseconds)
        if self._slow_ranks.compares:
            busy = report.ms_per_iteration - report.exposed_communication_ms
            with self._mesh.time("world wait"):
                of_each_rank = self._ranks.everywhere(lambda: busy)
            if not self._checkpoints.saving:  # of which each rank has another share
                self._slow_ranks.look(of_each_rank)
        if self._reports_memory:  # once per attempt, when the optimizer's state exists
            self._reports_memory = False
            memory = memory_use(self._engine.device)
            memory_logger.info(memory_line(self._mesh.rank, state.iteration, memory))
        if state.iteration % self._config.train.log_interval == 0:
            interval.clear()
            self._source_losses.clear()

    def _evaluate(self) -> None:
        """Report the loss over `train.eval_iters` validation batches, the same ones each time.

        Raises _SignalledError if a signal ends the evaluation.
        """
        train, data = self._config.train, self._data.valid
        samples = min(train.eval_iters * train.global_batch_size, len(data))
        if samples == 0:
            return
        result = evaluate(
            self._engine,
            data,
            samples=samples,
            micro_batch_size=train.micro_batch_size,
            mesh=self._mesh,
            between=self._between_rounds,
        )
        self._recorder.evaluation(
            self.state.iteration,
            result.losses,
            samples=result.samples,
            consumed_samples=self.state.consumed_samples,
            consumed_tokens=self._consumed_tokens,
            by_source=named_losses(result.by_source, self._config.data),
        )

    def _measure_perplexity(self) -> Evaluation:
        """Measure and report `valid_ppl` of the present weights.

        Raises _SignalledError if a signal ends the measurement.
        """
        started = time.monotonic()
        self._mesh.beat("validation")
        result = evaluate(
            self._engine,
            self._data.valid_pass,
            samples=evaluated_samples(self._data.valid_pass, self._config),
            # A larger batch might not fit next to the optimizer's state.
            micro_batch_size=self._config.train.micro_batch_size,
            mesh=self._mesh,
            between=self._between_rounds,
        )
        self._recorder.perplexity(
            self.state.iteration,
            result.loss,
            samples=result.samples,
            seconds=time.monotonic() - started,
            consumed_samples=self.state.consumed_samples,
            consumed_tokens=self._consumed_tokens,
            by_position=result.position_rows,
            by_source=named_losses(result.by_source, self._config.data),
        )
        return result

    def _last_good(self) -> str:
        """Describe the checkpoint from which a stopped run can be resumed.

        All ranks call this, and a save still in progress is valid.
        """
        save_failure = ""
        try:
            self._checkpoints.wait()
        except Exception as error:  # the loss error is what ends the run
            save_failure = f"; the save that was under way failed ({error})"
        newest = self._checkpoints.newest()
        return (
            "no checkpoint was saved before"
            if newest is None
            else f"the last good checkpoint is {newest}"
        ) + save_failure

    def _record_bad_batch(self, batch: BadBatch) -> None:
        self._recorder.event("bad_batch", **batch.event)

    @property
    def _consumed_tokens(self) -> int:
        return self.state.consumed_samples * self._config.data.seq_length


def _versions() -> dict[str, str]:
    """Return the versions of the programs that compute, which can change results."""
    return {
        "megacore": megacore.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
