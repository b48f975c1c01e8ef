"""AdamW (Loshchilov and Hutter 2019) over fp32 main weights (Micikevicius et al. 2018).

Gradients are clipped by their global norm (Pascanu et al. 2013) without a transfer to the host.
Main weights and moments are either complete on each replica or divided over the replicas (ZeRO-1;
Rajbhandari et al. 2020, arXiv:1910.02054). In the latter case each replica sums, updates and keeps
in fp32 only its shard of every bucket, and all replicas gather the weights. This moves as many
bytes as an all-reduce of the gradients.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megacore.checkpoint.shard import TensorShard
from megacore.config.optim import OptimConfig
from megacore.data_parallel.gather import FlatWeights
from megacore.data_parallel.grad_sync import (
    Bucket,
    GradSync,
    sum_of_ranks,
)
from megacore.kernels.adamw import AdamTensors, Hyperparameters
from megacore.kernels.choice import Kernels, plain_kernels
from megacore.parallel.collectives import Pending
from megacore.parallel.mesh import SINGLE_RANK
from megacore.tensor_parallel.partition import Partition

EPSILON = 1e-6
"""Value added to the norm before it divides the limit, as in torch and Megatron-LM."""
KINDS = {"model": "weight", "optimizer.exp_avg": "exp_avg", "optimizer.exp_avg_sq": "exp_avg_sq"}
"""Field of a main weight for each prefix of names in a checkpoint."""
NO_NAMES: frozenset[str] = frozenset()
Initial = Mapping[str, Callable[[], Tensor]]
"""Functions that return the initial values of parameters by name, fp32."""


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the scalar divisor >= 1 that clips gradients of this norm to `max_norm`.

    Args:
        norm: norm of the gradients, a scalar.
        max_norm: limit of the norm; 0 does not clip.
    """
    return (
        torch.clamp((norm + EPSILON) / max_norm, min=1.0) if max_norm > 0 else torch.ones_like(norm)
    )


def has_weight_decay(name: str, dimensions: int) -> bool:
    """Return True if a parameter with this global name and number of dimensions decays.

    Biases and the gains of layer norms (all vectors) do not, as in Megatron-LM.
    """
    return dimensions > 1 and not name.endswith(".bias")


@dataclass(frozen=True)
class MainWeight:
    """Elements of one parameter that this rank updates, in fp32 tensors of the same shape."""

    name: str
    """Global name of the parameter."""
    start: int
    """First element, counted within the flattened parameter of this tensor-parallel rank."""
    weight: Tensor
    gradient: Tensor
    exp_avg: Tensor
    """First moment; for a matrix of Muon, the momentum."""
    exp_avg_sq: Tensor | None
    """Second moment; None for a matrix of Muon."""
    target: Tensor | None = None
    """Lower-precision weight of the model, into which an update is rounded; None if the main weight
    is the model's weight."""


class MainWeights(Protocol):
    """Main weights that are published together."""

    @property
    def weights(self) -> Sequence[MainWeight]:
        """Main weights that this rank updates."""
        ...

    def publish(self) -> Pending:
        """Start sending the updated targets to the ranks that compute with them."""
        ...


class WholeWeights:
    """All main weights of a model chunk.

    If the chunk computes in fp32, they are the model's weights.
    """

    def __init__(
        self, sync: GradSync, dtype: torch.dtype, single: Collection[str] = NO_NAMES
    ) -> None:
        """Take the fp32 parameters of `sync` and cast them to `dtype`.

        The main weights keep their bits. The parameters in `single` have only one moment.
        """
        self.weights = []
        for name, parameter in sync.parameters.items():
            main = parameter.data
            parameter.data = main.to(dtype)
            second = None if name in single else torch.zeros_like(main)
            moments = torch.zeros_like(main), second
            target = None if dtype == torch.float32 else parameter.data
            self.weights.append(MainWeight(name, 0, main, sync.gradients[name], *moments, target))

    def publish(self) -> Pending:
        """Return a completed operation, since the targets are the model's weights."""
        return Pending(SINGLE_RANK, (), lambda: self.weights[0].weight)


class ShardedWeights:
    """Model weights of one bucket in a flat buffer, and this rank's shard of them in fp32.

    Shards begin at multiples of the alignment within every parameter. The fused AdamW rounds an
    element differently in its vector loop and in the remainder after it; with the alignment, each
    element is updated as it would be without shards.
    """

    def __init__(
        self,
        sync: GradSync,
        bucket: Bucket,
        dtype: torch.dtype,
        single: Collection[str] = NO_NAMES,
        initial: Initial | None = None,
    ) -> None:
        """Move a bucket's fp32 parameters into a flat buffer, cast to `dtype`.

        The parameters in `single` have only one moment. With `initial`, the parameters have no
        memory yet, and this rank holds one of them at a time in fp32.
        """
        self.flat = FlatWeights(
            bucket.layout.length,
            bucket.shard,
            sync.mesh.data_context_parallel,
            dtype,
            bucket.reduced.device,
        )
        """Weights in the compute type."""
        self.unit = bucket.unit
        """Number of the unit that the weights belong to."""
        pieces = {piece.name: piece for piece in bucket.layout.within(bucket.shard)}
        runs = []
        for whole in bucket.layout.pieces:
            parameter = sync.parameters[whole.name]
            values = initial[whole.name]() if initial else parameter.data
            view = whole.of(self.flat.buffer).view(parameter.shape)
            view.copy_(values)
            parameter.data = view
            if piece := pieces.get(whole.name):
                runs.append(values.flatten()[piece.start : piece.start + piece.length].clone())
        if sync.sharding.divides("parameters"):
            self.flat.divide()
        shard = self.flat.shard
        # The weights of an fp32 model are the main weights.
        is_fp32 = dtype == torch.float32
        main = shard if is_fp32 else torch.zeros_like(shard, dtype=torch.float32)
        exp_avg = torch.zeros_like(main)
        for piece, run in zip(pieces.values(), runs, strict=True):
            piece.of(main).copy_(run)
        self.weights = [
            MainWeight(
                part.name,
                part.start,
                part.of(main),
                part.of(bucket.reduced),
                part.of(exp_avg),
                None if part.name in single else torch.zeros_like(part.of(main)),
                None if is_fp32 else part.of(shard),
            )
            for part in pieces.values()
        ]

    def publish(self) -> Pending:
        """Start gathering the other ranks' shards, which divided weights do when they are used."""
        if self.flat.divided:
            return Pending(SINGLE_RANK, (), lambda: self.flat.shard)
        return self.flat.start_gather()


class MainWeightAdamW:
    """AdamW optimizer of fp32 main weights.

    For a weight w with the gradient g, in step t (Loshchilov and Hutter 2019, algorithm 2):

        m_t = β1 m_(t-1) + (1 - β1) g
        v_t = β2 v_(t-1) + (1 - β2) g²
        w_t = w_(t-1) - η (m_t / (1 - β1^t) / (√(v_t / (1 - β2^t)) + ε) + λ w_(t-1))

    A fused kernel updates them and rounds them into the model's weights. If the model computes in
    fp32, its weights are the main weights and nothing is copied. With a distributed optimizer this
    rank has only its shard of the main weights and moments. The kernel also divides the gradients,
    so that averaging, clipping and the loss scale need no separate pass.
    """

    def __init__(
        self,
        syncs: Sequence[GradSync],
        config: OptimConfig,
        dtype: torch.dtype,
        partitions: Mapping[str, Partition] | None = None,
        kernels: Kernels | None = None,
        *,
        single: Collection[str] = NO_NAMES,
        initial: Initial | None = None,
    ) -> None:
        """Take the parameters of this rank's model chunks and cast them to the compute type.

        Args:
            syncs: gradients and fp32 parameters of each chunk, all of one mesh.
            config: betas and epsilon; values that change from step to step are arguments of `step`.
            dtype: new type of the model's weights; the main weights keep their bits.
            partitions: division of parameters over tensor-parallel ranks; parameters that are not
                named are whole on each rank.
            kernels: implementation of the operations; None is plain torch.
            single: parameters with only one moment, which a subclass updates.
            initial: initial values of the parameters, which then have no memory yet; only for a
                distributed optimizer.
        """
        kernels = kernels or plain_kernels()
        self._adamw, self._sum_of_squares = kernels.optimizer, kernels.sum_of_squares
        self._config = config
        self._partitions = partitions or {}
        self._syncs = tuple(syncs)
        self._mesh = self._syncs[0].mesh
        self._replicas = self._mesh.data_parallel.size
        self._device = self._syncs[0].buckets[0].reduced.device
        self._counted = [run for sync in self._syncs for run in self._counted_runs(sync)]
        self._decaying = frozenset(
            name
            for sync in self._syncs
            for name, parameter in sync.parameters.items()
            if has_weight_decay(name, parameter.dim())
        )
        self._parts: list[MainWeights] = []
        for sync in self._syncs:
            if sync.sharded:
                self._parts += [
                    ShardedWeights(sync, bucket, dtype, single, initial) for bucket in sync.buckets
                ]
            else:
                self._parts.append(WholeWeights(sync, dtype, single))
        self.steps = 0
        """Number of updates so far, for the bias correction of the moments."""

    @torch.no_grad()
    def grad_norm(self, *, scale: float = 1.0) -> Tensor:
        """Return the global norm of the mean gradient, after `GradSync.finish`: an fp32 scalar.

        It has the same bits on every rank. Each parameter counts once, even if several ranks hold
        it or a part of it. Collective over the replica's ranks, and over the replicas too if each
        has only its shard.

        Args:
            scale: loss scale still contained in the gradients.
        """
        total = self._sum_of_squares(self._counted, self._device)
        groups = [self._mesh.data_context_parallel] * self._syncs[0].sharded + [
            self._mesh.model_parallel
        ]
        for group in groups:
            total = sum_of_ranks(total, group)
        return (total.sqrt() / (self._replicas * scale)).float()

    @torch.no_grad()
    def step(
        self,
        lr: float,
        weight_decay: float,
        *,
        norm: Tensor | None = None,
        max_norm: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        """Make one update from the gradients in the buckets, which are overwritten.

        Args:
            lr: learning rate of this update.
            weight_decay: decoupled weight decay of this update, for the parameters that decay.
            norm: result of `grad_norm`; needed for clipping.
            max_norm: limit of the global norm; 0 does not clip.
            scale: loss scale still contained in the gradients.
        """
        divisor = torch.full((), self._replicas * scale, device=self._device)
        if max_norm > 0:
            assert norm is not None, "clipping needs the norm"
            divisor *= clip_divisor(norm, max_norm)
        self.steps += 1
        self._step(lr, weight_decay, divisor)

    def _step(self, lr: float, weight_decay: float, divisor: Tensor) -> None:
        """Update all main weights and publish them."""
        pending = []
        for part in self._parts:
            self._adam(part.weights, lr, weight_decay, divisor)
            pending.append(part.publish())
        for work in pending:
            work.wait()

    @torch.no_grad()
    def write_back(self) -> None:
        """Publish the main weights to the model; call it after loading them.

        Collective if sharded.
        """
        for part in self._parts:
            for main in part.weights:
                if main.target is not None:
                    main.target.copy_(main.weight)
        for work in [part.publish() for part in self._parts]:
            work.wait()

    @property
    def divided(self) -> dict[int, list[FlatWeights]]:
        """Weights that are gathered only while they are used, by the number of their unit."""
        units: dict[int, list[FlatWeights]] = {}
        for part in self._parts:
            if isinstance(part, ShardedWeights) and part.flat.divided:
                units.setdefault(part.unit, []).append(part.flat)
        return units

    def tensors(self) -> dict[str, Tensor | TensorShard]:
        """Return the main weights and moments under the names and shapes of a checkpoint.

        They are loaded in place. For a parameter that is divided over ranks, the tensor is this
        rank's part, which may be empty.
        """
        weights_by_name: dict[str, list[MainWeight]] = {
            name: [] for sync in self._syncs for name in sync.parameters
        }
        for part in self._parts:
            for main in part.weights:
                weights_by_name[main.name].append(main)
        kinds = {name: self._kinds(name) for name in weights_by_name}
        return {
            f"{kind}.{name}": self._global(
                name, [(main.start, getattr(main, kinds[name][kind])) for main in weights]
            )
            for kind in dict.fromkeys(kind for each in kinds.values() for kind in each)
            for name, weights in weights_by_name.items()
            if kind in kinds[name]
        }

    def _kinds(self, name: str) -> Mapping[str, str]:
        """Map the prefix of each checkpoint name to the `MainWeight` field that holds it."""
        return KINDS

    def _global(self, name: str, runs: Sequence[tuple[int, Tensor]]) -> Tensor | TensorShard:
        """Return a tensor in the form that a checkpoint takes."""
        partition = self._partitions.get(name)
        if partition is None and not self._syncs[0].sharded:
            return runs[0][1]
        shape = next(sync.parameters[name].shape for sync in self._syncs if name in sync.parameters)
        return TensorShard.of_runs(runs, shape, torch.float32, partition)

    def _adam(
        self, weights: Iterable[MainWeight], lr: float, weight_decay: float, divisor: Tensor
    ) -> None:
        """Update main weights by AdamW, those that decay first."""
        optim = self._config
        groups: dict[bool, list[MainWeight]] = {True: [], False: []}
        for main in weights:
            groups[main.name in self._decaying].append(main)
        for decays, group in groups.items():
            if not group:
                continue
            targets = [main.target for main in group if main.target is not None]
            tensors = AdamTensors(
                [main.weight for main in group],
                [main.gradient for main in group],
                [main.exp_avg for main in group],
                [main.exp_avg_sq for main in group if main.exp_avg_sq is not None],
                targets or None,
            )
            decay = weight_decay if decays else 0.0
            values = Hyperparameters(
                lr, decay, optim.adam_beta1, optim.adam_beta2, optim.adam_eps, self.steps
            )
            self._adamw(tensors, values, divisor)

    def _counted_runs(self, sync: GradSync) -> Iterator[Tensor]:
        """Yield the gradients of `sync` that this rank, and no other, adds to the global norm."""
        counted_names = frozenset(
            name
            for name in sync.parameters
            if (name in self._partitions or self._mesh.tensor_parallel.rank == 0)
            and (name not in sync.shared or sync.shared[name].rank == 0)
        )
        for bucket in sync.buckets:
            for run in bucket.layout.runs(bucket.shard, counted_names):
                yield bucket.reduced[run]
