"""Loading of a model for evaluation, from a checkpoint of any layout or from an export."""

from pathlib import Path

import torch
from torch import nn

from megacore.artifact.workspace import WEIGHTS_PREFIX
from megacore.checkpoint.load import load_checkpoint
from megacore.checkpoint.shard import part_of_rank
from megacore.errors import CheckpointError
from megacore.jobs.model import ModelSource
from megacore.models.base import Model
from megacore.models.build import build_bare
from megacore.parallel.mesh import ProcessMesh
from megacore.tensor_parallel import partitions


def load_model(
    source: ModelSource, mesh: ProcessMesh, *, device: torch.device, dtype: torch.dtype
) -> Model:
    """Load this tensor-parallel rank's part of the model in `source`, in evaluation mode.

    Raises:
        CheckpointError: if the weights are damaged or of another model.
        ParallelLayoutError: if heads, widths or vocabulary cannot be divided over the ranks.
    """
    model = build_bare(source.spec, mesh, device=device)
    if source.exported:
        _take_export(model, Path(source.directory))
    else:
        parts = partitions(model)
        targets = {
            WEIGHTS_PREFIX + name: part_of_rank(parameter.data, parts.get(name))
            for name, parameter in model.named_parameters()
        }
        load_checkpoint(Path(source.directory), targets, prefix=WEIGHTS_PREFIX)
    return model.to(dtype).eval()


def _take_export(model: nn.Module, directory: Path) -> None:
    """Fill the parameters of `model` from a transformers directory, one tensor at a time."""
    from megacore.convert.hf.directory import open_hf

    tensors = open_hf(directory).tensors
    parts = partitions(model)
    for name, parameter in model.named_parameters():
        tensor = tensors[name]
        values = parts[name].shard(tensor) if name in parts else tensor
        if values.shape != parameter.shape:
            raise CheckpointError(
                f"{directory} has {name} as {list(tensor.shape)}, of which the model takes "
                f"{list(parameter.shape)}: its config.json is of another model"
            )
        parameter.data.copy_(values)
