"""Engine based only on torch.

It trains in mixed precision in any layout, with fp32 main weights and gradients, following
Micikevicius et al. 2018 (arXiv:1710.03740): weights and activations in bf16 or fp16; main weights,
accumulated gradients and moments in fp32. Only fp16 needs a loss scale.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from megacore.checkpoint.shard import TensorShard
from megacore.config.run import RunConfig
from megacore.data_parallel.gather import FlatWeights, Unit, WeightGatherer
from megacore.data_parallel.grad_sync import build_grad_sync
from megacore.data_parallel.sharding import Sharding
from megacore.engine.base import Engine, Reduced, Update, communication, global_means
from megacore.engine.cuda_graph import MicroBatchGraph
from megacore.kernels.implementation import DTYPES
from megacore.models.base import LossTotals
from megacore.models.layers.embedding import Embedding
from megacore.models.stage import Stage
from megacore.optim.adam import MainWeightAdamW
from megacore.optim.grad_scaler import DynamicLossScaler
from megacore.optim.muon import MainWeightMuon
from megacore.parallel.collectives import MAX, all_reduce_
from megacore.pipeline_parallel.partition import WORD_EMBEDDINGS
from megacore.tensor_parallel import partial_gradients


class NativeEngine(Engine):
    """Engine that is based only on torch."""

    def __init__(self, stage: Stage, config: RunConfig, precision: str) -> None:
        """Take this rank's part of a model in fp32 and cast it to the compute type.

        Args:
            stage: stage with its initial weights, on the device to train on. If the replicas divide
                the optimizer, it may have no memory for them (`Stage.stored`): then no rank holds
                the whole model in fp32.
            config: configuration of the run.
            precision: fp32, bf16 or fp16.
        """
        self.precision = precision
        self.device = stage.device
        self._stage = stage
        self._mesh = stage.mesh
        self._clip_grad = config.optim.clip_grad
        shared = stage.shared_parameters
        divides = Sharding.of(
            config.parallel.data_parallel_sharding, stage.mesh.data_context_parallel.size
        ).divides("parameters")
        units = stage.units if divides else []
        self._syncs = [
            build_grad_sync(
                dict(chunk.named_parameters()),
                stage.mesh,
                config.parallel,
                partial=partial_gradients(chunk),
                shared={
                    name: shared[name] for name, _ in chunk.named_parameters() if name in shared
                },
                units=[_names_in(chunk, unit) for unit in units],
                repeated=frozenset({WORD_EMBEDDINGS}),
                add_product=stage.kernels.weight_gradient,
            )
            for chunk in stage.chunks
        ]
        values = self._syncs, config.optim, DTYPES[precision], stage.partitions, stage.kernels
        initial = None if stage.stored else stage.initial_weights
        match config.optim.name:
            case "adam":
                self._optimizer = MainWeightAdamW(*values, initial=initial)
            case "muon":
                self._optimizer = MainWeightMuon(*values, matrices=stage.matrices, initial=initial)
            case unknown:
                assert_never(unknown)
        self._gatherer = _gatherer(units, self._optimizer.divided) if divides else None
        if self._gatherer is not None:
            self._syncs[0].after_backward = self._gatherer.after_backward
        self._scaler = DynamicLossScaler(config.optim.loss_scale) if precision == "fp16" else None
        self._graph = (
            MicroBatchGraph(self._passes, self._mesh, self.device)
            if config.train.cuda_graphs
            else None
        )
        self._losses: list[Tensor] = []
        self._micro_batches = 0
        self.kernels = {
            **stage.kernels.names,
            **({"passes": "CUDA graph"} if self._graph is not None else {}),
            "communication": communication(stage.mesh, self.device),
        }

    @property
    def loss_scale(self) -> float:
        """Factor on the loss before backward; 1 unless the precision is fp16."""
        return self._scaler.scale if self._scaler else 1.0

    def forward_backward(
        self, batches: Iterator[Tensor], seeds: Sequence[int], *, seq_length: int | None = None
    ) -> None:
        """Accumulate the gradient of one global batch: ids [b, width] for each seed."""
        for sync in self._syncs:
            sync.zero()
        self._micro_batches = len(seeds)
        scale = self.loss_scale / len(seeds)
        if self._graph is not None:
            self._losses = self._graph.run(batches, seeds, scale)
        else:
            with self._weights():
                self._losses = self._stage.train_pass(
                    batches, seeds, self._syncs, scale=scale, seq_length=seq_length
                )

    def _passes(self, batch: Tensor, seed: int, scale: Tensor) -> Tensor:
        """Run forward and backward of one micro batch, and return its mean losses [terms].

        Gradients only accumulate; `update` sums them over the replicas.
        """
        (losses,) = self._stage.train_pass(
            iter([batch]), [seed], self._syncs, scale=scale, complete=False
        )
        return losses

    can_withhold = True

    def update(
        self,
        lr: float,
        weight_decay: float,
        *,
        notices: Sequence[bool] = (),
        withhold: Callable[[Sequence[float]], bool] | None = None,
    ) -> Update:
        """Average the gradients over the ranks, clip them, and make one optimizer step.

        A gradient that is not finite leaves the weights unchanged and lowers the loss scale of
        fp16. A withheld update changes nothing. Every rank decides the same, since all have the
        same norm and losses.
        """
        for sync in self._syncs:
            sync.finish()
        with self._mesh.time("optimizer"):
            scale = self.loss_scale
            norm = self._optimizer.grad_norm(scale=scale)
            # One transfer to the host per iteration: a bad gradient must be detected before the
            # weights change.
            names, count = self.loss_names, self._micro_batches
            means = global_means(self._losses, count, len(names), self._mesh, self.device, notices)
            *values, grad_norm = torch.cat([means, norm.view(1)]).tolist()
            reduced, finite = Reduced.of(values, names, len(notices)), math.isfinite(grad_norm)
            withheld = finite and withhold is not None and withhold(reduced.losses)
            if self._scaler and not withheld:
                self._scaler.update(overflow=not finite)
            if finite and not withheld:
                self._optimizer.step(
                    lr, weight_decay, norm=norm, max_norm=self._clip_grad, scale=scale
                )
        fatal = not finite and (self._scaler is None or self._scaler.exhausted)
        return reduced.update(
            grad_norm, applied=finite and not withheld, fatal=fatal, withheld=withheld
        )

    def loss_sum(
        self, batches: Iterator[Tensor], sizes: Sequence[int], totals: LossTotals
    ) -> Tensor:
        """Add the sums of the losses to `totals`, and return them all, without dropout."""
        if self._gatherer is None:
            return self._stage.loss_sum(batches, sizes, totals)
        passes = torch.tensor(len(sizes), device=self.device)
        all_reduce_(passes, self._mesh.data_context_parallel, MAX)
        with self._gatherer.gathered_root():
            total = self._stage.loss_sum(batches, sizes, totals)
            for _ in range(int(passes) - len(sizes)):
                self._gatherer.forward_without_samples()
        return total

    def _weights(self) -> AbstractContextManager[None]:
        """Return a context in which passes may run: divided weights are gathered for them."""
        return self._gatherer.gathered_root() if self._gatherer else nullcontext()

    def tensors(self) -> dict[str, Tensor | TensorShard]:
        """Return this rank's fp32 main weights and moments by name.

        Names: `model.*`, `optimizer.exp_avg.*`, `optimizer.exp_avg_sq.*`; Muon's matrices have
        `optimizer.momentum.*` instead of the last two.
        """
        return self._optimizer.tensors()

    def state(self) -> dict[str, Any]:
        """Return the number of updates and, for fp16, the loss scale."""
        return {
            "optimizer_steps": self._optimizer.steps,
            "loss_scaler": self._scaler.state() if self._scaler else None,
        }

    def load_state(
        self, state: dict[str, Any], tensors: Mapping[str, Tensor | TensorShard]
    ) -> None:
        """Restore `state`; `tensors` are the engine's own tensors, already filled in place."""
        self._optimizer.steps = int(state["optimizer_steps"])
        if self._scaler and state["loss_scaler"] is not None:
            self._scaler.load_state(state["loss_scaler"])
        self._optimizer.write_back()


def _names_in(chunk: nn.Module, unit: nn.Module) -> frozenset[str]:
    """Return the names in a chunk of the parameters of one of its modules."""
    members = {id(parameter) for parameter in unit.parameters()}
    return frozenset(
        name for name, parameter in chunk.named_parameters() if id(parameter) in members
    )


def _gatherer(
    modules: Sequence[nn.Module], weights: Mapping[int, list[FlatWeights]]
) -> WeightGatherer:
    """Return the gatherer of a model's units; a table lookup's gradient needs no weights."""
    units = [
        Unit(module, weights[number], in_backward=not isinstance(module, Embedding))
        for number, module in enumerate(modules)
    ]
    return WeightGatherer(units, Unit(None, weights[len(modules)]))
