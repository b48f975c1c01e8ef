"""Embedding table divided by vocabulary."""

from typing import Any

import torch
from torch import Tensor, nn

from megacore.parallel.mesh import SINGLE_RANK, ParallelGroup
from megacore.tensor_parallel.linear import lookup_gradient, sink_of
from megacore.tensor_parallel.mappings import (
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megacore.tensor_parallel.partition import Partition, divide


class VocabParallelEmbedding(nn.Module):
    """Embedding table [v, h] of which each rank has v / t consecutive rows; not initialized.

    Args:
        num_embeddings: rows of the whole table (v).
        embedding_dim: width of a row (h).
        tp: the ranks that share the table; with one rank this is `torch.nn.Embedding`.
        sequence_parallel: True if the output is this rank's part of the sequence.
        device: device of the parameter.

    Raises:
        ParallelLayoutError: num_embeddings is not a multiple of t.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        tp: ParallelGroup = SINGLE_RANK,
        sequence_parallel: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        local = divide(num_embeddings, tp, "the padded vocabulary of")
        self.weight = nn.Parameter(torch.empty(local, embedding_dim, device=device))

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids [b, s]; return [b, s, h], or [b, s/t, h] with sequence parallelism."""
        rows: Tensor = _Lookup.apply(self.weight, ids, self.tp)  # type: ignore[no-untyped-call]
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(rows, self.tp)
        return reduce_from_tensor_parallel_region(rows, self.tp)

    def partitions(self) -> dict[str, Partition]:
        """Return the division of the table along its rows."""
        return {"weight": Partition(0, self.tp.rank, self.tp.size)}


class _Lookup(torch.autograd.Function):
    """Autograd function that looks up this rank's rows, with zeros for the others."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, tp: ParallelGroup) -> Tensor:
        ctx.sink = sink_of(weight)
        local, elsewhere = ids, None
        if tp.size > 1:
            local = ids - tp.rank * weight.shape[0]
            elsewhere = (local < 0) | (local >= weight.shape[0])
            local.masked_fill_(elsewhere, 0)
        ctx.save_for_backward(weight, local, elsewhere)
        # Write into a tensor that is not a view, so that the caller may change it in place.
        rows = weight.new_empty(*ids.shape, weight.shape[1])
        torch.index_select(weight, 0, local.flatten(), out=rows.view(-1, weight.shape[1]))
        return rows if elsewhere is None else rows.masked_fill_(elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        weight, local, elsewhere = ctx.saved_tensors
        dy = grads[0] if elsewhere is None else grads[0].masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return (
            lookup_gradient(ctx.sink, weight, local.flatten(), dy.reshape(-1, dy.shape[-1])),
            None,
            None,
        )
