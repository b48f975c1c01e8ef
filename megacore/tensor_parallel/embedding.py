"""A table of embeddings divided by vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.parallel.mesh import ALONE, ParallelGroup
from megacore.tensor_parallel.mappings import reduce_from_tensor_parallel_region
from megacore.tensor_parallel.partition import Partition, divide


class VocabParallelEmbedding(nn.Module):
    """Rows of a [v, h] table, of which each rank holds v / t consecutive ones; left uninitialised.

    Args:
        num_embeddings: rows of the whole table (v).
        embedding_dim: width of a row (h).
        tp: the ranks that share the table; a group of one makes it `torch.nn.Embedding`.
        device: where the parameter is.

    Raises:
        ParallelLayoutError: num_embeddings is not a multiple of t.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, tp: ParallelGroup = ALONE, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.tp = tp
        local = divide(num_embeddings, tp, "the padded vocabulary of")
        self.weight = nn.Parameter(torch.empty(local, embedding_dim, device=device))

    def forward(self, ids: Tensor) -> Tensor:
        """[b, s] ids -> [b, s, h]."""
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        rows = self.weight.shape[0]
        local = ids - self.tp.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return reduce_from_tensor_parallel_region(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tp)

    def partitions(self) -> dict[str, Partition]:
        """The table is divided along its rows."""
        return {"weight": Partition(0, self.tp.rank, self.tp.size)}
