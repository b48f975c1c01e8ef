"""Checks of each iteration's losses: NaN, infinity and spikes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from megacore.config.run import RunConfig
from megacore.data.sampler import is_skipped, micro_batch_indices
from megacore.engine.base import Update
from megacore.errors import LossError
from megacore.optim.param_schedule import LrSchedule
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rank_layout import Coordinate
from megacore.train.state import TrainState

_MEMORY = 0.98
"""Decay of the moving average of the loss, which spans about 50 iterations."""

SKIPPED_IN_A_ROW = 5
"""Number of bad batches in a row that are skipped at most. Further ones mean that the training has
diverged."""

Cause = Literal["loss_not_finite", "gradient_not_finite", "loss_spike"]


@dataclass(frozen=True)
class MicroBatch:
    """Origin of one loss of a global batch."""

    rank: int
    """Rank that computed the loss: the first tensor-parallel rank of the last pipeline stage."""
    samples: tuple[int, ...]
    """Positions in the run's order of samples."""


@dataclass(frozen=True)
class BadBatch:
    """Record of a global batch with a bad loss or gradient."""

    iteration: int
    """Number of the iteration, counted from 1."""
    cause: Cause
    rank: int | None
    """Rank of the worst micro batch; None if only the gradient is bad."""
    host: str | None
    """Host of that rank."""
    samples: tuple[int, ...]
    """Samples of the worst micro batch (positions in the run's order of samples); empty if only the
    gradient is bad."""
    global_batch: tuple[int, int]
    """First and last sample of the global batch, the range to add to `train.skip_samples`."""
    loss: float
    """Loss of the worst micro batch, or the gradient norm."""
    reproduced: bool | None
    """True if a second computation gave a bad result as well; None if there was none."""

    @property
    def event(self) -> dict[str, Any]:
        """Fields of the event."""
        return asdict(self)


class LossCheck:
    """Check of the losses of each iteration, identical on every rank."""

    def __init__(
        self,
        config: RunConfig,
        mesh: ProcessMesh,
        warn: Callable[[str], None],
        record: Callable[[BadBatch], None] = lambda batch: None,
        hosts: Sequence[str] = (),
        origins: Callable[[Sequence[int]], str] = lambda samples: "",
    ) -> None:
        """Create the check of a run.

        Args:
            config: configuration of the run.
            mesh: this process's groups.
            warn: callback that receives the message of a spike or of a suspected hardware fault.
            record: callback that receives every bad batch.
            hosts: host name of each rank; empty if unknown.
            origins: function that describes in one clause the documents of samples and how to see
                them.
        """
        self._config = config
        self._origins = origins
        self._layout = mesh.layout
        self._schedule = LrSchedule.of(config)
        self._warn, self._record, self._hosts = warn, record, hosts

    def is_spike(self, losses: Sequence[float], state: TrainState) -> bool:
        """Return True if a loss exceeds the recent mean x `train.loss_spike_factor`, or is NaN."""
        factor, recent = self._config.train.loss_spike_factor, state.recent_loss
        if factor is None or recent is None:
            return False
        return any(math.isnan(loss) or loss > factor * recent for loss in losses)

    def count_iteration(
        self, update: Update, state: TrainState, first: Update | None = None
    ) -> None:
        """Count an applied or a skipped iteration in `state`.

        `state` must not have been advanced to the next iteration yet.

        Args:
            update: result of the iteration.
            state: training state before the iteration.
            first: result of the first computation if the iteration was computed twice, else None.

        Raises:
            LossError: a loss or gradient is not finite and no lower loss scale can help, or a loss
                spiked, and the configured action is stop, or the batches before it were bad, too.
        """
        bad = self._cause(update, state) is not None
        if bad:
            self._react(self._bad_batch(update, state, first is not None or None), update, state)
        elif first is not None:
            self._suspect_hardware(first, update, state)
        if not update.applied:
            state.interval.skipped_iterations += 1
            state.interval.nan_iterations += not all(map(math.isfinite, update.losses))
            if bad:
                state.passed_over.append(self._global_batch(update, state))
            return
        state.applied_iterations += 1
        state.interval.add(update.terms)
        # a mean that once was infinite or NaN would never detect a spike again
        if math.isfinite(update.loss):
            recent = update.loss if state.recent_loss is None else state.recent_loss
            state.recent_loss = _MEMORY * recent + (1.0 - _MEMORY) * update.loss

    def origin(self, index: int, state: TrainState) -> MicroBatch:
        """Return the rank and samples of the `index`-th loss in the next global batch."""
        step, replica = divmod(index, self._layout.data)
        size = self._config.train.micro_batch_size
        samples = micro_batch_indices(
            state.consumed_samples, step, size, replica, self._layout.data
        )
        return MicroBatch(
            self._layout.rank(Coordinate(self._layout.pipeline - 1, replica, 0, 0)), tuple(samples)
        )

    def _cause(self, update: Update, state: TrainState) -> Cause | None:
        """Return the fault of an update, or None.

        An overflow that a lower loss scale fixes is not a fault.
        """
        if update.fatal:
            return (
                "gradient_not_finite"
                if all(map(math.isfinite, update.losses))
                else "loss_not_finite"
            )
        finite = update.applied or update.withheld
        return "loss_spike" if finite and self.is_spike(update.losses, state) else None

    def _bad_batch(self, update: Update, state: TrainState, reproduced: bool | None) -> BadBatch:
        cause = self._cause(update, state)
        assert cause is not None
        global_batch = self._global_batch(update, state)
        iteration = state.iteration + 1
        if cause == "gradient_not_finite":
            return BadBatch(
                iteration, cause, None, None, (), global_batch, update.grad_norm, reproduced
            )
        worst = next(
            (index for index, loss in enumerate(update.losses) if not math.isfinite(loss)),
            max(range(len(update.losses)), key=update.losses.__getitem__),
        )
        origin = self.origin(worst, state)
        host = self._hosts[origin.rank] if self._hosts else None
        return BadBatch(
            iteration,
            cause,
            origin.rank,
            host,
            origin.samples,
            global_batch,
            update.losses[worst],
            reproduced,
        )

    def _global_batch(self, update: Update, state: TrainState) -> tuple[int, int]:
        """Return the first and the last sample of the update's global batch."""
        count = len(update.losses) * self._config.train.micro_batch_size
        return state.consumed_samples, state.consumed_samples + count - 1

    def _suspect_hardware(self, first: Update, second: Update, state: TrainState) -> None:
        """Record and report a fault that a second computation did not reproduce.

        Both computations used the same weights and samples.
        """
        bad = self._bad_batch(first, state, False)
        self._record(bad)
        symptom = {
            "loss_not_finite": f"the loss was {bad.loss}",
            "gradient_not_finite": f"the gradient norm was {bad.loss}",
            "loss_spike": f"the loss jumped to {bad.loss:.4g}",
        }[bad.cause]
        self._warn(
            f"{symptom}{self._place(bad)} at iteration {bad.iteration}, and when that was computed "
            f"again from the same weights and samples it was not (mean loss {second.loss:.4g}, "
            f"gradient norm {second.grad_norm:.4g}): suspect the hardware of that rank; the run "
            "continues with the second result"
        )

    def _react(self, bad: BadBatch, update: Update, state: TrainState) -> None:
        """Record a bad batch and warn of it, or raise LossError if the run must stop for it."""
        self._record(bad)
        train, spike = self._config.train, bad.cause == "loss_spike"
        action = train.loss_spike_action if spike else train.nonfinite_action
        if action == "warn":
            self._warn(self._spike(bad, state, ""))
            return
        documents = self._documents(bad)
        symptom = (
            self._spike(bad, state, documents)
            if spike
            else self._not_finite(bad, update, documents)
        )
        skipped = self._skipped_before(state)
        if action == "skip" and skipped < SKIPPED_IN_A_ROW:
            self._warn(
                f"{symptom}: the batch is skipped, number {skipped + 1} in a row of at most "
                f"{SKIPPED_IN_A_ROW}"
            )
            return
        advice = self._spike_advice(bad) if spike else self._not_finite_advice(bad, state)
        if action == "skip":
            symptom += f", and the {skipped} batches before it were bad and skipped"
            advice = (
                "the training has diverged: move the newest checkpoints away, to resume from one "
                "before them with a lower optim.lr or optim.clip_grad"
            )
        raise LossError(f"{symptom}: {advice}")

    def _skipped_before(self, state: TrainState) -> int:
        """Return the number of bad batches that were skipped just before the next batch."""
        number, end = 0, state.consumed_samples
        for first, last in reversed(state.passed_over):
            configured = is_skipped(range(first, last + 1), self._config.train.skipped_ranges)
            if last + 1 != end or configured:
                break
            number, end = number + 1, first
        return number

    def _spike(self, bad: BadBatch, state: TrainState, documents: str) -> str:
        """Describe a loss spike; `documents` is the clause on its documents."""
        assert state.recent_loss is not None
        return (
            f"the loss jumped to {bad.loss:.4g}{self._place(bad)} at iteration {bad.iteration} "
            f"(samples {_listed(bad.samples)}), {bad.loss / state.recent_loss:.1f} times the "
            f"recent mean {state.recent_loss:.4g} (train.loss_spike_factor is "
            f"{self._config.train.loss_spike_factor:g}); {documents}{_again(bad)}"
        )

    def _spike_advice(self, bad: BadBatch) -> str:
        others = "warn" if self._config.engine == "deepspeed" else "warn or skip"
        return (
            f"look at these samples, {self._skip(bad)}, or set train.loss_spike_action to {others}"
        )

    def _not_finite_advice(self, bad: BadBatch, state: TrainState) -> str:
        lr = self._schedule.at(state.applied_iterations + 1)
        advice = (
            f"lower optim.lr (now {lr:.3E} at this iteration) or optim.clip_grad "
            f"(now {self._config.optim.clip_grad:g}), look at these samples, {self._skip(bad)}, or "
            "set train.nonfinite_action to skip"
        )
        if self._config.train.precision == "fp16":
            scaling = self._config.optim.loss_scale
            advice = (
                f"{scaling.patience} iterations in a row overflowed with the loss scale at its "
                f"minimum {scaling.minimum:g}: {advice}"
            )
        return advice

    def _not_finite(self, bad: BadBatch, update: Update, documents: str) -> str:
        """Describe the first loss or gradient that is not finite, with the clause on documents."""
        if bad.cause == "gradient_not_finite":
            first, last = bad.global_batch
            return (
                f"the gradient norm is {bad.loss} at iteration {bad.iteration} (samples {first} to "
                f"{last}) on all {self._layout.world_size} ranks though every loss is finite; "
                f"{documents}{_again(bad)}"
            )
        count = sum(not math.isfinite(loss) for loss in update.losses)
        return (
            f"the loss is {bad.loss}{self._place(bad)} at iteration {bad.iteration} "
            f"(samples {_listed(bad.samples)}; {count} micro batches in all); "
            f"{documents}{_again(bad)}"
        )

    def _documents(self, bad: BadBatch) -> str:
        """Return the clause on the documents of the bad samples with a separator, or ""."""
        first, last = bad.global_batch
        clause = self._origins(bad.samples or range(first, last + 1))
        return clause and f"{clause}; "

    def _skip(self, bad: BadBatch) -> str:
        """Return the advice to skip this batch, with the complete setting to write."""
        first, last = bad.global_batch
        ranges = ", ".join(
            f'"{each}"' for each in (*self._config.train.skip_samples, f"{first}-{last}")
        )
        return f"skip the batch with train.skip_samples: [{ranges}]"

    def _place(self, bad: BadBatch) -> str:
        if bad.rank is None:
            return ""
        several = len(set(self._hosts)) > 1
        return f" on rank {bad.rank}{f' of {bad.host}' if several else ''}"


def _again(bad: BadBatch) -> str:
    if bad.reproduced:
        return (
            "computed again from the same weights it came out bad again, so data or numerics are "
            "at fault"
        )
    return "it was not computed again, since the weights had changed already"


def _listed(samples: Sequence[int]) -> str:
    return ", ".join(map(str, samples))
