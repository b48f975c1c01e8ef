"""Rule by which CPU ranks of one host sum gradients in shared memory, for the mesh and the planner.

Tensor and context parallelism use shared memory in groups of any size.
"""

GRADIENT_PIECE = 4 << 20
"""Bytes of gradients that are summed at a time."""
_MOST_RANKS = 4
"""Largest group that sums in shared memory. Each rank reads the gradients of all others; a ring, as
gloo's, moves less with more ranks."""


def sums_in_memory(ranks: int, *, sharded: bool = False) -> bool:
    """Return True if a group of CPU ranks on one host sums its gradients in shared memory.

    Args:
        ranks: number of ranks of the group.
        sharded: True for a distributed optimizer, whose ranks send each other parts of the
            gradients and weights instead.
    """
    return not sharded and ranks <= _MOST_RANKS
