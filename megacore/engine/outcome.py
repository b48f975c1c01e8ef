"""What an iteration came to, told to every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.engine.base import Update
from megacore.parallel.mesh import ProcessMesh


def global_means(
    losses: Sequence[Tensor],
    micro_batches: int,
    terms: int,
    mesh: ProcessMesh,
    device: torch.device,
    notices: Sequence[bool] = (),
) -> Tensor:
    """Mean losses of all micro batches, and how many ranks gave each notice, fp32: [m x dp x terms + notices].

    The losses are in the order of the global batch's samples. One small all-reduce brings them from the last pipeline
    stages to every rank.

    Args:
        losses: of this rank's micro batches, [terms] each; only the last pipeline stage's are looked at.
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
        reduced[:count].view(micro_batches, replicas.size, terms)[:, replicas.rank] = torch.stack(list(losses))
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
        """Take apart what `global_means` returned for losses of these names and this many notices."""
        count = len(values) - notices
        rows = [values[first : first + len(names)] for first in range(0, count, len(names))]
        terms = {name: sum(term) / len(rows) for name, term in zip(names, zip(*rows, strict=True), strict=True)}
        return cls(tuple(map(sum, rows)), terms, tuple(value > 0 for value in values[count:]))

    def update(self, grad_norm: float, *, applied: bool, fatal: bool, withheld: bool = False) -> Update:
        """The outcome of the iteration."""
        return Update(self.losses, self.terms, grad_norm, applied, fatal, withheld, self.notices)
