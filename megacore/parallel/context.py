"""Division of every sequence over the ranks of a context-parallel group.

A causal mask gives the last tokens more keys than the first ones. So a sequence is cut into 2 cp
chunks of equal length, and rank r has the chunks r and 2 cp - 1 - r: every rank then computes the
same number of scores (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2).
"""

import torch
from torch import Tensor

from megacore.parallel.mesh import ParallelGroup


def positions_of_rank(length: int, cp: ParallelGroup, device: torch.device) -> Tensor:
    """Return the positions [s/cp] of this rank's tokens in a sequence of `length` tokens (s)."""
    first, second = chunks_of_rank(length, cp)
    return torch.cat(
        [torch.arange(each.start, each.stop, device=device) for each in (first, second)]
    )


def chunks_of_rank(length: int, cp: ParallelGroup) -> tuple[range, range]:
    """Return the positions of this rank's two chunks of a sequence of `length` tokens."""
    assert length % (2 * cp.size) == 0, f"{length} tokens are not {2 * cp.size} equal chunks"
    size = length // (2 * cp.size)
    first, second = cp.rank * size, (2 * cp.size - 1 - cp.rank) * size
    return range(first, first + size), range(second, second + size)


def part_of_rank(x: Tensor, cp: ParallelGroup) -> Tensor:
    """Return this rank's part of `x`: [b, s] to [b, s/cp]; `x` itself without division."""
    if cp.size == 1:
        return x
    return torch.cat([x[:, each.start : each.stop] for each in chunks_of_rank(x.shape[1], cp)], 1)


def in_order(parts: Tensor) -> Tensor:
    """Join the ranks' parts [cp, ..., s/cp, d] to whole sequences [..., s, d]."""
    *outer, length, size = parts.shape
    chunks = parts.view(*outer, 2, length // 2, size).movedim(0, -3)  # [..., 2, cp, s/(2 cp), d]
    first, second = chunks.unbind(-4)
    return torch.cat([first, second.flip(-3)], -3).flatten(-3, -2)
