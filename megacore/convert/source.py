"""Lazy access to the weights of a checkpoint, and loading of weights into models."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megacore.artifact.workspace import WEIGHTS_PREFIX
from megacore.checkpoint.load import CheckpointReader
from megacore.config.spec import ModelSpec
from megacore.errors import ConversionError
from megacore.models.base import Model
from megacore.models.build import build_bare
from megacore.parallel.mesh import ProcessMesh


class CheckpointTensors(Mapping[str, Tensor]):
    """Mapping from global name to fp32 parameter, read from a checkpoint of any layout.

    Each look-up reads the files and allocates a few megabytes in addition to the tensor.

    Raises:
        CheckpointError: if the directory is not a checkpoint, or a file is damaged.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self._reader = CheckpointReader(checkpoint)
        self._entries = self._reader.tensors
        self.names = [
            name.removeprefix(WEIGHTS_PREFIX)
            for name in self._entries
            if name.startswith(WEIGHTS_PREFIX)
        ]

    def __getitem__(self, name: str) -> Tensor:
        full = WEIGHTS_PREFIX + name
        if full not in self._entries:
            raise KeyError(name)
        target = torch.empty(self._entries[full].size, dtype=torch.float32)
        self._reader.fill({full: target})
        return target

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def load_weights(
    spec: ModelSpec, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu"
) -> Model:
    """Build our model with these weights, in evaluation mode.

    Raises:
        ConversionError: if names or shapes differ.
    """
    model = build_bare(spec, ProcessMesh.serial())
    take_weights(model, tensors, device)
    return model


def take_weights(
    model: Model, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu"
) -> None:
    """Load weights into a model that was built on the meta device.

    Raises:
        ConversionError: if names or shapes differ.
    """
    try:
        model.load_state_dict(
            {name: tensor.to(device) for name, tensor in tensors.items()}, strict=True, assign=True
        )
    except RuntimeError as error:
        raise ConversionError(
            "the checkpoint is of another model than the configuration: "
            f"{' '.join(str(error).split())[:500]}"
        ) from error
