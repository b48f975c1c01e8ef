"""Losses that are not finite or jump: said with rank, iteration and samples."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from megacore.config.run import RunConfig
from megacore.data.sampler import micro_batch_indices
from megacore.engine.base import Update
from megacore.errors import LossError
from megacore.optim.param_schedule import LrSchedule
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rank_layout import Coordinate
from megacore.train.state import TrainState

_MEMORY = 0.98
"""Weight of the past in the moving average of the loss: it remembers about 50 iterations."""

Cause = Literal["loss_not_finite", "gradient_not_finite", "loss_spike"]


@dataclass(frozen=True)
class MicroBatch:
    """Where one loss of a global batch comes from."""

    rank: int
    """The process that computed it: of its tensor-parallel ranks the first, on the last pipeline
    stage."""
    samples: tuple[int, ...]
    """Positions in the run's order of samples."""


@dataclass(frozen=True)
class BadBatch:
    """What is recorded of a global batch that went wrong."""

    iteration: int
    """Counted from 1: the one that it was to be."""
    cause: Cause
    rank: int | None
    """Of the worst micro batch; None where the gradient alone is bad."""
    host: str | None
    """Of that rank."""
    samples: tuple[int, ...]
    """Of the worst micro batch, as positions in the run's order of samples; none where the gradient
    alone is bad."""
    global_batch: tuple[int, int]
    """First and last sample of the whole batch: what `train.skip_samples` takes."""
    loss: float
    """Of the worst micro batch, or the gradient's norm."""
    reproduced: bool | None
    """Whether it came out bad again when it was computed once more; None when it was not."""

    @property
    def event(self) -> dict[str, Any]:
        """Fields for an event."""
        return asdict(self)


class LossCheck:
    """Looks at the losses of each iteration, the same ones on every rank."""

    def __init__(
        self,
        config: RunConfig,
        mesh: ProcessMesh,
        warn: Callable[[str], None],
        record: Callable[[BadBatch], None] = lambda batch: None,
        hosts: Sequence[str] = (),
    ) -> None:
        """Prepare for a run.

        Args:
            config: the run.
            mesh: this process's groups.
            warn: called with the account of a spike, and of a fault of the hardware.
            record: called with every batch that went wrong.
            hosts: name of each rank's machine; none where they are not known.
        """
        self._config = config
        self._layout = mesh.layout
        self._schedule = LrSchedule.of(config)
        self._warn, self._record, self._hosts = warn, record, hosts

    def is_spike(self, losses: Sequence[float], state: TrainState) -> bool:
        """Whether a micro batch's loss is above the recent mean x `train.loss_spike_factor`."""
        factor = self._config.train.loss_spike_factor
        return (
            factor is not None
            and state.recent_loss is not None
            and max(losses) > factor * state.recent_loss
        )

    def take_note(self, update: Update, state: TrainState, first: Update | None = None) -> None:
        """Count an applied or a skipped iteration in `state`, which still stands before it.

        Args:
            update: what the iteration came to.
            state: where the run stands.
            first: what it had come to before it was computed again; None when it was computed once.

        Raises:
            LossError: the iteration was skipped and no lower loss scale can help, or a loss jumped
                and `train.loss_spike_action` is stop.
        """
        if first is not None and self._cause(update, state) is None:
            self._suspect_hardware(first, update, state)
        if update.fatal:
            bad = self._bad_batch(update, state, None if first is None else True)
            self._record(bad)
            raise LossError(self._not_finite(bad, update, state))
        if not update.applied and not update.withheld:
            state.interval.skipped_iterations += 1
            state.interval.nan_iterations += not all(map(math.isfinite, update.losses))
            return
        if self.is_spike(update.losses, state):
            self._report_spike(
                self._bad_batch(update, state, None if first is None else True), state
            )
        state.applied_iterations += 1
        state.interval.add(update.terms)
        recent = update.loss if state.recent_loss is None else state.recent_loss
        state.recent_loss = _MEMORY * recent + (1.0 - _MEMORY) * update.loss

    def origin(self, index: int, state: TrainState) -> MicroBatch:
        """Of loss number `index` of the global batch that `state` stands before."""
        step, replica = divmod(index, self._layout.data)
        size = self._config.train.micro_batch_size
        samples = micro_batch_indices(
            state.consumed_samples, step, size, replica, self._layout.data
        )
        return MicroBatch(
            self._layout.rank(Coordinate(self._layout.pipeline - 1, replica, 0)), tuple(samples)
        )

    def _cause(self, update: Update, state: TrainState) -> Cause | None:
        """What is wrong with an outcome.

        An overflow that a lower loss scale mends is nothing wrong.
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
        count = len(update.losses) * self._config.train.micro_batch_size
        whole = (state.consumed_samples, state.consumed_samples + count - 1)
        iteration = state.iteration + 1
        if cause == "gradient_not_finite":
            return BadBatch(iteration, cause, None, None, (), whole, update.grad_norm, reproduced)
        if cause == "loss_not_finite":
            worst = next(
                index for index, loss in enumerate(update.losses) if not math.isfinite(loss)
            )
        else:
            worst = max(range(len(update.losses)), key=update.losses.__getitem__)
        origin = self.origin(worst, state)
        host = self._hosts[origin.rank] if self._hosts else None
        return BadBatch(
            iteration,
            cause,
            origin.rank,
            host,
            origin.samples,
            whole,
            update.losses[worst],
            reproduced,
        )

    def _suspect_hardware(self, first: Update, again: Update, state: TrainState) -> None:
        """Say that what went wrong did not when computed again from the same weights.

        The samples were the same, too.
        """
        bad = self._bad_batch(first, state, False)
        self._record(bad)
        what = {
            "loss_not_finite": f"the loss was {bad.loss}",
            "gradient_not_finite": f"the gradient norm was {bad.loss}",
            "loss_spike": f"the loss jumped to {bad.loss:.4g}",
        }[bad.cause]
        self._warn(
            f"{what}{self._place(bad)} at iteration {bad.iteration}, and when that was computed "
            f"again from the same weights and samples it was not (mean loss {again.loss:.4g}, "
            f"gradient norm {again.grad_norm:.4g}): suspect the hardware of that rank; the run "
            "goes on with the second result"
        )

    def _report_spike(self, bad: BadBatch, state: TrainState) -> None:
        self._record(bad)
        assert state.recent_loss is not None
        factor = self._config.train.loss_spike_factor
        account = (
            f"the loss jumped to {bad.loss:.4g}{self._place(bad)} at iteration {bad.iteration} "
            f"(samples {_listed(bad.samples)}), {bad.loss / state.recent_loss:.1f} times the "
            f"recent mean {state.recent_loss:.4g} (train.loss_spike_factor is {factor:g}); "
            f"{_again(bad)}"
        )
        if self._config.train.loss_spike_action == "stop":
            raise LossError(
                f"{account}: look at these samples, {self._skip(bad)}, or set "
                "train.loss_spike_action to warn"
            )
        self._warn(account)

    def _not_finite(self, bad: BadBatch, update: Update, state: TrainState) -> str:
        """One sentence with rank, iteration and samples of the first loss that is not finite."""
        lr = self._schedule.at(state.applied_iterations + 1)
        advice = (
            f"lower optim.lr (now {lr:.3E} at this iteration) or optim.clip_grad "
            f"(now {self._config.optim.clip_grad:g}), look at these samples, or {self._skip(bad)}"
        )
        if self._config.train.precision == "fp16":
            scaling = self._config.optim.loss_scale
            advice = (
                f"{scaling.patience} iterations in a row overflowed with the loss scale at its "
                f"minimum {scaling.minimum:g}: {advice}"
            )
        if bad.cause == "gradient_not_finite":
            first, last = bad.global_batch
            return (
                f"the gradient norm is {bad.loss} at iteration {bad.iteration} (samples {first} to "
                f"{last}) on all {self._layout.world_size} ranks though every loss is finite; "
                f"{_again(bad)}: {advice}"
            )
        count = sum(not math.isfinite(loss) for loss in update.losses)
        return (
            f"the loss is {bad.loss}{self._place(bad)} at iteration {bad.iteration} "
            f"(samples {_listed(bad.samples)}; {count} micro batches in all); {_again(bad)}: "
            f"{advice}"
        )

    def _skip(self, bad: BadBatch) -> str:
        """What to write so that this batch too is passed over."""
        first, last = bad.global_batch
        ranges = ", ".join(
            f'"{each}"' for each in (*self._config.train.skip_samples, f"{first}-{last}")
        )
        return f"pass the batch over with train.skip_samples: [{ranges}]"

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
