"""Reading of whole checkpoints for comparisons."""

from pathlib import Path

import torch
from torch import Tensor

from megacore.checkpoint.format import reading
from megacore.checkpoint.load import CheckpointReader


def read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Read the complete tensors whose names start with `prefix`. Raises CheckpointError."""
    with reading(path):
        reader = CheckpointReader(path)
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in reader.tensors.items()
            if name.startswith(prefix)
        }
        reader.fill(tensors)
        return tensors


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the global shape of every tensor, by name. Raises CheckpointError."""
    return {name: tuple(entry.size) for name, entry in CheckpointReader(path).tensors.items()}
