"""A checkpoint's weights by name, read one at a time."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from megacore.checkpoint.format import METADATA_NAME
from megacore.checkpoint.load import read_tensors
from megacore.checkpoint.metadata import SavedSlice, read_metadata
from megacore.convert.chunks import Chunk, read_into
from megacore.errors import CheckpointError

PREFIX = "model."
"""Under which a checkpoint keeps the fp32 main weights."""


class CheckpointTensors(Mapping[str, Tensor]):
    """The model's parameters in a checkpoint of any layout, in fp32, under their global names.

    Each look-up reads the files; beside the tensor itself it allocates a few megabytes. Raises CheckpointError when
    the directory is no checkpoint, or a file is damaged.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self._metadata = read_metadata(checkpoint / METADATA_NAME)
        entries = self._metadata.state_dict_metadata
        self.names = [name.removeprefix(PREFIX) for name in entries if name.startswith(PREFIX)]
        self._places: dict[str, list[tuple[MetadataIndex, SavedSlice]]] = {name: [] for name in entries}
        for index, info in self._metadata.storage_data.items():
            self._places[index.fqn].append((index, info))

    def __getitem__(self, name: str) -> Tensor:
        full = PREFIX + name
        if full not in self._places:
            raise KeyError(name)
        entry = self._metadata.state_dict_metadata[full]
        target = torch.empty(entry.size, dtype=torch.float32)  # type: ignore[union-attr]
        dtype = entry.properties.dtype  # type: ignore[union-attr]
        try:
            plain = all(read_into(target, chunk, dtype) for chunk in self._chunks(full))
        except OSError as error:
            raise CheckpointError(f"{self.checkpoint} cannot be read: {error}: use another checkpoint") from error
        return target if plain else read_tensors(self.checkpoint, [full], dtype=torch.float32)[full]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def _chunks(self, full: str) -> Iterator[Chunk]:
        entry = self._metadata.state_dict_metadata[full]
        whole = torch.Size([0] * len(entry.size))  # type: ignore[union-attr]
        sizes = {chunk.offsets: chunk.sizes for chunk in entry.chunks}  # type: ignore[union-attr]
        for index, info in self._places[full]:
            offsets = whole if index.offset is None else index.offset
            file = self.checkpoint / info.relative_path
            yield Chunk(tuple(offsets), tuple(sizes[offsets]), file, info.offset, info.length)
