"""What is added to attention's scores: masks, and biases that depend on distance.

These are ALiBi's slopes and T5's relative position bias (Raffel et al. 2019, arXiv:1910.10683,
section 2.1).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.parallel.mesh import ParallelGroup
from megacore.tensor_parallel import Partition
from megacore.tensor_parallel.partition import divide

_HEADS_OF_ALIBI = 8.0


def attention_bias(
    *,
    queries: int,
    keys: int,
    causal: bool,
    dtype: torch.dtype,
    device: torch.device,
    documents: Tensor | None = None,
    present: Tensor | None = None,
    window: int | None = None,
    slopes: Tensor | None = None,
    learned: Tensor | None = None,
) -> Tensor | None:
    """The sum of everything that is added to the scores.

    The queries are the last `queries` of the `keys` tokens.

    Attention kernels add it as it is; of a bool mask each layer would make one of its own.

    Args:
        queries: tokens that look.
        keys: tokens that may be seen.
        causal: whether a token sees only itself and those before it.
        dtype: of the result.
        device: of the result.
        documents: [b, keys] numbers of documents; a token sees none but its own.
        present: [b, keys] bool; False is padding, which is not seen by any other token.
        window: how many tokens a token sees, itself included.
        slopes: [n/t] of ALiBi (Press et al. 2021, arXiv:2108.12409): each head loses that much per
            token of distance.
        learned: [1, n/t, queries, keys] of a table that is trained.

    Returns:
        [b or 1, n/t or 1, queries or 1, keys], or None where the kernel's own causal mask, or none,
        suffices.
    """
    if (
        documents is None
        and window is None
        and slopes is None
        and learned is None
        and (present is None or not causal)
    ):
        if causal and 1 < queries < keys:
            return _additive(_sees(queries, keys, causal, window, device), dtype)
        return None if present is None else _additive(present[:, None, None, :], dtype)
    sees = _sees(queries, keys, causal, window, device)
    if documents is not None:
        sees = sees & (documents[:, None, -queries:, None] == documents[:, None, None, :])
    if present is not None:
        # Padding sees itself: a row without anything to see would be NaN.
        itself = torch.eye(keys, dtype=torch.bool, device=device)[-queries:]
        sees = sees & present[:, None, None, :] | itself
    bias = _additive(sees, dtype)
    if slopes is not None:
        # Half precision cannot tell long distances apart: only the products are rounded to it.
        exact = slopes.to(torch.promote_types(dtype, torch.float32))[None, :, None, None]
        bias = bias + (exact * _distances(queries, keys, device)).to(dtype)
    return bias if learned is None else bias + learned.to(dtype)


def alibi_slopes(heads: int) -> Tensor:
    """ALiBi's slopes of all heads, fp32 [n]: powers of 2^(-8/n) (Press et al. 2021).

    Where n is no power of two, those of the power of two below, and then every other one of the
    power above.
    """
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-_HEADS_OF_ALIBI * (head + 1) / whole) for head in range(whole)]
    slopes += [
        2.0 ** (-_HEADS_OF_ALIBI * (2 * head + 1) / (2 * whole)) for head in range(heads - whole)
    ]
    return torch.tensor(slopes)


def _sees(
    queries: int, keys: int, causal: bool, window: int | None, device: torch.device
) -> Tensor:
    """Bool [1, 1, queries, keys]: which token sees which, by distance alone."""
    distances = _distances(queries, keys, device)
    sees = distances <= 0 if causal else torch.ones_like(distances, dtype=torch.bool)
    if window is not None:
        sees = sees & (distances > -window)
    return sees[None, None]


def _distances(queries: int, keys: int, device: torch.device) -> Tensor:
    """[queries, keys]: how far a key is after a query, negative before it."""
    places = torch.arange(keys, device=device)
    return places[None, :] - places[keys - queries :, None]


def _additive(sees: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, -torch.inf)


class RelativeBias(nn.Module):
    """One number per head and bucket of distances, shared by a stack; left uninitialised.

    The table is [buckets, n], of which each rank holds its heads' columns.

    Args:
        buckets: of distances; near ones have one each, far ones share them by the logarithm of
            their distance.
        max_distance: in tokens, from which on all are in the last bucket.
        heads: of the attention.
        bidirectional: whether tokens before and after have buckets of their own (encoder), or only
            those before.
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
        self.weight = nn.Parameter(
            torch.empty(buckets, divide(heads, tp, "model.num_attention_heads"), device=device)
        )

    def forward(self, queries: int, keys: int) -> Tensor:
        """The bias [1, n/t, queries, keys], not in half precision.

        The queries are the last of the keys.

        A bucket's gradient is a sum over up to queries x keys places: in half precision it would
        soon stop growing.
        """
        places = torch.arange(keys, device=self.weight.device)
        distances = places[None, :] - places[keys - queries :, None]
        exact = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        # Contiguous, as scores are: else their sum, and what dropout draws for it, would lie in
        # this order in memory.
        return (
            F.embedding(self._bucket(distances), exact).permute(2, 0, 1).contiguous().unsqueeze(0)
        )

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
        far = (
            (distances.clamp(min=1).float() / exact).log()
            / math.log(self.max_distance / exact)
            * (buckets - exact)
        )
        shared = (exact + far.long()).clamp(max=buckets - 1)
        return first + torch.where(distances < exact, distances, shared)
