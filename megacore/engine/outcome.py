"""What an iteration came to, told to every rank."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.engine.base import Update
from megacore.parallel.mesh import ProcessMesh


def global_means(
    losses: Sequence[Tensor], micro_batches: int, terms: int, mesh: ProcessMesh, device: torch.device
) -> Tensor:
    """Mean losses of all micro batches of the global batch, fp32, in the order of its samples: [m x dp x terms].

    One small all-reduce brings them from the last pipeline stages to every rank.

    Args:
        losses: of this rank's micro batches, [terms] each; only the last pipeline stage's are looked at.
        micro_batches: of each replica (m).
        terms: losses of each.
        mesh: this process's groups.
        device: where the ranks exchange them.
    """
    replicas = mesh.data_parallel
    means = torch.zeros(micro_batches, replicas.size, terms, device=device)
    if mesh.is_last_stage and mesh.tensor_parallel.rank == 0:
        means[:, replicas.rank] = torch.stack(list(losses))
    if mesh.world_size > 1:
        with mesh.time("world wait"):
            dist.all_reduce(means)
    return means.view(-1)


def update_of(means: Sequence[float], names: Sequence[str], grad_norm: float, *, applied: bool, fatal: bool) -> Update:
    """The outcome of an iteration whose losses are `means`, as `global_means` orders them."""
    rows = [means[first : first + len(names)] for first in range(0, len(means), len(names))]
    terms = {name: sum(term) / len(rows) for name, term in zip(names, zip(*rows, strict=True), strict=True)}
    return Update(tuple(map(sum, rows)), terms, grad_norm, applied, fatal)
