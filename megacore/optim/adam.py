"""AdamW (Loshchilov and Hutter 2019) over fp32 main weights."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megacore.checkpoint.shard import TensorShard
from megacore.config.optim import OptimConfig
from megacore.data_parallel.flat import sum_of_ranks
from megacore.data_parallel.grad_sync import GradSync
from megacore.kernels.adamw import AdamTensors, Hyperparameters
from megacore.kernels.choice import Kernels, plain_kernels
from megacore.optim.distributed_optimizer import ShardedWeights
from megacore.optim.grad_clip import clip_divisor
from megacore.optim.main_weights import MainWeight, MainWeights, WholeWeights
from megacore.optim.param_groups import param_groups
from megacore.tensor_parallel.partition import Partition

_KINDS = {"model": "weight", "optimizer.exp_avg": "exp_avg", "optimizer.exp_avg_sq": "exp_avg_sq"}
"""Where a checkpoint keeps what of a main weight."""


class MainWeightAdamW:
    """Updates fp32 main weights by a fused kernel, which rounds them into the model's weights too.

    Where the model computes in fp32, its weights are the main weights and nothing is copied. Under a distributed
    optimizer this rank has its shard of them, and of the moments, alone. The kernel also divides the gradients, so
    that averaging, clipping and the loss scale take no pass of their own.
    """

    def __init__(
        self,
        syncs: Sequence[GradSync],
        config: OptimConfig,
        dtype: torch.dtype,
        partitions: Mapping[str, Partition] | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """Take over the parameters of this rank's model chunks and cast them to the compute type.

        Args:
            syncs: gradients and fp32 parameters of each chunk, all of one mesh.
            config: betas and epsilon; what changes from step to step is given to `step`.
            dtype: type of the model's weights from now on; the main weights keep their bits.
            partitions: how parameters are divided over tensor-parallel ranks; those not named are whole on each.
            kernels: what computes; None is plain torch.
        """
        kernels = kernels or plain_kernels()
        self._adamw, self._sum_of_squares = kernels.optimizer, kernels.sum_of_squares
        self._config = config
        self._partitions = partitions or {}
        self._syncs = tuple(syncs)
        self._mesh = self._syncs[0].mesh
        self._replicas = self._syncs[0].replicas
        self._device = self._syncs[0].buckets[0].buffer.device
        self._counted = [run for sync in self._syncs for run in self._counted_runs(sync)]
        parameters = [item for sync in self._syncs for item in sync.parameters.items()]
        self._decaying = frozenset(name for group in param_groups(parameters) if group.decays for name in group.names)
        self._parts: list[MainWeights] = []
        for sync in self._syncs:
            if sync.sharded:
                self._parts += [ShardedWeights(sync, bucket, dtype) for bucket in sync.buckets]
            else:
                self._parts.append(WholeWeights(sync, dtype))
        self.steps = 0
        """Updates made so far; it corrects the bias of the moments."""

    @torch.no_grad()
    def grad_norm(self, *, scale: float = 1.0) -> Tensor:
        """Global norm of the mean gradient, after `GradSync.finish`: an fp32 scalar, the same bits on every rank.

        Each parameter counts once, however many ranks hold it or a part of it. Collective over the replica's ranks,
        and over the replicas too where each has its shard alone.

        Args:
            scale: loss scale that the gradients still carry.
        """
        total = self._sum_of_squares(self._counted, self._device)
        groups = [self._mesh.data_parallel] * self._syncs[0].sharded + [self._mesh.model_parallel]
        for group in groups:
            total = sum_of_ranks(total, group)
        return (total.sqrt() / (self._replicas * scale)).float()

    @torch.no_grad()
    def step(
        self, lr: float, weight_decay: float, *, norm: Tensor | None = None, max_norm: float = 0.0, scale: float = 1.0
    ) -> None:
        """Make one update from the gradients in the buckets, which are used up.

        Args:
            lr: learning rate of this update.
            weight_decay: decoupled weight decay of this update, of the parameters that decay.
            norm: what `grad_norm` returned; needed to clip.
            max_norm: limit of the global norm; 0 does not clip.
            scale: loss scale that the gradients still carry.
        """
        divisor = torch.full((), self._replicas * scale, device=self._device)
        if max_norm > 0:
            assert norm is not None, "clipping needs the norm"
            divisor *= clip_divisor(norm, max_norm)
        self.steps += 1
        pending = []
        for part in self._parts:
            for decays in (True, False):
                weights = [main for main in part.weights if (main.name in self._decaying) is decays]
                self._update(weights, lr, weight_decay if decays else 0.0, divisor)
            pending.append(part.publish())
        for work in pending:
            work.wait()

    @torch.no_grad()
    def write_back(self) -> None:
        """Publish the main weights to the model; to be called after they were loaded. Collective when sharded."""
        for part in self._parts:
            for main in part.weights:
                if main.target is not None:
                    main.target.copy_(main.weight)
        for work in [part.publish() for part in self._parts]:
            work.wait()

    def tensors(self) -> dict[str, Tensor | TensorShard]:
        """Main weights and moments under the names and shapes of a checkpoint: they are loaded in place.

        Of a parameter that other ranks hold parts of, this rank's part; it may be empty.
        """
        held: dict[str, list[MainWeight]] = {name: [] for sync in self._syncs for name in sync.parameters}
        for part in self._parts:
            for main in part.weights:
                held[main.name].append(main)
        return {
            f"{kind}.{name}": self._global(name, [(main.start, getattr(main, field)) for main in weights])
            for kind, field in _KINDS.items()
            for name, weights in held.items()
        }

    def _global(self, name: str, runs: Sequence[tuple[int, Tensor]]) -> Tensor | TensorShard:
        """A tensor as the checkpoint sees it."""
        partition = self._partitions.get(name)
        if partition is None and not self._syncs[0].sharded:
            return runs[0][1]
        shape = next(sync.parameters[name].shape for sync in self._syncs if name in sync.parameters)
        return TensorShard.of_runs(runs, shape, torch.float32, partition)

    def _update(self, weights: Sequence[MainWeight], lr: float, weight_decay: float, divisor: Tensor) -> None:
        if not weights:
            return
        optim = self._config
        self._adamw(
            AdamTensors(
                [main.weight for main in weights],
                [main.gradient for main in weights],
                [main.exp_avg for main in weights],
                [main.exp_avg_sq for main in weights],
                None if weights[0].target is None else [main.target for main in weights if main.target is not None],
            ),
            Hyperparameters(lr, weight_decay, optim.adam_beta1, optim.adam_beta2, optim.adam_eps, self.steps),
            divisor,
        )

    def _counted_runs(self, sync: GradSync) -> Iterator[Tensor]:
        """The gradients of `sync` that count on this rank for the global norm, without those that others count."""
        own = frozenset(
            name
            for name in sync.parameters
            if (name in self._partitions or self._mesh.tensor_parallel.rank == 0)
            and (name not in sync.shared or sync.shared[name].rank == 0)
        )
        for bucket in sync.buckets:
            for run in bucket.layout.runs(bucket.shard, own):
                yield bucket.reduced[run]
