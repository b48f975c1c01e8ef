"""Masks and biases of attention scores: documents, padding, ALiBi, T5's relative positions.

For the latter see Raffel et al. 2019, arXiv:1910.10683, section 2.1.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacore.kernels.implementation import MaskForm
from megacore.kernels.spans import Spans
from megacore.parallel.mesh import ParallelGroup
from megacore.tensor_parallel import Partition
from megacore.tensor_parallel.partition import divide

_HEADS_OF_ALIBI = 8.0


def attention_mask(
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
    form: MaskForm = "dense",
    softcapped: bool = False,
) -> tuple[Tensor | None, Spans | None]:
    """Return the attention bias, or its spans if there is only a mask.

    The queries are the last `queries` of the `keys` tokens. A mask as a bias is additive because
    kernels add it unchanged; from a bool mask each layer would build its own additive one.

    Args:
        queries: number of query tokens.
        keys: number of key tokens.
        causal: a token sees only itself and previous tokens.
        dtype: type of the result.
        device: device of the result.
        documents: document numbers [b, keys]; a token sees only its own document.
        present: bool mask [b, keys]; False is padding, which no other token sees.
        window: number of tokens that a token sees, including itself.
        slopes: ALiBi's slopes [n/t] (Press et al. 2021, arXiv:2108.12409): the decrease of a head's
            scores per token of distance.
        learned: learned bias [1, n/t, queries, keys].
        form: form of masks that the kernel takes.
        softcapped: True if the scores have a soft cap, for which no kernel has its own causal mask.

    Returns:
        The bias [b or 1, n/t or 1, queries or 1, keys] or the spans; neither if the kernel's own
        causal mask, or no mask, suffices.
    """
    causal = causal and queries > 1  # a single query is at the end, and sees all keys
    rules: dict[str, Any] = {"documents": documents, "present": present, "window": window}
    masked = any(rule is not None for rule in rules.values())
    if form == "blocks" and learned is None:
        partial = causal and (queries < keys or softcapped)
        if not (masked or partial or slopes is not None):
            return None, None
        spans = Spans.of(queries, keys, causal=causal, device=device, **rules)
        return None, spans.blocked(queries, keys, slopes)
    if slopes is None and learned is None:
        partial = causal and queries < keys
        if not (masked or partial):
            return None, None
        if form != "dense":
            return None, Spans.of(queries, keys, causal=causal, device=device, **rules)
        if documents is None and window is None and present is not None and not causal:
            return _additive(present[:, None, None, :], dtype), None
    sees = _sees(queries, keys, causal, window, device)
    if documents is not None:
        sees = sees & (documents[:, None, -queries:, None] == documents[:, None, None, :])
    if present is not None:
        # Padding sees itself: the softmax of a row with only -inf would be NaN.
        diagonal = torch.eye(keys, dtype=torch.bool, device=device)[-queries:]
        sees = sees & present[:, None, None, :] | diagonal
    bias = _additive(sees, dtype)
    if slopes is not None:
        # Half precision cannot distinguish long distances, so only the products are rounded to it.
        exact = slopes.to(torch.promote_types(dtype, torch.float32))[None, :, None, None]
        bias = bias + (exact * _distances(queries, keys, device)).to(dtype)
    return (bias if learned is None else bias + learned.to(dtype)), None


def alibi_slopes(heads: int) -> Tensor:
    """Return ALiBi's slopes of all heads, fp32 [n]: powers of 2^(-8/n) (Press et al. 2021).

    If n is not a power of two, they are the slopes of the power of two below, followed by every
    other slope of the power above.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-_HEADS_OF_ALIBI * (head + 1) / power) for head in range(power)]
    slopes += [
        2.0 ** (-_HEADS_OF_ALIBI * (2 * head + 1) / (2 * power)) for head in range(heads - power)
    ]
    return torch.tensor(slopes, dtype=torch.float32)


def _sees(
    queries: int, keys: int, causal: bool, window: int | None, device: torch.device
) -> Tensor:
    """Return a bool mask [1, 1, queries, keys] of the keys each query sees, by distance only."""
    distances = _distances(queries, keys, device)
    sees = distances <= 0 if causal else torch.ones_like(distances, dtype=torch.bool)
    if window is not None:
        sees = sees & (distances > -window)
    return sees[None, None]


def _distances(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return key position minus query position [queries, keys]; negative for previous keys."""
    places = torch.arange(keys, device=device)
    return places[None, :] - places[keys - queries :, None]


def _additive(sees: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, -torch.inf)


class RelativeBias(nn.Module):
    """T5's relative position bias: one number per head and bucket of distances, left uninitialized.

    A stack's layers share it. The table is [buckets, n]; each rank has the columns of its heads.

    Args:
        buckets: number of buckets; near distances have one each, far ones share them by the
            logarithm of the distance.
        max_distance: distance in tokens from which on all fall into the last bucket.
        heads: number of attention heads.
        bidirectional: use separate buckets for following and previous tokens (encoder), otherwise
            only buckets for previous ones.
        tp: ranks that share the heads.
        device: device of the parameter.

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
        """Return the bias [1, n/t, queries, keys] in fp32 or higher precision.

        The queries are the last `queries` of the `keys` tokens. The gradient of a bucket is a sum
        of up to queries x keys values, which would soon stop growing in half precision.
        """
        distances = _distances(queries, keys, self.weight.device)
        exact = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        # Contiguous like the scores: otherwise their sum, and the dropout drawn for it, would have
        # this memory order.
        return (
            F.embedding(self._bucket(distances), exact).permute(2, 0, 1).contiguous().unsqueeze(0)
        )

    def partitions(self) -> dict[str, Partition]:
        """Return the table's partition: it is divided by columns."""
        return {"weight": Partition(1, self.tp.rank, self.tp.size)}

    def _bucket(self, distances: Tensor) -> Tensor:
        """Return the bucket number of each distance from query to key, of the same shape."""
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
