"""The part of a tensor that one rank holds, and how torch.distributed.checkpoint plans to write it.

A rank's part under tensor parallelism is one rectangle of the whole; a flat range of such a part,
which a rank holds under a distributed optimizer, is a few. The checkpoint knows rectangles of whole
tensors alone, so that any layout can read what any other wrote.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megacore.tensor_parallel.partition import Partition


@dataclass(frozen=True, eq=False)
class TensorShard:
    """Some rectangles of a whole tensor; the tensors in it are read and filled in place."""

    shape: torch.Size
    """Shape of the whole tensor."""
    dtype: torch.dtype
    """Type of the whole tensor."""
    pieces: Mapping[torch.Size, Tensor]
    """Rectangles by the position of their first element in the whole, if this rank holds any."""

    @classmethod
    def of_runs(
        cls,
        runs: Sequence[tuple[int, Tensor]],
        shape: Sequence[int],
        dtype: torch.dtype,
        partition: Partition | None = None,
    ) -> "TensorShard":
        """Make the shard of contiguous runs of the elements of a tensor-parallel part.

        Args:
            runs: for each, its first element's number in the flattened part, and its elements in
                order.
            shape: of the part.
            dtype: of the elements.
            partition: which part of the whole tensor it is; None when it is all of it.
        """
        corner = [0] * len(shape)
        if partition is not None:
            corner[partition.dim] = partition.rank * shape[partition.dim]
        pieces = {}
        for start, run in runs:
            position = 0
            for offsets, sizes in rectangles(start, start + run.numel(), shape):
                length = math.prod(sizes)
                place = torch.Size(
                    offset + first for offset, first in zip(offsets, corner, strict=True)
                )
                pieces[place] = run.view(-1)[position : position + length].view(sizes)
                position += length
        whole = tuple(shape) if partition is None else partition.global_shape(tuple(shape))
        return cls(torch.Size(whole), dtype, pieces)


Tensors = Mapping[str, Tensor | TensorShard]
"""What a rank holds, by global name."""


def pieces_of(tensor: Tensor | TensorShard) -> Mapping[torch.Size, Tensor]:
    """Return the rectangles that a rank holds, by the position of their first element."""
    return (
        tensor.pieces
        if isinstance(tensor, TensorShard)
        else {torch.Size([0] * tensor.dim()): tensor}
    )


def chunks_of(tensor: Tensor | TensorShard) -> list[ChunkStorageMetadata]:
    """Return the rectangles' positions and sizes, as torch plans with them."""
    return [
        ChunkStorageMetadata(offsets, piece.size()) for offsets, piece in pieces_of(tensor).items()
    ]


def rectangles(
    start: int, stop: int, shape: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield offsets and sizes of the rectangles of elements start..stop in row-major order.

    They come in the order of their elements, each contiguous: at most 2 x dimensions - 1 of them.
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


class ShardSavePlanner(DefaultSavePlanner):
    """Torch's planner for tensors and the rectangles of TensorShards.

    It is given the tensors, and `save` an empty dictionary: torch makes a log record of 0.1 ms for
    each entry of that.
    """

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self._tensors = tensors

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the tensors of this planner."""
        self.state_dict = dict(self._tensors)
        self.mappings = {name: (name,) for name in self._tensors}
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Plan to write all that a rank holds; of what several hold, the global plan keeps one."""
        items = [
            item for name, tensor in self._tensors.items() for item in _write_items(name, tensor)
        ]
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the rectangle to write."""
        assert index.offset is not None, f"{index.fqn} was planned without an offset"
        return pieces_of(self._tensors[index.fqn])[index.offset]


def _write_items(name: str, tensor: Tensor | TensorShard) -> list[WriteItem]:
    """Describe a tensor's rectangles to torch."""
    if isinstance(tensor, Tensor):
        kind, properties = WriteItemType.TENSOR, TensorProperties.create_from_tensor(tensor)
    else:
        kind, properties = WriteItemType.SHARD, TensorProperties(dtype=tensor.dtype)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=kind,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.shape),
        )
        for chunk in chunks_of(tensor)
    ]
