"""A checkpoint's weights by name, read one at a time."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megacore.checkpoint.load import read_tensors, tensor_shapes

PREFIX = "model."
"""Under which a checkpoint keeps the fp32 main weights."""


class CheckpointTensors(Mapping[str, Tensor]):
    """The model's parameters in a checkpoint, in fp32, under their global names; each look-up reads the file.

    Raises CheckpointError when the directory is no checkpoint.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.names = [name.removeprefix(PREFIX) for name in tensor_shapes(checkpoint) if name.startswith(PREFIX)]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        full = PREFIX + name
        return read_tensors(self.checkpoint, [full], dtype=torch.float32)[full]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)
