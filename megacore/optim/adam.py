"""AdamW (Loshchilov and Hutter 2019) over fp32 main weights (Micikevicius et al. 2018).

Gradients are clipped by their global norm (Pascanu et al. 2013) without a transfer to the host.
Main weights and moments are whole, or divided over the replicas (ZeRO-1; Rajbhandari et al. 2020,
arXiv:1910.02054): each replica then sums, updates and keeps in fp32 its shard of every bucket
alone, and all gather the weights. An all-reduce of gradients would move as much.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megacore.checkpoint.shard import TensorShard
from megacore.config.optim import OptimConfig
from megacore.data_parallel.buckets import Piece, start_all_gather_, sum_of_ranks
from megacore.data_parallel.grad_sync import Bucket, GradSync
from megacore.kernels.adamw import AdamTensors, Hyperparameters
from megacore.kernels.choice import Kernels, plain_kernels
from megacore.parallel.collectives import Pending
from megacore.parallel.mesh import ALONE
from megacore.tensor_parallel.partition import Partition

EPSILON = 1e-6
"""Added to the norm before it divides the limit, as torch and Megatron-LM do."""
_KINDS = {"model": "weight", "optimizer.exp_avg": "exp_avg", "optimizer.exp_avg_sq": "exp_avg_sq"}
"""Where a checkpoint keeps what of a main weight."""


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of this norm are divided by to be at most `max_norm`: a scalar >= 1.

    Args:
        norm: a scalar.
        max_norm: limit of the norm; 0 does not clip.
    """
    return (
        torch.clamp((norm + EPSILON) / max_norm, min=1.0) if max_norm > 0 else torch.ones_like(norm)
    )


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that share their hyperparameters."""

    names: tuple[str, ...]
    """Global names."""
    decays: bool
    """Whether weight decay applies to them."""


def has_weight_decay(name: str, parameter: Tensor) -> bool:
    """Whether a parameter decays.

    Biases and the gains of layer norms (all vectors) do not, as in Megatron-LM.

    `parameter` is the model's, whole or a tensor-parallel part; a flattened piece of it has lost
    what decides.
    """
    return parameter.dim() > 1 and not name.endswith(".bias")


def param_groups(named_parameters: Iterable[tuple[str, Tensor]]) -> tuple[ParamGroup, ...]:
    """Divide parameters into those that decay and those that do not; empty groups are left out."""
    decayed: list[str] = []
    undecayed: list[str] = []
    for name, parameter in named_parameters:
        (decayed if has_weight_decay(name, parameter) else undecayed).append(name)
    groups = (ParamGroup(tuple(decayed), decays=True), ParamGroup(tuple(undecayed), decays=False))
    return tuple(group for group in groups if group.names)


@dataclass(frozen=True)
class MainWeight:
    """Elements of one parameter that this rank updates; all tensors are fp32 and of one shape."""

    name: str
    """Global name of the parameter."""
    start: int
    """First element, counted within the flattened parameter of this tensor-parallel rank."""
    weight: Tensor
    gradient: Tensor
    exp_avg: Tensor
    """First moment."""
    exp_avg_sq: Tensor
    """Second moment."""
    target: Tensor | None = None
    """The model's weight of lower precision, into which an update rounds; None where the main
    weight is the model's."""


class MainWeights(Protocol):
    """Main weights that are published together."""

    @property
    def weights(self) -> Sequence[MainWeight]:
        """What this rank updates."""
        ...

    def publish(self) -> Pending:
        """Begin to bring what an update wrote into the targets to whoever computes with it."""
        ...


class WholeWeights:
    """All main weights of a model chunk.

    Where it computes in fp32, they are the model's weights.
    """

    def __init__(self, sync: GradSync, dtype: torch.dtype) -> None:
        """Take over the parameters of `sync`, fp32, and cast them to `dtype`.

        The main weights keep their bits.
        """
        self.weights = []
        for name, parameter in sync.parameters.items():
            main = parameter.data
            parameter.data = main.to(dtype)
            moments = torch.zeros_like(main), torch.zeros_like(main)
            target = None if dtype == torch.float32 else parameter.data
            self.weights.append(MainWeight(name, 0, main, sync.gradients[name], *moments, target))

    def publish(self) -> Pending:
        """The targets are the model's weights: nothing is left to do."""
        return Pending(ALONE, (), lambda: self.weights[0].weight)


class ShardedWeights:
    """The model's weights of one bucket in a flat buffer, and this rank's shard of them in fp32.

    Shards begin at multiples of the alignment within every parameter: the fused AdamW rounds an
    element in its vector loop and in the remainder after it differently, and so updates each as it
    would without shards.
    """

    def __init__(self, sync: GradSync, bucket: Bucket, dtype: torch.dtype) -> None:
        """Take over a bucket's parameters, fp32, into a flat buffer, cast to `dtype`."""
        self._replicas = sync.mesh.data_parallel
        device = bucket.buffer.device
        self._buffer = torch.zeros(bucket.layout.length, dtype=dtype, device=device)
        shard = self._buffer[bucket.shard.start : bucket.shard.stop]
        # An fp32 model's own weights are the main weights.
        whole_precision = dtype == torch.float32
        main = shard if whole_precision else torch.zeros_like(shard, dtype=torch.float32)
        exp_avg, exp_avg_sq = torch.zeros_like(main), torch.zeros_like(main)
        pieces = list(bucket.layout.within(bucket.shard))
        for piece in pieces:
            piece.of(main).copy_(_run(sync.parameters[piece.name], piece))
        for whole in bucket.layout.pieces:
            parameter = sync.parameters[whole.name]
            view = whole.of(self._buffer).view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
        self.weights = [
            MainWeight(
                piece.name,
                piece.start,
                piece.of(main),
                piece.of(bucket.reduced),
                piece.of(exp_avg),
                piece.of(exp_avg_sq),
                None if whole_precision else piece.of(shard),
            )
            for piece in pieces
        ]

    def publish(self) -> Pending:
        """Begin to gather the other ranks' shards."""
        return start_all_gather_(self._buffer, self._replicas)


def _run(parameter: nn.Parameter, piece: Piece) -> Tensor:
    return parameter.data.flatten()[piece.start : piece.start + piece.length]


class MainWeightAdamW:
    """Updates fp32 main weights by a fused kernel, which rounds them into the model's weights too.

    Where the model computes in fp32, its weights are the main weights and nothing is copied. Under
    a distributed optimizer this rank has its shard of them, and of the moments, alone. The kernel
    also divides the gradients, so that averaging, clipping and the loss scale take no pass of their
    own.
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
            partitions: how parameters are divided over tensor-parallel ranks; those not named are
                whole on each.
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
        self._decaying = frozenset(
            name for group in param_groups(parameters) if group.decays for name in group.names
        )
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
        """Global norm of the mean gradient, after `GradSync.finish`: an fp32 scalar.

        Its bits are the same on every rank.

        Each parameter counts once, however many ranks hold it or a part of it. Collective over the
        replica's ranks, and over the replicas too where each has its shard alone.

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
        self,
        lr: float,
        weight_decay: float,
        *,
        norm: Tensor | None = None,
        max_norm: float = 0.0,
        scale: float = 1.0,
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
        """Publish the main weights to the model; to be called after they were loaded.

        Collective when sharded.
        """
        for part in self._parts:
            for main in part.weights:
                if main.target is not None:
                    main.target.copy_(main.weight)
        for work in [part.publish() for part in self._parts]:
            work.wait()

    def tensors(self) -> dict[str, Tensor | TensorShard]:
        """Main weights and moments under the names and shapes of a checkpoint.

        They are loaded in place.

        Of a parameter that other ranks hold parts of, this rank's part; it may be empty.
        """
        held: dict[str, list[MainWeight]] = {
            name: [] for sync in self._syncs for name in sync.parameters
        }
        for part in self._parts:
            for main in part.weights:
                held[main.name].append(main)
        return {
            f"{kind}.{name}": self._global(
                name, [(main.start, getattr(main, field)) for main in weights]
            )
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

    def _update(
        self, weights: Sequence[MainWeight], lr: float, weight_decay: float, divisor: Tensor
    ) -> None:
        if not weights:
            return
        optim = self._config
        self._adamw(
            AdamTensors(
                [main.weight for main in weights],
                [main.gradient for main in weights],
                [main.exp_avg for main in weights],
                [main.exp_avg_sq for main in weights],
                None
                if weights[0].target is None
                else [main.target for main in weights if main.target is not None],
            ),
            Hyperparameters(
                lr, weight_decay, optim.adam_beta1, optim.adam_beta2, optim.adam_eps, self.steps
            ),
            divisor,
        )

    def _counted_runs(self, sync: GradSync) -> Iterator[Tensor]:
        """The gradients of `sync` that this rank counts for the global norm, and no other."""
        own = frozenset(
            name
            for name in sync.parameters
            if (name in self._partitions or self._mesh.tensor_parallel.rank == 0)
            and (name not in sync.shared or sync.shared[name].rank == 0)
        )
        for bucket in sync.buckets:
            for run in bucket.layout.runs(bucket.shard, own):
                yield bucket.reduced[run]
