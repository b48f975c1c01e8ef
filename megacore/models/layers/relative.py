"""T5's relative position bias (Raffel et al. 2019, arXiv:1910.10683, section 2.1)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.parallel.mesh import ParallelGroup
from megacore.tensor_parallel import Partition
from megacore.tensor_parallel.partition import divide


class RelativeBias(nn.Module):
    """One number per head and bucket of distances, which all layers of a stack share; left uninitialised.

    The table is [buckets, n], of which each rank holds its heads' columns.

    Args:
        buckets: of distances; near ones have one each, far ones share them by the logarithm of their distance.
        max_distance: in tokens, from which on all are in the last bucket.
        heads: of the attention.
        bidirectional: whether tokens before and after have buckets of their own (encoder), or only those before.
        tp: the ranks that share the heads.
        device: where the parameter is.

    Raises:
        ParallelLayoutError: heads cannot be divided over the ranks.
    """

    def __init__(
        self,
        buckets: int,
        max_distance: int,
        heads: int,
        *,
        bidirectional: bool,
        tp: ParallelGroup,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.weight = nn.Parameter(torch.empty(buckets, divide(heads, tp, "model.num_attention_heads"), device=device))

    def forward(self, queries: int, keys: int) -> Tensor:
        """The bias [1, n/t, queries, keys], not in half precision; the queries are the last of the keys.

        A bucket's gradient is a sum over up to queries x keys places: in half precision it would soon stop growing.
        """
        places = torch.arange(keys, device=self.weight.device)
        distances = places[None, :] - places[keys - queries :, None]
        exact = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        # Contiguous, as scores are: else their sum, and what dropout draws for it, would lie in this order in memory.
        return F.embedding(self._bucket(distances), exact).permute(2, 0, 1).contiguous().unsqueeze(0)

    def partitions(self) -> dict[str, Partition]:
        """The table is divided along its columns."""
        return {"weight": Partition(1, self.tp.rank, self.tp.size)}

    def _bucket(self, distances: Tensor) -> Tensor:
        """How far a key is after a query -> the number of its bucket, of the same shape."""
        buckets = self.buckets
        first = torch.zeros_like(distances)
        if self.bidirectional:
            buckets //= 2
            first = (distances > 0) * buckets
            distances = distances.abs()
        else:
            distances = (-distances).clamp(min=0)
        exact = buckets // 2
        far = (distances.clamp(min=1).float() / exact).log() / math.log(self.max_distance / exact) * (buckets - exact)
        shared = (exact + far.long()).clamp(max=buckets - 1)
        return first + torch.where(distances < exact, distances, shared)
