"""Layers divided over ranks (Shoeybi et al. 2019, arXiv:1909.08053).

In a group of one rank they are the serial layers.
"""

from megacore.tensor_parallel.cross_entropy import linear_cross_entropy
from megacore.tensor_parallel.embedding import VocabParallelEmbedding
from megacore.tensor_parallel.linear import (
    ColumnParallelLinear,
    GradSink,
    RowParallelLinear,
    column_parallel,
)
from megacore.tensor_parallel.partition import Partition, partial_gradients, partitions

__all__ = [
    "ColumnParallelLinear",
    "GradSink",
    "Partition",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "column_parallel",
    "linear_cross_entropy",
    "partial_gradients",
    "partitions",
]
