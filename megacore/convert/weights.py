"""Our models with weights from somewhere else."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megacore.config.spec import ModelSpec
from megacore.errors import ConversionError
from megacore.models.base import Model
from megacore.models.build import build_bare
from megacore.parallel.mesh import ProcessMesh


def load_weights(spec: ModelSpec, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> Model:
    """Our model with these weights, in evaluation mode. Raises ConversionError when names or shapes differ."""
    model = build_bare(spec, ProcessMesh.serial())
    take_weights(model, tensors, device)
    return model


def take_weights(model: Model, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
    """Give a model built on the meta device its weights. Raises ConversionError when names or shapes differ."""
    try:
        model.load_state_dict({name: tensor.to(device) for name, tensor in tensors.items()}, strict=True, assign=True)
    except RuntimeError as error:
        raise ConversionError(
            f"the checkpoint is of another model than the configuration: {' '.join(str(error).split())[:500]}"
        ) from error
