"""Division of every sequence over the ranks of a context-parallel group.

A causal mask gives the last tokens more keys than the first ones. So a sequence is cut into 2 cp
chunks of equal length, and rank r has the chunks r and 2 cp - 1 - r: every rank then computes the
same number of scores (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megacore.kernels.dropout import SequencePart
from megacore.parallel.mesh import SINGLE_RANK, ParallelGroup


def positions_of_rank(length: int, cp: ParallelGroup, device: torch.device) -> Tensor:
    """Return the positions [s/cp] of this rank's tokens in a sequence of `length` tokens (s)."""
    chunks = chunks_of_rank(length, cp)
    return torch.cat([torch.arange(each.start, each.stop, device=device) for each in chunks])


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


def dropout_part(
    tokens: int, cp: ParallelGroup, sequence_parallel: ParallelGroup = SINGLE_RANK
) -> tuple[int, SequencePart | None]:
    """Return whose dropout this rank's tokens have without context parallelism.

    With sequence parallelism each tensor-parallel rank draws the numbers of its s/t consecutive
    tokens. With both, rank j of t has an equal part of one of the two chunks (t is even), which
    lies within the tokens that one rank has without context parallelism.

    Args:
        tokens: tokens of a sequence on this rank, s/cp or s/(cp t).
        cp: ranks that divide the sequences.
        sequence_parallel: ranks that divide the tokens further.

    Returns:
        The tensor-parallel rank that draws, and the part of its tokens; None if it is the whole.
    """
    divided = sequence_parallel.size
    if cp.size == 1:
        return sequence_parallel.rank, None
    length = tokens * cp.size * divided
    chunks = chunks_of_rank(length, cp)
    if divided == 1:
        return 0, SequencePart(length, tuple((each.start, each.stop) for each in chunks))
    assert divided % 2 == 0, "a part of an odd number of ranks is in two chunks"
    index, within = divmod(sequence_parallel.rank, divided // 2)
    rank, start = divmod(chunks[index].start + within * tokens, length // divided)
    return rank, SequencePart(length // divided, ((start, start + tokens),))


def in_order(parts: Tensor) -> Tensor:
    """Join the ranks' parts [cp, ..., s/cp, d] to whole sequences [..., s, d]."""
    halves = [part.chunk(2, -2) for part in parts.unbind(0)]
    chunks = [first for first, _ in halves] + [second for _, second in reversed(halves)]
    return torch.cat(chunks, -2)


def into_parts(sequences: Sequence[Tensor], cp: ParallelGroup) -> Tensor:
    """Stack whole sequences [..., s, d] by the ranks that have them: [cp, n, ..., s/cp, d]."""
    *outer, length, size = sequences[0].shape
    parts = sequences[0].new_empty(cp.size, len(sequences), *outer, length // cp.size, size)
    for number, whole in enumerate(sequences):
        chunks = whole.chunk(2 * cp.size, -2)
        for rank in range(cp.size):
            torch.cat([chunks[rank], chunks[-1 - rank]], -2, out=parts[rank, number])
    return parts
