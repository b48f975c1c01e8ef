"""Interface of engines and the code that they share.

An `Update` is the result of an iteration. `global_means` and `Reduced` compute it from the losses
and notices of all ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.checkpoint.shard import TensorShard
from megacore.models.base import LossTotals
from megacore.models.leak_check import check_documents
from megacore.models.stage import Stage
from megacore.parallel.mesh import ProcessMesh


@dataclass(frozen=True)
class Update:
    """Result of one iteration, identical on every rank."""

    losses: tuple[float, ...]
    """Minimized loss of each micro batch of the global batch, in sample order: the sum of its mean
    losses, in nats."""
    terms: Mapping[str, float]
    """Mean of each loss over the global batch, by name; `lm_loss` comes first, in nats per
    token."""
    grad_norm: float
    """Global gradient norm before clipping, unscaled."""
    applied: bool
    """True if the weights were updated; False if the gradient is not finite or the update is
    withheld."""
    fatal: bool = False
    """True if training cannot continue: the gradient is not finite and no lower loss scale can
    help."""
    withheld: bool = False
    """True if the caller withheld the update although the gradient is finite."""
    notices: tuple[bool, ...] = ()
    """True for each notice that at least one rank gave."""

    @property
    def loss(self) -> float:
        """Mean of the minimized loss over the global batch."""
        return sum(self.losses) / len(self.losses)


class Engine(ABC):
    """One model with its optimizer.

    An engine runs forward, backward and the update, and provides the state for a checkpoint.
    """

    device: torch.device
    precision: str
    """Compute type: fp32, bf16 or fp16."""
    kernels: dict[str, str]
    """Name of the implementation of each operation."""
    can_withhold: ClassVar[bool]
    """True if `update` can leave the weights unchanged at the caller's request."""
    _stage: Stage
    """This rank's part of the model."""

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
        """True if this rank needs the samples; middle pipeline stages need them only for masks."""
        return self._stage.reads_tokens

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Names of the losses whose sum is minimized, `lm_loss` first."""
        return self._stage.loss_names

    @property
    def label_length(self) -> int:
        """Number of labels of a sample; for T5, of the decoder."""
        return self._stage.label_length

    def check_documents(self, length: int) -> str:
        """Check that no document of `length` tokens sees another one; return a line for the log.

        See `megacore.models.leak_check`.

        Raises:
            LeakError: one does.
        """
        return check_documents(self._stage.chunks, length, self._stage.device)

    @property
    @abstractmethod
    def loss_scale(self) -> float:
        """Factor on the loss before backward; 1 unless the precision is fp16."""

    @abstractmethod
    def forward_backward(
        self, batches: Iterator[Tensor], seeds: Sequence[int], *, seq_length: int | None = None
    ) -> None:
        """Accumulate the gradient of one global batch.

        Args:
            batches: ids [b, width] on the engine's device for each of this rank's micro batches; -1
                is padding.
            seeds: dropout seed of each micro batch; their number is the number of micro batches.
            seq_length: tokens of each sequence, into which the batches are already cut; None means
                data.seq_length.
        """

    @abstractmethod
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
            weight_decay: weight decay of the decayed weights.
            notices: this rank's notices to all ranks, sent along with the losses. Their number is
                the same on every rank.
            withhold: function that receives `Update.losses` before any weight is changed, and
                returns True to leave the weights unchanged. It must return the same on every rank.
                An engine that cannot withhold accepts only None.
        """

    @abstractmethod
    def loss_sum(
        self, batches: Iterator[Tensor], sizes: Sequence[int], totals: LossTotals
    ) -> Tensor:
        """Add the sums of the losses to `totals`, and return them all, without dropout.

        Args:
            batches: ids [b, width] on the engine's device for each of this rank's micro batches.
            sizes: b of each micro batch.
            totals: sums of earlier micro batches.

        Returns:
            fp64 [terms + POSITION_BUCKETS + sources, 2], see `LossTotals`; the losses are in the
                order of `loss_names`. Only the last pipeline stage adds anything.
        """

    @abstractmethod
    def tensors(self) -> dict[str, Tensor | TensorShard]:
        """Return all tensors of a checkpoint under their global names. Collective."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the rest of the state for a checkpoint, as JSON."""

    @abstractmethod
    def load_state(
        self, state: dict[str, Any], tensors: Mapping[str, Tensor | TensorShard]
    ) -> None:
        """Restore the state of a checkpoint. Collective.

        Args:
            state: return value of `state` when the checkpoint was written.
            tensors: current return value of `tensors`, or a part of it, filled in place with the
                values of the checkpoint.
        """


def communication(mesh: ProcessMesh, device: torch.device) -> str:
    """Return the back end through which the ranks communicate: none, nccl or gloo."""
    if mesh.world_size == 1:
        return "none"
    return "nccl" if device.type == "cuda" else "gloo"


def global_means(
    losses: Sequence[Tensor],
    micro_batches: int,
    terms: int,
    mesh: ProcessMesh,
    device: torch.device,
    notices: Sequence[bool] = (),
) -> Tensor:
    """Return the mean losses of all micro batches and the number of ranks that gave each notice.

    The result is fp32 [m x dp x terms + notices], with the losses in the order of the global
    batch's samples. One small all-reduce sends them from the last pipeline stages to every rank.

    Args:
        losses: losses [terms] of each of this rank's micro batches; used only on the last pipeline
            stage.
        micro_batches: number of micro batches of each replica (m).
        terms: number of losses of each micro batch.
        mesh: this process's groups.
        device: device on which the ranks exchange the losses.
        notices: this rank's notices to all ranks.
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
    """Result of `global_means`, on the host."""

    losses: tuple[float, ...]
    """Loss of each micro batch, summed over its terms."""
    terms: dict[str, float]
    """Means over the global batch, by name."""
    notices: tuple[bool, ...]
    """True for each notice that at least one rank gave."""

    @classmethod
    def of(cls, values: Sequence[float], names: Sequence[str], notices: int) -> Self:
        """Parse the values of `global_means` for these losses and this number of notices."""
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
        """Return the result of the iteration."""
        return Update(self.losses, self.terms, grad_norm, applied, fatal, withheld, self.notices)
