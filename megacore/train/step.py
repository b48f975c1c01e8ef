"""One iteration, in the order in which things happen."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megacore.config.run import RunConfig
from megacore.data.sampler import micro_batch_indices
from megacore.engine.base import Engine, Update
from megacore.errors import TrainingError
from megacore.observe.timers import Timers
from megacore.optim.lr_schedule import LrSchedule
from megacore.parallel.mesh import ParallelGroup
from megacore.parallel.rng import seed_micro_batch
from megacore.train.state import TrainState

Batch = npt.NDArray[np.int64]


def train_step(
    engine: Engine,
    batches: Iterator[Batch],
    state: TrainState,
    *,
    config: RunConfig,
    group: ParallelGroup,
    timers: Timers,
) -> Update:
    """Accumulate the gradient of one global batch, update the weights, and advance `state`.

    A skipped iteration consumes its samples but does not advance the learning rate schedule.

    Args:
        engine: model and optimizer.
        batches: this rank's micro batches, [b, s + 1] each.
        state: where the run stands; changed in place.
        config: the run.
        group: data-parallel ranks.
        timers: take the time of the phases.

    Raises:
        TrainingError: a loss or gradient is not finite and no lower loss scale can help.
    """
    train = config.train
    micro_steps = train.global_batch_size // (train.micro_batch_size * group.size)
    engine.start_iteration()
    for micro_step in range(micro_steps):
        with timers("data"):
            tokens = to_device(next(batches), engine.device)
        seed_micro_batch(config.seed, state.iteration, micro_step, group.rank)
        with timers("forward-backward"):
            engine.micro_step(tokens, last=micro_step == micro_steps - 1)
    with timers("update"):
        update = engine.update(LrSchedule.of(config).at(state.applied_iterations + 1))
    _take_note(update, state, config, group, engine.device)
    state.iteration += 1
    state.consumed_samples += train.global_batch_size
    return update


def to_device(batch: Batch, device: torch.device) -> Tensor:
    """Token ids [b, s + 1] on the device, without waiting for the copy."""
    tokens = torch.from_numpy(batch)
    return tokens.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tokens


def _take_note(
    update: Update, state: TrainState, config: RunConfig, group: ParallelGroup, device: torch.device
) -> None:
    """Count an applied or a skipped iteration, the same on every rank, or stop a run that cannot recover."""
    if update.applied:
        state.applied_iterations += 1
        state.interval.add(update.loss)
        return
    losses = _losses_by_rank(update.losses, group, device)
    bad = [(rank, step) for rank, own in enumerate(losses) for step, loss in enumerate(own) if not math.isfinite(loss)]
    if update.fatal:
        raise TrainingError(_diagnosis(losses, bad, update, state, config))
    state.interval.skipped_iterations += 1
    state.interval.nan_iterations += bool(bad)


def _losses_by_rank(losses: Sequence[float], group: ParallelGroup, device: torch.device) -> list[list[float]]:
    """Every rank's losses by micro step; collective, so only called where all ranks skip together."""
    own = torch.tensor(losses, dtype=torch.float64, device=device)
    if group.size == 1:
        return [own.tolist()]
    gathered = [torch.empty_like(own) for _ in range(group.size)]
    dist.all_gather(gathered, own, group=group.group)
    return [each.tolist() for each in gathered]


def _diagnosis(
    losses: list[list[float]], bad: list[tuple[int, int]], update: Update, state: TrainState, config: RunConfig
) -> str:
    """One sentence with the rank, the iteration and the samples of the first loss that is not finite."""
    iteration = state.iteration + 1
    lr = LrSchedule.of(config).at(state.applied_iterations + 1)
    advice = f"lower optim.lr (now {lr:.3E} at this iteration) or optim.clip_grad, or look at these samples"
    size = config.train.micro_batch_size
    if not bad:
        first = state.consumed_samples
        last = first + config.train.global_batch_size - 1
        return (
            f"the gradient norm is {update.grad_norm} at iteration {iteration} (samples {first} to {last}) on all "
            f"{len(losses)} ranks though every loss is finite: {advice}"
        )
    rank, step = bad[0]
    samples = micro_batch_indices(state.consumed_samples, step, size, rank, len(losses))
    return (
        f"the loss is {losses[rank][step]} on rank {rank} at iteration {iteration} "
        f"(samples {', '.join(map(str, samples))}; {len(bad)} micro batches in all): {advice}"
    )
