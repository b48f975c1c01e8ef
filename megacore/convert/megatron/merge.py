"""The files of all ranks of a Megatron-LM checkpoint, seen as one model."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.convert.megatron.files import FILE_NAME, RankFile
from megacore.convert.megatron.spec import MODEL_ARGS, tensor_size
from megacore.convert.megatron.table import WORD_EMBEDDINGS, Slot, current_rows, dotted, layer_numbers, stage_slots
from megacore.errors import CheckpointError

Stage = tuple[Mapping[str, Tensor], ...]
"""What the tensor-parallel ranks of one pipeline stage hold, by dotted name, in their order."""
_NAMED_AT_ONCE = 4


def stages_of(files: Mapping[tuple[int, int], RankFile], where: Path) -> list[Stage]:
    """Pipeline stages in the order in which a sample runs through them; those of a virtual pipeline count each.

    Args:
        files: by (tensor rank, pipeline rank).
        where: their directory.

    Raises CheckpointError when a file is missing or two are of different runs.
    """
    tensor, pipeline = _sizes(files, where)
    _check_agreement(files)
    chunks = len(files[0, 0].chunks)
    stages: list[Stage] = []
    begin = 0
    for chunk in range(chunks):
        for stage in range(pipeline):
            ranks = [files[rank, stage] for rank in range(tensor)]
            stages.append(tuple(dotted(file.chunks[chunk], begin, str(file.path)) for file in ranks))
            begin += len(layer_numbers(stages[-1][0]))
    return stages


def _sizes(files: Mapping[tuple[int, int], RankFile], where: Path) -> tuple[int, int]:
    """Tensor and pipeline parallel size, as the args say, or as there are files."""
    args = next(iter(files.values())).args
    said = tensor_size(args), args.get("pipeline_model_parallel_size")
    there = 1 + max(rank[0] for rank in files), 1 + max(rank[1] for rank in files)
    tensor, pipeline = (size if type(size) is int else found for size, found in zip(said, there, strict=True))
    wanted = {(rank, stage) for rank in range(tensor) for stage in range(pipeline)}
    missing, beyond = sorted(wanted - files.keys()), sorted(files.keys() - wanted)
    if missing or beyond:
        named = ", ".join(f"mp_rank_{rank:02d}_{stage:03d}" for rank, stage in (missing or beyond)[:_NAMED_AT_ONCE])
        raise CheckpointError(
            f"{where} {'lacks' if missing else 'has too many:'} {named}/{FILE_NAME}: a tensor parallel size of "
            f"{tensor} and a pipeline parallel size of {pipeline} make {len(wanted)} files, and {len(files)} are there"
        )
    return tensor, pipeline


def _check_agreement(files: Mapping[tuple[int, int], RankFile]) -> None:
    first, *others = files.values()
    for other in others:
        for what, one, two in _compared(first, other):
            if one != two:
                raise CheckpointError(
                    f"{first.path} has {what} {one!r} and {other.path} {two!r}: they are of different checkpoints, "
                    "use one that was saved as a whole"
                )


def _compared(first: RankFile, other: RankFile) -> Iterator[tuple[str, Any, Any]]:
    yield "checkpoint_version", first.version, other.version
    yield "iteration", first.iteration, other.iteration
    yield "model chunks", len(first.chunks), len(other.chunks)
    for name in MODEL_ARGS:
        yield name, first.args.get(name), other.args.get(name)


def layers_held(stages: Sequence[Stage]) -> int:
    """Layers of all stages."""
    return sum(len(layer_numbers(stage[0])) for stage in stages)


def vocabulary_rows(stages: Sequence[Stage], where: Path) -> int:
    """Rows of the whole table of tokens. Raises CheckpointError when the first stage has none."""
    name = f"language_model.{WORD_EMBEDDINGS}"
    if any(name not in rank or rank[name].dim() != 2 for rank in stages[0]):
        raise CheckpointError(f"{where} has no {name} in its first pipeline stage: use another checkpoint")
    return sum(len(rank[name]) for rank in stages[0])


class MergedTensors(Mapping[str, Tensor]):
    """Our parameters in float32 by global name; each look-up reads the parts of all ranks and joins them.

    Args:
        stages: what the ranks hold.
        table: of the model that their args describe.
        version: checkpoint_version.
        head_dim: size of one attention head (d).
        where: the checkpoint, for messages.

    Raises CheckpointError, when it is made, for tensors that are missing, not in the table, of a wrong shape, or of
    different values on ranks that must hold the same.
    """

    def __init__(
        self, stages: Sequence[Stage], table: Sequence[Slot], version: float, head_dim: int, where: Path
    ) -> None:
        self._version, self._head_dim = version, head_dim
        self._held: dict[str, tuple[Slot, Stage]] = {}
        begin = 0
        for number, stage in enumerate(stages):
            layers = range(begin, begin + len(layer_numbers(stage[0])))
            begin = layers.stop
            first, last = number == 0, number == len(stages) - 1
            expected = list(stage_slots(table, layers, first=first, last=last))
            copies = [slot for slot in table if slot.place == "head copy" and last and slot.name in stage[0]]
            known = {slot.name: slot for slot in [*expected, *copies]}
            _check_stage(stage, known, where)
            self._held |= {ours: (slot, stage) for slot in known.values() if slot not in copies for ours in slot.ours}
            for slot in copies:
                _check_copies(stages[0], stage, slot, where)

    def __getitem__(self, name: str) -> Tensor:
        slot, stage = self._held[name]
        parts = (self._current(slot, rank[slot.name]) for rank in stage)
        return slot.whole(parts, name).to(torch.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def _current(self, slot: Slot, part: Tensor) -> Tensor:
        return current_rows(part, self._version, self._head_dim) if ".query_key_value." in slot.name else part


def _check_stage(stage: Stage, known: Mapping[str, Slot], where: Path) -> None:
    for rank, held in enumerate(stage):
        missing = [name for name in known if name not in held]
        unknown = [name for name in held if name not in known]
        if missing or unknown:
            raise CheckpointError(
                f"{where} is of another model than its args say: tensor rank {rank} "
                f"{'lacks' if missing else 'has'} {_listed(missing or unknown)}"
                f"{'' if missing else ', for which there is no place'}: use another checkpoint"
            )
        for name, slot in known.items():
            shape = slot.shape(len(stage))
            if tuple(held[name].shape) != shape:
                raise CheckpointError(
                    f"{where} has {name} of shape {tuple(held[name].shape)} on tensor rank {rank}, where its args say "
                    f"{shape}: use another checkpoint"
                )
            if slot.cut is None:
                _check_same(held[name], stage[0][name], f"{name} of tensor rank {rank}", "tensor rank 0", where)


def _check_copies(first: Stage, last: Stage, slot: Slot, where: Path) -> None:
    table = f"language_model.{WORD_EMBEDDINGS}"
    for rank, (one, other) in enumerate(zip(first, last, strict=True)):
        _check_same(other[slot.name], one[table], f"{slot.name} of tensor rank {rank}", table, where)


def _check_same(one: Tensor, other: Tensor, what: str, against: str, where: Path) -> None:
    if one is other or torch.equal(one, other):
        return
    difference = float((one.float() - other.float()).abs().max())
    raise CheckpointError(
        f"{where} holds two of what should be one: {what} differs from that of {against} by up to {difference:.3g}: "
        "use another checkpoint"
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_AT_ONCE} more" if len(names) > _NAMED_AT_ONCE else ""
    return ", ".join(names[:_NAMED_AT_ONCE]) + more
