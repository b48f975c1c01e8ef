"""Opened models and lazy access to their weights, and loading of weights into models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megacore.artifact.workspace import WEIGHTS_PREFIX
from megacore.checkpoint.load import CheckpointReader
from megacore.config.spec import ModelSpec
from megacore.convert.key_map import LazyTensors, Shape
from megacore.errors import ConversionError, one_line
from megacore.models.base import Model
from megacore.models.build import build_bare
from megacore.parallel.mesh import ProcessMesh

HALF_PRECISION = (
    "the weights are in half precision: main weights in fp32 belong to the optimizer's state, "
    "which is not taken"
)
"""Remark on a model whose files hold no weights in fp32."""


@dataclass(frozen=True)
class Foreign:
    """Opened model in the format of another program."""

    form: str
    """Format: a key of `imported.OPENERS`."""
    kind: str
    """Class of the model, or its description in that format."""
    spec: ModelSpec
    tensors: Mapping[str, Tensor]
    """Parameters in fp32 by our global names, each read on access."""
    files: tuple[Path, ...]
    """Files that contain the model and its configuration."""
    iteration: int = 0
    """Number of optimizer steps; 0 if unknown."""
    remarks: tuple[str, ...] = ()
    """Sentences about information that the files lack, or that the import leaves out."""
    moments: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Adam's exp_avg and exp_avg_sq by kind and name; empty unless the files have both for every
    parameter."""
    optimizer_steps: int | None = None
    """Number of steps behind the moments; None without moments."""


class CheckpointTensors(LazyTensors):
    """Mapping from global name to fp32 parameter, read from a checkpoint of any layout.

    Each look-up reads the files and allocates a few megabytes in addition to the tensor.

    Raises:
        CheckpointError: if the directory is not a checkpoint, or a file is damaged.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._reader = CheckpointReader(checkpoint)
        names = (name for name in self._reader.tensors if name.startswith(WEIGHTS_PREFIX))
        super().__init__((name.removeprefix(WEIGHTS_PREFIX) for name in names), self._read)

    def _read(self, name: str) -> Tensor:
        full = WEIGHTS_PREFIX + name
        target = torch.empty(self._reader.tensors[full].size, dtype=torch.float32)
        self._reader.fill({full: target})
        return target


def parameter_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Return the complete shape of each parameter of a model by its global name."""
    model = build_bare(spec, ProcessMesh.serial())
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def load_weights(
    spec: ModelSpec, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu"
) -> Model:
    """Build our model with these weights, in evaluation mode.

    Raises:
        ConversionError: if names or shapes differ.
    """
    model = build_bare(spec, ProcessMesh.serial())
    try:
        model.load_state_dict(
            {name: tensor.to(device) for name, tensor in tensors.items()}, strict=True, assign=True
        )
    except RuntimeError as error:
        raise ConversionError(
            f"the checkpoint is of another model than the configuration: {one_line(error, 500)}"
        ) from error
    return model
