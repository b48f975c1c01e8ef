"""What one rank holds of a tensor that several ranks hold together, as torch.distributed.checkpoint asks for it.

A rank's part under tensor parallelism is one rectangle of the whole; a flat range of such a part, which a rank holds
under a distributed optimizer, is a few. The checkpoint knows rectangles of whole tensors alone, so that any layout can
read what any other wrote.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_state_dict_object

from megacore.tensor_parallel.partition import Partition


@dataclass(frozen=True, eq=False)
class TensorShard:
    """Some rectangles of a whole tensor; the tensors in it are read and filled in place."""

    shape: torch.Size
    """Shape of the whole tensor."""
    dtype: torch.dtype
    """Type of the whole tensor."""
    pieces: Mapping[torch.Size, Tensor]
    """Rectangles by the position of their first element in the whole; none where this rank holds nothing of it."""

    @classmethod
    def of_runs(
        cls,
        runs: Sequence[tuple[int, Tensor]],
        shape: Sequence[int],
        dtype: torch.dtype,
        partition: Partition | None = None,
    ) -> "TensorShard":
        """Contiguous runs of the elements of a tensor-parallel part.

        Args:
            runs: for each, its first element's number in the flattened part, and its elements in order.
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
                place = torch.Size(offset + first for offset, first in zip(offsets, corner, strict=True))
                pieces[place] = run.view(-1)[position : position + length].view(sizes)
                position += length
        whole = tuple(shape) if partition is None else partition.global_shape(tuple(shape))
        return cls(torch.Size(whole), dtype, pieces)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """What this rank could write: torch removes what another rank writes already."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets, tensor.size()),
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.shape,
                ),
            )
            for offsets, tensor in self.pieces.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What this rank wants to read."""
        return [ChunkStorageMetadata(offsets, tensor.size()) for offsets, tensor in self.pieces.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The rectangle that `index` names."""
        assert index.offset is not None, f"{index.fqn} has no offset: only a whole tensor has none"
        return self.pieces[index.offset]


def rectangles(start: int, stop: int, shape: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Offsets and sizes of the rectangles that hold elements start..stop of a tensor in row-major order.

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


def _within(row: int, start: int, stop: int, shape: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Elements start..stop of one row."""
    for offsets, sizes in rectangles(start, stop, shape[1:]):
        yield [row, *offsets], [1, *sizes]


class ShardSavePlanner(DefaultSavePlanner):
    """Torch's planner, which finds the rectangles of a TensorShard too."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor to write."""
        return _find(self.state_dict, index)


class ShardLoadPlanner(DefaultLoadPlanner):
    """Torch's planner, which fills the rectangles of a TensorShard too."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the dictionary as it is: torch drops values of types that it does not know."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor to fill."""
        found: Tensor = _find(self.state_dict, index)
        return found


def _find(state_dict: dict[str, Any], index: MetadataIndex) -> Any:
    held = state_dict.get(index.fqn)
    if isinstance(held, TensorShard):
        return held.__get_tensor_shard__(index)
    return find_state_dict_object(state_dict, index)
