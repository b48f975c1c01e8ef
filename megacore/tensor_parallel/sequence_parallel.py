"""Conjugate pairs along the sequence (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).

Between the tensor-parallel regions each rank holds the positions r·s/t … of every sample. Together a gather and a
reduce-scatter move as much as the all-reduce they replace, while norms, dropout and residuals are divided by t. Each
is the identity for a group of one.
"""

from torch import Tensor

from megacore.parallel.mesh import ParallelGroup
from megacore.tensor_parallel.mappings import all_gather_summed, own_part, reduce_scattered

SEQUENCE = 1
"""The dimension of a [b, s, h] activation that is divided."""


def scatter_to_sequence_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Replicated activations to this rank's part: [b, s, h] -> [b, s/t, h], backward all-gather."""
    return own_part(x, tp, SEQUENCE)


def gather_from_sequence_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Parts to the whole that a tensor-parallel region takes: [b, s/t, h] -> [b, s, h], backward reduce-scatter."""
    return all_gather_summed(x, tp, SEQUENCE)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, tp: ParallelGroup) -> Tensor:
    """Partial sums to this rank's part of their total: [b, s, h] -> [b, s/t, h], backward all-gather."""
    return reduce_scattered(x, tp, SEQUENCE)
