"""One iteration, in the order in which things happen."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megacore.config.run import RunConfig
from megacore.data.samples import Batch, Dataset, Indices
from megacore.engine.base import Engine, Update
from megacore.optim.lr_schedule import LrSchedule
from megacore.optim.weight_decay import WeightDecaySchedule
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rng import micro_batch_seed
from megacore.train.batch_schedule import BatchSchedule
from megacore.train.loss_check import LossCheck
from megacore.train.state import TrainState


class Stepper:
    """Makes iterations of one run on one rank."""

    def __init__(self, config: RunConfig, engine: Engine, mesh: ProcessMesh, check: LossCheck) -> None:
        """Prepare for a run.

        Args:
            config: the run.
            engine: model and optimizer.
            mesh: this process's groups.
            check: looks at the losses and advances what counts them.
        """
        self._seed = config.seed
        self._micro_batch_size = config.train.micro_batch_size
        self._engine, self._mesh, self._check = engine, mesh, check
        self._batch = BatchSchedule.of(config)
        self._lr = LrSchedule.of(config)
        self._weight_decay = WeightDecaySchedule.of(config)

    def step(self, batches: Iterator[Batch], state: TrainState) -> Update:
        """Accumulate the gradient of one global batch, update the weights, and advance `state`.

        A skipped iteration consumes its samples but does not advance the schedules.

        Args:
            batches: this rank's micro batches, [b, width] each; empty on ranks that read no tokens.
            state: where the run stands; changed in place.

        Raises:
            TrainingError: a loss or gradient is not finite and no lower loss scale can help, or a loss jumped and
                the run is to stop for it.
        """
        global_batch_size = self._batch.at(state.consumed_samples)
        step = state.applied_iterations + 1
        tokens = loaded(batches, self._engine.device, self._mesh)
        self._engine.forward_backward(tokens, self._seeds(state.consumed_samples, global_batch_size))
        update = self._engine.update(self._lr.at(step), self._weight_decay.at(step))
        self._check.take_note(update, state)
        state.iteration += 1
        state.consumed_samples += global_batch_size
        return update

    def _seeds(self, consumed_samples: int, global_batch_size: int) -> list[int]:
        """Dropout seeds of this rank's micro batches, by their first samples: other layouts draw the same numbers."""
        size, replicas = self._micro_batch_size, self._mesh.data_parallel
        first = consumed_samples + replicas.rank * size
        last = consumed_samples + global_batch_size
        return [micro_batch_seed(self._seed, sample) for sample in range(first, last, size * replicas.size)]


def reader(dataset: Dataset, device: torch.device) -> Callable[[Indices], Batch]:
    """The data set's `gather`; for a GPU into pinned memory, from which `loaded` copies without waiting.

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
