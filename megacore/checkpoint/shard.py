"""Part of a tensor on one rank.

A rank's part under tensor parallelism is one rectangle of the complete tensor. A flat range of such
a part, under a distributed optimizer, is a few rectangles. A checkpoint contains only rectangles of
complete tensors, so that any layout can read what any other wrote.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.tensor_parallel.partition import Partition


@dataclass(frozen=True, eq=False)
class TensorShard:
    """Rectangles of a complete tensor; the tensors in it are read and filled in place."""

    shape: torch.Size
    """Shape of the complete tensor."""
    dtype: torch.dtype
    """Type of the complete tensor."""
    pieces: Mapping[torch.Size, Tensor]
    """Rectangles on this rank by the position of their first element in the complete tensor."""

    @classmethod
    def of_runs(
        cls,
        runs: Sequence[tuple[int, Tensor]],
        shape: Sequence[int],
        dtype: torch.dtype,
        partition: Partition | None = None,
    ) -> "TensorShard":
        """Build the shard of contiguous element runs of a tensor-parallel part.

        Args:
            runs: for each run, the number of its first element in the flattened part, and its
                elements in order.
            shape: shape of the part.
            dtype: type of the elements.
            partition: position of the part in the complete tensor; None if it is all of it.
        """
        corner = [0] * len(shape)
        if partition is not None:
            corner[partition.dim] = partition.rank * shape[partition.dim]
        pieces = {}
        for start, run in runs:
            position = 0
            for offsets, sizes in rectangles(start, start + run.numel(), shape):
                length = math.prod(sizes)
                corner_offset = torch.Size(
                    offset + first for offset, first in zip(offsets, corner, strict=True)
                )
                pieces[corner_offset] = run.view(-1)[position : position + length].view(sizes)
                position += length
        global_shape = tuple(shape) if partition is None else partition.global_shape(tuple(shape))
        return cls(torch.Size(global_shape), dtype, pieces)


@dataclass(frozen=True, eq=False)
class DeferredTensor:
    """Complete tensor that is read only when it is written; a save holds one at a time."""

    shape: torch.Size
    """Shape of the tensor."""
    dtype: torch.dtype
    """Type of the tensor."""
    read: Callable[[], Tensor]
    """Function that reads the tensor. A save calls it once."""


def part_of_rank(weight: Tensor, partition: Partition | None) -> Tensor | TensorShard:
    """Return a rank's weight in the form that a checkpoint takes; None if it is not divided."""
    if partition is None:
        return weight
    return TensorShard.of_runs([(0, weight)], weight.shape, weight.dtype, partition)


Tensors = Mapping[str, Tensor | TensorShard]
"""Tensors of a rank by global name."""
SavedTensors = Mapping[str, Tensor | TensorShard | DeferredTensor]
"""Tensors of a rank to save, by global name."""


def pieces_of(tensor: Tensor | TensorShard) -> Mapping[torch.Size, Tensor]:
    """Return the rectangles on this rank, by the position of their first element."""
    return (
        tensor.pieces
        if isinstance(tensor, TensorShard)
        else {torch.Size([0] * tensor.dim()): tensor}
    )


def rectangles(
    start: int, stop: int, shape: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield offsets and sizes of the rectangles of elements start..stop in row-major order.

    The rectangles are contiguous and in the order of their elements; there are at most 2 x
    dimensions - 1 of them.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield [start] * len(shape), [stop - start] * len(shape)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # all within one row
        yield from _within(last, start - last * row, stop - last * row, shape)
        return
    yield from _within(first - 1, start - (first - 1) * row, row, shape) if start % row else ()
    if first < last:
        yield [first, *[0] * (len(shape) - 1)], [last - first, *shape[1:]]
    yield from _within(last, 0, stop - last * row, shape)


def _within(
    row: int, start: int, stop: int, shape: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the rectangles of elements start..stop of one row."""
    for offsets, sizes in rectangles(start, stop, shape[1:]):
        yield [row, *offsets], [1, *sizes]


Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""First element and lengths of a rectangle in a tensor."""


def tile(parts: Sequence[Rectangle], shape: Sequence[int]) -> bool:
    """Return True if rectangles within one of this shape hold each of its elements exactly once."""
    if sum(math.prod(sizes) for _, sizes in parts) != math.prod(shape):
        return False
    return not any(
        all(max(a, b) < min(a + m, b + n) for a, m, b, n in zip(*first, *second, strict=True))
        for index, first in enumerate(parts)
        for second in parts[:index]
    )
