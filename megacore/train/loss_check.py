"""Losses that are not finite, and losses that jump: said with the rank, the iteration and the samples."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megacore.config.run import RunConfig
from megacore.data.sampler import micro_batch_indices
from megacore.engine.base import Update
from megacore.errors import TrainingError
from megacore.optim.lr_schedule import LrSchedule
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rank_layout import Coordinate
from megacore.train.state import TrainState

_MEMORY = 0.98
"""Weight of the past in the moving average of the loss: it remembers about 50 iterations."""


@dataclass(frozen=True)
class MicroBatch:
    """Where one loss of a global batch comes from."""

    rank: int
    """The process that computed it: of its tensor-parallel ranks the first, on the last pipeline stage."""
    samples: tuple[int, ...]
    """Positions in the run's order of samples."""


class LossCheck:
    """Looks at the losses of each iteration, the same ones on every rank."""

    def __init__(self, config: RunConfig, mesh: ProcessMesh, warn: Callable[[str], None]) -> None:
        """Prepare for a run.

        Args:
            config: the run.
            mesh: this process's groups.
            warn: called with the account of a spike.
        """
        self._config = config
        self._layout = mesh.layout
        self._schedule = LrSchedule.of(config)
        self._warn = warn

    def take_note(self, update: Update, state: TrainState) -> None:
        """Count an applied or a skipped iteration in `state`, which still stands before it.

        Raises:
            TrainingError: the iteration was skipped and no lower loss scale can help, or a loss jumped and
                `train.loss_spike_action` is stop.
        """
        if not update.applied:
            bad = [index for index, loss in enumerate(update.losses) if not math.isfinite(loss)]
            if update.fatal:
                raise TrainingError(self._not_finite(update, bad, state))
            state.interval.skipped_iterations += 1
            state.interval.nan_iterations += bool(bad)
            return
        self._look_for_spikes(update.losses, state)
        state.applied_iterations += 1
        state.interval.add(update.terms)
        recent = update.loss if state.recent_loss is None else state.recent_loss
        state.recent_loss = _MEMORY * recent + (1.0 - _MEMORY) * update.loss

    def origin(self, index: int, state: TrainState) -> MicroBatch:
        """Of loss number `index` of the global batch that `state` stands before."""
        step, replica = divmod(index, self._layout.data)
        size = self._config.train.micro_batch_size
        samples = micro_batch_indices(state.consumed_samples, step, size, replica, self._layout.data)
        return MicroBatch(self._layout.rank(Coordinate(self._layout.pipeline - 1, replica, 0)), tuple(samples))

    def _look_for_spikes(self, losses: Sequence[float], state: TrainState) -> None:
        factor = self._config.train.loss_spike_factor
        if factor is None or state.recent_loss is None:
            return
        worst = max(range(len(losses)), key=losses.__getitem__)
        if losses[worst] <= factor * state.recent_loss:
            return
        origin = self.origin(worst, state)
        account = (
            f"the loss jumped to {losses[worst]:.4g} on rank {origin.rank} at iteration {state.iteration + 1} "
            f"(samples {_listed(origin.samples)}), {losses[worst] / state.recent_loss:.1f} times the recent mean "
            f"{state.recent_loss:.4g} (train.loss_spike_factor is {factor:g})"
        )
        if self._config.train.loss_spike_action == "stop":
            raise TrainingError(f"{account}: look at these samples, or set train.loss_spike_action to warn")
        self._warn(account)

    def _not_finite(self, update: Update, bad: Sequence[int], state: TrainState) -> str:
        """One sentence with the rank, the iteration and the samples of the first loss that is not finite."""
        iteration = state.iteration + 1
        lr = self._schedule.at(state.applied_iterations + 1)
        advice = (
            f"lower optim.lr (now {lr:.3E} at this iteration) or optim.clip_grad "
            f"(now {self._config.optim.clip_grad:g}), or look at these samples"
        )
        if self._config.train.precision == "fp16":
            scaling = self._config.optim.loss_scale
            advice = (
                f"{scaling.patience} iterations in a row overflowed with the loss scale at its minimum "
                f"{scaling.minimum:g}: {advice}"
            )
        if not bad:
            samples = len(update.losses) * self._config.train.micro_batch_size
            return (
                f"the gradient norm is {update.grad_norm} at iteration {iteration} (samples {state.consumed_samples} "
                f"to {state.consumed_samples + samples - 1}) on all {self._layout.world_size} ranks though every "
                f"loss is finite: {advice}"
            )
        origin = self.origin(bad[0], state)
        return (
            f"the loss is {update.losses[bad[0]]} on rank {origin.rank} at iteration {iteration} "
            f"(samples {_listed(origin.samples)}; {len(bad)} micro batches in all): {advice}"
        )


def _listed(samples: Sequence[int]) -> str:
    return ", ".join(map(str, samples))
