"""The weights of a checkpoint by name, read one at a time, and models filled with weights."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megacore.checkpoint.load import CheckpointReader
from megacore.config.spec import ModelSpec
from megacore.errors import ConversionError
from megacore.models.base import Model
from megacore.models.build import build_bare
from megacore.parallel.mesh import ProcessMesh

PREFIX = "model."
"""Under which a checkpoint keeps the fp32 main weights."""


class CheckpointTensors(Mapping[str, Tensor]):
    """The model's parameters in a checkpoint of any layout, in fp32, under their global names.

    Each look-up reads the files; beside the tensor itself it allocates a few megabytes. Raises
    CheckpointError when the directory is no checkpoint, or a file is damaged.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self._reader = CheckpointReader(checkpoint)
        self._entries = self._reader.tensors
        self.names = [
            name.removeprefix(PREFIX) for name in self._entries if name.startswith(PREFIX)
        ]

    def __getitem__(self, name: str) -> Tensor:
        full = PREFIX + name
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
    """Our model with these weights, in evaluation mode.

    Raises ConversionError when names or shapes differ.
    """
    model = build_bare(spec, ProcessMesh.serial())
    take_weights(model, tensors, device)
    return model


def take_weights(
    model: Model, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu"
) -> None:
    """Give a model built on the meta device its weights.

    Raises ConversionError when names or shapes differ.
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
