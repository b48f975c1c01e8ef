"""Execution of training iterations."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from megacore.config.batch_schedule import BatchSchedule
from megacore.config.run import RunConfig
from megacore.config.sequence_schedule import SequenceSchedule
from megacore.data.sampler import is_skipped, micro_batches
from megacore.data.samples import Batch, Dataset, Indices
from megacore.engine.base import Engine, Update
from megacore.optim.param_schedule import LrSchedule, WeightDecaySchedule
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rng import micro_batch_seed
from megacore.train.loss_check import LossCheck
from megacore.train.state import TrainState


class Stepper:
    """Executor of one run's iterations on one rank."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        mesh: ProcessMesh,
        check: LossCheck,
        read: Callable[[Indices], Batch],
        warn: Callable[[str], None],
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the executor of a run.

        Args:
            config: configuration of the run.
            engine: model and optimizer.
            mesh: this process's groups.
            check: check of the losses, which also counts iterations in the state.
            read: reader of the train split, for computing an iteration again.
            warn: callback that receives the message of a skipped batch.
            before_update: callback between the passes and the update of the weights.
        """
        self._seed = config.seed
        self._micro_batch_size = config.train.micro_batch_size
        self._skipped = config.train.skipped_ranges
        self._applies_spikes = config.train.loss_spike_action == "warn"
        self._engine, self._mesh, self._check = engine, mesh, check
        self._read, self._warn, self._before_update = read, warn, before_update
        self._batch = BatchSchedule.of(config.train)
        self._sequence = SequenceSchedule.of(config.data)
        self._lr = LrSchedule.of(config)
        self._weight_decay = WeightDecaySchedule.of(config.optim, config.lr_decay_iters)

    def upcoming(self, state: TrainState, steps: int) -> Iterator[range]:
        """Yield the samples of this rank's micro batches in the next `steps` iterations.

        Yields nothing on a rank that reads no tokens.
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

        A skipped iteration consumes its samples but does not advance the schedules. If the gradient
        is not finite and no lower loss scale can help, or the loss spikes (where the engine can
        withhold the update), the iteration is computed a second time before the result counts. A
        batch that contains a sample of `train.skip_samples` is skipped.

        Args:
            batches: this rank's micro batches, [b, width] each; empty on ranks that read no tokens.
            state: training state; changed in place.
            notices: function that returns this rank's notices to all ranks; it is called when the
                losses are exchanged. The combined notices are in the returned update, if one was
                computed.

        Raises:
            LossError: a loss or gradient is not finite and no lower loss scale can help, or a loss
                spiked, and the run must stop for it.
        """
        size = self._batch.at(state.consumed_samples)
        global_batch = range(state.consumed_samples, state.consumed_samples + size)
        if is_skipped(global_batch, self._skipped):
            update = self._pass_over(global_batch, state)
        else:
            update, first = (
                self._attempt(batches, state, global_batch, notices, self._spikes(state)),
                None,
            )
            if update.fatal or update.withheld:
                first = update
                withhold = None if self._applies_spikes else self._spikes(state)
                update = self._attempt(
                    map(self._read, self.upcoming(state, 1)), state, global_batch, notices, withhold
                )
            self._check.count_iteration(update, state, first)
        state.iteration += 1
        state.consumed_samples += size
        return update

    def _attempt(
        self,
        batches: Iterator[Batch],
        state: TrainState,
        global_batch: range,
        notices: Callable[[], Sequence[bool]],
        withhold: Callable[[Sequence[float]], bool] | None,
    ) -> Update:
        """Compute a global batch and update the weights, unless the update is withheld."""
        step = state.applied_iterations + 1
        tokens = loaded(batches, self._engine.device, self._mesh)
        length = self._sequence.at(global_batch.start)
        if length != self._sequence.longest:
            tokens = (cut(batch, length) for batch in tokens)
        self._engine.forward_backward(tokens, self._seeds(global_batch), seq_length=length)
        self._before_update()
        return self._engine.update(
            self._lr.at(step), self._weight_decay.at(step), notices=notices(), withhold=withhold
        )

    def _spikes(self, state: TrainState) -> Callable[[Sequence[float]], bool] | None:
        """Return the spike test that runs before the weights are updated.

        Returns None if the engine cannot withhold an update.
        """
        return partial(self._check.is_spike, state=state) if self._engine.can_withhold else None

    def _pass_over(self, global_batch: range, state: TrainState) -> Update:
        """Count the global batch as consumed without computing it."""
        state.interval.skipped_iterations += 1
        state.passed_over.append((global_batch.start, global_batch.stop - 1))
        self._warn(
            f"iteration {state.iteration + 1} skips samples {global_batch.start} to "
            f"{global_batch.stop - 1}, among which are some of train.skip_samples"
        )
        losses = (math.nan,) * (len(global_batch) // self._micro_batch_size)
        return Update(
            losses, dict.fromkeys(self._engine.loss_names, math.nan), math.nan, applied=False
        )

    def _seeds(self, global_batch: range) -> list[int]:
        """Return the dropout seeds of this rank's micro batches, derived from their first samples.

        The seeds therefore do not depend on the layout.
        """
        size, replicas = self._micro_batch_size, self._mesh.data_parallel
        first = global_batch.start + replicas.rank * size
        return [
            micro_batch_seed(self._seed, sample)
            for sample in range(first, global_batch.stop, size * replicas.size)
        ]


def reader(dataset: Dataset, device: torch.device) -> Callable[[Indices], Batch]:
    """Return the data set's `gather`; for a GPU, a variant that fills pinned memory.

    `loaded` copies from pinned memory without waiting. torch reuses this memory only after the copy
    is complete.
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
    """Yield the ids [b, width] of each batch on the device, without waiting for the copy."""
    while True:
        with mesh.time("batch-generator"):
            batch = next(batches, None)
            if batch is None:
                return
            tokens = torch.from_numpy(batch).to(device, non_blocking=True)
        yield tokens


def cut(batch: Tensor, length: int) -> Tensor:
    """Cut rows of s + 1 ids into s / l rows of l + 1 ids each: [b, s + 1] to [b s / l, l + 1].

    The last id of a row is its last label, and the first token of the next. Every label is
    predicted once, in the order of the samples.
    """
    return batch.unfold(1, length + 1, length).reshape(-1, length + 1)
