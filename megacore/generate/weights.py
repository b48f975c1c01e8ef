"""A model with its weights, whatever layout or program wrote them."""

from pathlib import Path

import torch
from torch import Tensor, nn

from megacore.checkpoint.load import load_checkpoint
from megacore.checkpoint.shard import TensorShard
from megacore.errors import CheckpointError
from megacore.jobs.model import ModelSource
from megacore.models.base import Model
from megacore.models.build import build_bare
from megacore.parallel.mesh import ProcessMesh
from megacore.tensor_parallel import Partition, partitions

_PREFIX = "model."
"""Under which a checkpoint keeps the weights."""


def load_model(
    source: ModelSource, mesh: ProcessMesh, *, device: torch.device, dtype: torch.dtype
) -> Model:
    """The model of `source`, this tensor-parallel rank's part of it, for evaluation.

    Raises:
        CheckpointError: the weights are damaged or of another model.
        ParallelLayoutError: heads, widths or vocabulary cannot be divided over the ranks.
    """
    model = build_bare(source.spec, mesh, device=device)
    if source.exported:
        _take_export(model, Path(source.directory))
    else:
        parts = partitions(model)
        wanted = {
            _PREFIX + name: _part(own.data, parts.get(name))
            for name, own in model.named_parameters()
        }
        load_checkpoint(Path(source.directory), wanted, prefix=_PREFIX)
    return model.to(dtype).eval()


def _part(weight: Tensor, partition: Partition | None) -> Tensor | TensorShard:
    """A weight as the checkpoint sees it."""
    return (
        weight
        if partition is None
        else TensorShard.of_runs([(0, weight)], weight.shape, weight.dtype, partition)
    )


def _take_export(model: nn.Module, directory: Path) -> None:
    """Fill the parameters from a transformers directory, one tensor at a time."""
    from megacore.convert.hf.directory import open_hf

    _, _, tensors = open_hf(directory)
    parts = partitions(model)
    for name, own in model.named_parameters():
        whole = tensors[name]
        mine = parts[name].shard(whole) if name in parts else whole
        if mine.shape != own.shape:
            raise CheckpointError(
                f"{directory} has {name} as {list(whole.shape)}, of which the model takes "
                f"{list(own.shape)}: its config.json is of another model"
            )
        own.data.copy_(mine)
