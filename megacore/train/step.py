"""One iteration, in the order in which things happen."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from megacore.config.batch_schedule import BatchSchedule
from megacore.config.run import RunConfig
from megacore.data.sampler import is_passed_over, micro_batches
from megacore.data.samples import Batch, Dataset, Indices
from megacore.engine.base import Engine, Update
from megacore.optim.param_schedule import LrSchedule, WeightDecaySchedule
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rng import micro_batch_seed
from megacore.train.loss_check import LossCheck
from megacore.train.state import TrainState


class Stepper:
    """Makes iterations of one run on one rank."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        mesh: ProcessMesh,
        check: LossCheck,
        read: Callable[[Indices], Batch],
        warn: Callable[[str], None],
    ) -> None:
        """Prepare for a run.

        Args:
            config: the run.
            engine: model and optimizer.
            mesh: this process's groups.
            check: looks at the losses and advances what counts them.
            read: samples of the train split, to compute an iteration again.
            warn: called when a batch is passed over.
        """
        self._seed = config.seed
        self._micro_batch_size = config.train.micro_batch_size
        self._skipped = config.train.skipped_ranges
        self._stops_at_spikes = config.train.loss_spike_action == "stop"
        self._engine, self._mesh, self._check = engine, mesh, check
        self._read, self._warn = read, warn
        self._batch = BatchSchedule.of(config.train)
        self._lr = LrSchedule.of(config)
        self._weight_decay = WeightDecaySchedule.of(config.optim, config.lr_decay_iters)

    def upcoming(self, state: TrainState, steps: int) -> Iterator[range]:
        """Samples of this rank's micro batches in the next `steps` iterations.

        None where it reads no tokens.
        """
        if not self._engine.reads_tokens:
            return iter(())
        replicas = self._mesh.data_parallel
        return micro_batches(
            state.consumed_samples,
            micro_batch_size=self._micro_batch_size,
            schedule=self._batch,
            dp_rank=replicas.rank,
            dp_size=replicas.size,
            steps=steps,
            skipped=self._skipped,
        )

    def step(
        self,
        batches: Iterator[Batch],
        state: TrainState,
        notices: Callable[[], Sequence[bool]] = tuple,
    ) -> Update:
        """Accumulate the gradient of one global batch, update the weights, and advance `state`.

        A skipped iteration consumes its samples but does not advance the schedules. One whose
        gradient is not finite for good, or whose loss jumped (where the engine can withhold the
        update), is computed once more before anything follows from it. One that holds a sample of
        `train.skip_samples` is passed over.

        Args:
            batches: this rank's micro batches, [b, width] each; empty on ranks that read no tokens.
            state: where the run stands; changed in place.
            notices: asked, when the losses are exchanged, what this rank has to say to all; what
                all said comes back in the update, if one was computed.

        Raises:
            LossError: a loss or gradient is not finite and no lower loss scale can help, or a loss
                jumped and the run is to stop for it.
        """
        size = self._batch.at(state.consumed_samples)
        here = range(state.consumed_samples, state.consumed_samples + size)
        if is_passed_over(here, self._skipped):
            update = self._pass_over(here, state)
        else:
            update, first = self._attempt(batches, state, here, notices, self._spikes(state)), None
            if update.fatal or update.withheld:
                first = update
                withhold = self._spikes(state) if self._stops_at_spikes else None
                update = self._attempt(
                    map(self._read, self.upcoming(state, 1)), state, here, notices, withhold
                )
            self._check.take_note(update, state, first)
        state.iteration += 1
        state.consumed_samples += size
        return update

    def _attempt(
        self,
        batches: Iterator[Batch],
        state: TrainState,
        here: range,
        notices: Callable[[], Sequence[bool]],
        withhold: Callable[[Sequence[float]], bool] | None,
    ) -> Update:
        """Compute the global batch `here` and update the weights, unless that is withheld."""
        step = state.applied_iterations + 1
        tokens = loaded(batches, self._engine.device, self._mesh)
        self._engine.forward_backward(tokens, self._seeds(here))
        return self._engine.update(
            self._lr.at(step), self._weight_decay.at(step), notices=notices(), withhold=withhold
        )

    def _spikes(self, state: TrainState) -> Callable[[Sequence[float]], bool] | None:
        """What finds a jump of the loss before it reaches the weights.

        None where the engine cannot wait for it.
        """
        return partial(self._check.is_spike, state=state) if self._engine.can_withhold else None

    def _pass_over(self, here: range, state: TrainState) -> Update:
        """Take the global batch `here` as read without computing it."""
        state.interval.skipped_iterations += 1
        state.passed_over.append((here.start, here.stop - 1))
        self._warn(
            f"iteration {state.iteration + 1} passes over samples {here.start} to {here.stop - 1}, "
            "among which are some of train.skip_samples"
        )
        losses = (math.nan,) * (len(here) // self._micro_batch_size)
        return Update(
            losses, dict.fromkeys(self._engine.loss_names, math.nan), math.nan, applied=False
        )

    def _seeds(self, here: range) -> list[int]:
        """Dropout seeds of this rank's micro batches, by their first samples.

        Other layouts draw the same numbers.
        """
        size, replicas = self._micro_batch_size, self._mesh.data_parallel
        first = here.start + replicas.rank * size
        return [
            micro_batch_seed(self._seed, sample)
            for sample in range(first, here.stop, size * replicas.size)
        ]


def reader(dataset: Dataset, device: torch.device) -> Callable[[Indices], Batch]:
    """The data set's `gather`; for a GPU into pinned memory.

    From there `loaded` copies without waiting.

    torch gives such memory out again only when the copy is done.
    """
    if device.type != "cuda":
        return dataset.gather

    def gather(indices: Indices) -> Batch:
        with torch.cuda.device(device):  # a new thread starts on the first GPU
            shape = len(indices), dataset.width
            out: Batch = torch.empty(shape, dtype=torch.int64, pin_memory=True).numpy()
        return dataset.gather(indices, out)

    return gather


def loaded(batches: Iterator[Batch], device: torch.device, mesh: ProcessMesh) -> Iterator[Tensor]:
    """Ids [b, width] of each batch on the device, without waiting for the copy."""
    while True:
        with mesh.time("batch-generator"):
            batch = next(batches, None)
            if batch is None:
                return
            tokens = torch.from_numpy(batch).to(device, non_blocking=True)
        yield tokens
