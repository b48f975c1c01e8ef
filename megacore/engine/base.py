"""What the training loop asks of an engine, and what all engines share.

An `Update` says what an iteration came to; `Reduced` and `global_means` make it from what the ranks
tell one another; `StageEngine` answers what concerns the stage.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.checkpoint.shard import TensorShard
from megacore.models.stage import Stage
from megacore.parallel.mesh import ProcessMesh


@dataclass(frozen=True)
class Update:
    """Outcome of one iteration, the same on every rank."""

    losses: tuple[float, ...]
    """What was minimised of each micro batch of the global batch, in the order of its samples: the
    sum of its mean losses, in nats."""
    terms: Mapping[str, float]
    """Mean over the global batch of each of these losses, by name; `lm_loss` first, in nats per
    token."""
    grad_norm: float
    """Global gradient norm before clipping, unscaled."""
    applied: bool
    """Whether the weights were updated: a gradient that is not finite leaves them alone."""
    fatal: bool = False
    """Whether going on cannot help: the gradient is not finite and no lower loss scale is left to
    try."""
    withheld: bool = False
    """Whether the weights were left alone because the caller asked for it, though the gradient is
    finite."""
    notices: tuple[bool, ...] = ()
    """Of each notice whether any rank gave it."""

    @property
    def loss(self) -> float:
        """Mean of what was minimised over the global batch."""
        return sum(self.losses) / len(self.losses)


class Engine(Protocol):
    """One model with its optimizer.

    Forward, backward, update, and the state that a checkpoint holds.
    """

    device: torch.device
    precision: str
    """Compute type: fp32, bf16 or fp16."""
    kernels: dict[str, str]
    """Which implementation each operation runs on."""

    @property
    def parameters(self) -> int:
        """Number of the whole model's parameters."""
        ...

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        ...

    @property
    def loss_scale(self) -> float:
        """Factor on the loss before backward."""
        ...

    @property
    def reads_tokens(self) -> bool:
        """Whether this rank needs the samples: pipeline stages in between do for masks alone."""
        ...

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names of the losses whose sum is minimised, `lm_loss` first."""
        ...

    def forward_backward(self, batches: Iterator[Tensor], seeds: Sequence[int]) -> None:
        """Accumulate the gradient of one global batch.

        Args:
            batches: ids on the engine's device, [b, width], of each of this rank's micro batches;
                -1 is padding.
            seeds: of the dropout of each micro batch; their number is the number of micro batches.
        """
        ...

    @property
    def can_withhold(self) -> bool:
        """Whether `update` asks before it touches the weights."""
        ...

    def update(
        self,
        lr: float,
        weight_decay: float,
        *,
        notices: Sequence[bool] = (),
        withhold: Callable[[Sequence[float]], bool] | None = None,
    ) -> Update:
        """Average the gradients over the ranks, clip them, and make one optimizer step.

        Args:
            lr: learning rate.
            weight_decay: of the decayed weights.
            notices: what this rank has to say to all; it travels with the losses. As many on every
                rank.
            withhold: gets `Update.losses`, before any weight is changed, and says whether to leave
                them alone; it must say the same on every rank. An engine that cannot withhold
                refuses one.
        """
        ...

    def loss_sum(self, batches: Iterator[Tensor], sizes: Sequence[int]) -> Tensor:
        """Of each loss the sum over all that counts, and its number, without dropout or gradients.

        Args:
            batches: ids on the engine's device, [b, width], of each of this rank's micro batches.
            sizes: b of each of them.

        Returns:
            fp64 [terms, 2], in the order of `loss_names`; zeros on all pipeline stages but the
            last.
        """
        ...

    def tensors(self) -> dict[str, Tensor | TensorShard]:
        """Everything that a checkpoint holds as tensors, under its global name. Collective."""
        ...

    def state(self) -> dict[str, Any]:
        """Everything else that a checkpoint holds, as JSON."""
        ...

    def load_state(
        self, state: dict[str, Any], tensors: Mapping[str, Tensor | TensorShard]
    ) -> None:
        """Continue from a checkpoint. Collective.

        Args:
            state: what `state` returned when it was written.
            tensors: what `tensors` returned now, or a part of it, filled in place with what was
                written.
        """
        ...


def global_means(
    losses: Sequence[Tensor],
    micro_batches: int,
    terms: int,
    mesh: ProcessMesh,
    device: torch.device,
    notices: Sequence[bool] = (),
) -> Tensor:
    """Mean losses of all micro batches, and how many ranks gave each notice.

    fp32: [m x dp x terms + notices].

    The losses are in the order of the global batch's samples. One small all-reduce brings them from
    the last pipeline stages to every rank.

    Args:
        losses: of this rank's micro batches, [terms] each; only the last pipeline stage's are
            looked at.
        micro_batches: of each replica (m).
        terms: losses of each.
        mesh: this process's groups.
        device: where the ranks exchange them.
        notices: what this rank has to say to all.
    """
    replicas = mesh.data_parallel
    count = micro_batches * replicas.size * terms
    reduced = torch.zeros(count + len(notices), device=device)
    if mesh.is_last_stage and mesh.tensor_parallel.rank == 0:
        reduced[:count].view(micro_batches, replicas.size, terms)[:, replicas.rank] = torch.stack(
            list(losses)
        )
    if any(notices):
        reduced[count:] = torch.tensor(notices, dtype=reduced.dtype)
    if mesh.world_size > 1:
        with mesh.time("world wait"):
            dist.all_reduce(reduced)
    return reduced


@dataclass(frozen=True)
class Reduced:
    """What `global_means` brought, on the host."""

    losses: tuple[float, ...]
    """Of each micro batch, summed over its terms."""
    terms: dict[str, float]
    """Means over the global batch, by name."""
    notices: tuple[bool, ...]
    """Of each notice whether any rank gave it."""

    @classmethod
    def of(cls, values: Sequence[float], names: Sequence[str], notices: int) -> Self:
        """Take apart what `global_means` returned for these losses and this many notices."""
        count = len(values) - notices
        rows = [values[first : first + len(names)] for first in range(0, count, len(names))]
        terms = {
            name: sum(term) / len(rows)
            for name, term in zip(names, zip(*rows, strict=True), strict=True)
        }
        return cls(tuple(map(sum, rows)), terms, tuple(value > 0 for value in values[count:]))

    def update(
        self, grad_norm: float, *, applied: bool, fatal: bool, withheld: bool = False
    ) -> Update:
        """The outcome of the iteration."""
        return Update(self.losses, self.terms, grad_norm, applied, fatal, withheld, self.notices)


class StageEngine:
    """The part of `megacore.engine.base.Engine` that is the stage's to answer."""

    _stage: Stage

    @property
    def parameters(self) -> int:
        """Number of the whole model's parameters."""
        return self._stage.parameter_count

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding."""
        return self._stage.padded_vocab_size

    @property
    def reads_tokens(self) -> bool:
        """Whether this rank needs the samples: pipeline stages in between do for masks alone."""
        return self._stage.reads_tokens

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names of the losses whose sum is minimised, `lm_loss` first."""
        return self._stage.loss_names
