"""Throughput and other metrics of a log interval."""

import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from megacore.config.batch_schedule import BatchSchedule
from megacore.config.run import RunConfig
from megacore.config.sequence_schedule import SequenceSchedule
from megacore.engine.base import Update
from megacore.hardware import resident_memory
from megacore.models.base import LM_LOSS
from megacore.observe.flops import Peaks, TransformerShape, step_flops
from megacore.observe.logging import MemoryUse, StepReport
from megacore.observe.timers import Timers, exposed_communication
from megacore.optim.param_schedule import LrSchedule
from megacore.parallel.rank_layout import RankLayout
from megacore.pipeline_parallel.partition import chunks_of
from megacore.plan.throughput import recomputed_layers
from megacore.train.state import TrainState

_MIB = 1 << 20
_SLOW = 1.2
"""Ratio of a rank's own time per iteration to its peers' above which it is slow."""
_SLOW_INTERVALS = 3
"""Log intervals in a row in which a slow rank is reported; compilation and caches take fewer."""


class RateMeter:
    """Meter of an interval's metrics; excludes the time of validation and checkpoints."""

    def __init__(
        self,
        config: RunConfig,
        shape: TransformerShape,
        timers: Timers,
        *,
        ranks: int,
        peaks: Peaks | None,
    ) -> None:
        """Create the meter of a run.

        Args:
            config: configuration of the run.
            shape: shape of the model, for counting operations.
            timers: timers of the iterations.
            ranks: number of processes that share the work.
            peaks: peak rates of one rank's device; None reports no MFU.
        """
        self._config = config
        self._timers = timers
        self._schedule = LrSchedule.of(config)
        chunks = chunks_of(config, shape.vocab_size)
        recomputed = recomputed_layers(chunks, config.train.recompute_num_layers)
        self._ranks = ranks
        self._batch = BatchSchedule.of(config.train)
        self._sequence = SequenceSchedule.of(config.data)
        # Per sample and rank, since a ramp-up changes the batch size, by length of the sequences
        # into which samples are cut.
        self._hardware_tflop: dict[int, float] = {}
        self._model_tflop: dict[int, float] = {}
        for _, length in self._sequence.phases:
            cut, pieces = replace(shape, seq_length=length), self._sequence.longest // length
            self._hardware_tflop[length] = (
                step_flops(cut, pieces, config.train.recompute, *recomputed) / ranks / 1e12
            )
            self._model_tflop[length] = step_flops(cut, pieces, "none") / ranks / 1e12
        self._peaks = peaks
        self._iteration = self._consumed_samples = 0
        self._started = time.perf_counter()
        self._paused = 0.0

    def start(self, iteration: int, consumed_samples: int) -> None:
        """Start an interval after `iteration` iterations and `consumed_samples` samples."""
        self._timers.take(1)  # phases of the set-up, and of a validation that a resume makes up for
        self._iteration = iteration
        self._consumed_samples = consumed_samples
        self._started = time.perf_counter()
        self._paused = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the body."""
        start = time.perf_counter()
        with self._timers.paused():
            yield
        self._paused += time.perf_counter() - start

    def report(
        self, state: TrainState, update: Update, loss_scale: float, device: torch.device
    ) -> tuple[StepReport, dict[str, float]]:
        """Return the interval's report and milliseconds per computed iteration by phase.

        Starts a new interval.
        """
        # Batches that were skipped train nothing; those of train.skip_samples take no time either.
        skipped = [
            range(first, last + 1)
            for first, last in state.passed_over
            if first >= self._consumed_samples
        ]
        iterations = max(state.iteration - self._iteration - len(skipped), 1)
        seconds = (time.perf_counter() - self._started - self._paused) / iterations
        consumed = state.consumed_samples - self._consumed_samples
        samples = (consumed - sum(map(len, skipped))) / iterations
        sample_tokens = self._config.data.seq_length
        by_length = self._sequence.samples_by_length(
            self._batch, self._consumed_samples, state.consumed_samples
        )
        for batch in skipped:
            by_length[self._sequence.at(batch.start)] -= len(batch)
        milliseconds = self._timers.take(iterations)
        tokens_per_second = samples * sample_tokens / seconds
        hardware_tflops, model_tflops = (
            sum(rates[length] * count for length, count in by_length.items()) / iterations / seconds
            for rates in (self._hardware_tflop, self._model_tflop)
        )
        vendor, measured = self._utilization(model_tflops)
        report = StepReport(
            iteration=state.iteration,
            train_iters=self._config.train.train_iters,
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_samples * sample_tokens,
            ms_per_iteration=seconds * 1000.0,
            lr=self._schedule.at(state.applied_iterations),
            global_batch_size=len(update.losses) * self._config.train.micro_batch_size,
            seq_length=next(reversed(by_length), self._sequence.at(state.consumed_samples)),
            lm_loss=state.interval.mean(LM_LOSS),
            loss_scale=loss_scale,
            grad_norm=update.grad_norm,
            skipped_iterations=state.interval.skipped_iterations,
            nan_iterations=state.interval.nan_iterations,
            interval_iterations=state.interval.iterations,
            samples_per_second=samples / seconds,
            tokens_per_second=tokens_per_second,
            tokens_per_second_per_rank=tokens_per_second / self._ranks,
            tflops=hardware_tflops,
            model_tflops=model_tflops,
            mfu=vendor,
            mfu_measured=measured,
            exposed_communication_ms=exposed_communication(milliseconds),
            memory_mb=memory_use(device).max_allocated,
            further_losses={
                name: state.interval.mean(name) for name in update.terms if name != LM_LOSS
            },
        )
        self.start(state.iteration, state.consumed_samples)
        return report, milliseconds

    def _utilization(self, rate: float) -> tuple[float | None, float | None]:
        """Return MFU at a rate of the model's TFLOP/s: of the vendor's peak, of the measured one.

        See Chowdhery et al. 2022, arXiv:2204.02311.
        """
        if self._peaks is None:
            return None, None
        vendor = self._peaks.vendor
        return None if vendor is None else rate / vendor, rate / self._peaks.measured


class SlowRanks:
    """Detector of ranks that compute longer than others with the same work.

    All ranks wait for such a rank, for example one whose GPU lowers its clock, so that each of them
    reports the same time per iteration.
    """

    def __init__(
        self,
        layout: RankLayout,
        hosts: Sequence[str],
        device: torch.device,
        warn: Callable[[str], None],
    ) -> None:
        """Create the detector.

        Args:
            layout: layout of the ranks. Those of one pipeline stage and one part of the sequence
                have the same work.
            hosts: host name of each rank.
            device: device of this rank. Only GPUs are compared: ranks share the cores of a CPU.
            warn: callback that receives the message about a slow rank.
        """
        peers = layout.groups("data", "tensor") if device.type == "cuda" else ()
        self._groups = [group for group in peers if len(group) > 1]
        self._hosts, self._warn = hosts, warn
        self._intervals: dict[int, int] = {}

    @property
    def compares(self) -> bool:
        """True if there are GPUs with the same work."""
        return bool(self._groups)

    def look(self, milliseconds: Sequence[float]) -> None:
        """Report the ranks that have just been slow for `_SLOW_INTERVALS` log intervals.

        `milliseconds` are each rank's time per iteration without its waits for others.
        """
        slow: dict[int, tuple[float, float]] = {}
        for group in self._groups:
            usual = statistics.median_low([milliseconds[rank] for rank in group])
            slow |= {
                rank: (milliseconds[rank], usual)
                for rank in group
                if milliseconds[rank] > _SLOW * usual > 0.0
            }
        self._intervals = {rank: self._intervals.get(rank, 0) + 1 for rank in slow}
        for rank, (time_here, usual) in slow.items():
            if self._intervals[rank] == _SLOW_INTERVALS:
                self._warn(
                    f"rank {rank} on {self._hosts[rank]} computes {time_here:.0f} ms per iteration "
                    f"and the ranks with the same work {usual:.0f} ms (median), so they wait for "
                    "it: see the clocks and temperature of its GPU (nvidia-smi -q -d PERFORMANCE, "
                    "CLOCK) and other processes on that host"
                )


def memory_use(device: torch.device) -> MemoryUse:
    """Return the memory of this process, without waiting for the device."""
    if device.type == "cuda":
        return MemoryUse(
            torch.cuda.memory_allocated(device) / _MIB,
            torch.cuda.max_memory_allocated(device) / _MIB,
            torch.cuda.memory_reserved(device) / _MIB,
            torch.cuda.max_memory_reserved(device) / _MIB,
        )
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _MIB
    resident = resident_memory()
    now = peak if resident is None else resident / _MIB
    return MemoryUse(now, max(now, peak), now, max(now, peak), resident=True)
