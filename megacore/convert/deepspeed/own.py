"""A model of ours in a checkpoint of DeepSpeed: which it is, and its parameters from all tensor-parallel ranks."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megacore.checkpoint.format import STATE_NAME
from megacore.checkpoint.spec import read_spec
from megacore.config.spec import ModelSpec
from megacore.convert.key_map import Shape
from megacore.errors import CheckpointError, ConfigError, ConversionError
from megacore.jobs.run import TrainJob
from megacore.models.build import build_bare
from megacore.parallel.mesh import ParallelGroup, ProcessMesh
from megacore.tensor_parallel import partitions

RUN_NAME = "run.json"
_LEVELS = 3
_NAMED_AT_ONCE = 4


def spec_beside(directory: Path) -> ModelSpec:
    """The model that run.json of its run, or state.json of a checkpoint of ours, in or above `directory` describes.

    Raises:
        ConversionError: there is neither.
        CheckpointError: it is damaged.
    """
    places = [directory, *directory.absolute().parents][:_LEVELS]
    for place in places:
        if (place / RUN_NAME).is_file():
            try:
                return TrainJob.read(place / RUN_NAME).spec
            except ConfigError as error:
                raise CheckpointError(str(error)) from error
        if (place / STATE_NAME).is_file():
            return read_spec(place)
    raise ConversionError(
        f"{directory} holds a model of ours and does not say which: put the {RUN_NAME} of its run, or the {STATE_NAME} "
        f"of a checkpoint of the same model, into it or into {directory.absolute().parent}"
    )


def parameter_names(spec: ModelSpec) -> list[str]:
    """Global names of a model's parameters."""
    return [name for name, _ in build_bare(spec, ProcessMesh.serial()).named_parameters()]


class OwnTensors(Mapping[str, Tensor]):
    """Our parameters in float32 by global name; each look-up joins the parts of all ranks.

    Args:
        spec: the model.
        ranks: what the tensor-parallel ranks hold, by global name.
        where: the checkpoint, for messages.

    Raises, when it is made, CheckpointError for tensors that are missing, unknown, of another shape, or of different
    values on ranks that must hold the same; ParallelLayoutError when the model cannot be divided so.
    """

    def __init__(self, spec: ModelSpec, ranks: Sequence[Mapping[str, Tensor]], where: Path) -> None:
        self._ranks = ranks
        mesh = ProcessMesh(tensor_parallel=ParallelGroup(size=len(ranks)))
        model = build_bare(spec, mesh)
        self._cuts = {name: part.dim for name, part in partitions(model).items()}
        self._names = [name for name, _ in model.named_parameters()]
        for rank, held in enumerate(ranks):
            _check_names(set(self._names), held, f"{where}, tensor rank {rank},")
            for name, parameter in model.named_parameters():
                self._check(name, tuple(parameter.shape), rank, where)

    def __getitem__(self, name: str) -> Tensor:
        cut = self._cuts.get(name)
        if cut is None:
            return self._ranks[0][name].to(torch.float32, copy=True)
        return torch.cat([rank[name] for rank in self._ranks], cut).to(torch.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _check(self, name: str, shape: Shape, rank: int, where: Path) -> None:
        tensor = self._ranks[rank][name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{where} has {name} of shape {tuple(tensor.shape)} on tensor rank {rank}, where the model has "
                f"{shape}: use the description it was saved with"
            )
        if rank and name not in self._cuts and not torch.equal(tensor, self._ranks[0][name]):
            raise CheckpointError(
                f"{where} holds two of what should be one: {name} of tensor rank {rank} differs from that of tensor "
                "rank 0: use another checkpoint"
            )


def _check_names(expected: set[str], held: Mapping[str, Tensor], where: str) -> None:
    missing, unknown = sorted(expected - held.keys()), sorted(held.keys() - expected)
    if missing or unknown:
        raise CheckpointError(
            f"{where} is of another model than its description: it {'lacks' if missing else 'has no place for'} "
            f"{', '.join((missing or unknown)[:_NAMED_AT_ONCE])} ({len(missing)} missing, {len(unknown)} unknown): "
            "use the description it was saved with"
        )
