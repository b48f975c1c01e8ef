"""The files of all ranks of a Megatron-LM checkpoint: read, written, and seen as one model.

Nothing in them is executed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.checkpoint.format import TRACKER_NAME, directory_name, iteration_of, read_tracker
from megacore.convert.inert import Record, load_inert
from megacore.convert.megatron.args import MODEL_ARGS, tensor_size
from megacore.convert.megatron.table import (
    WORD_EMBEDDINGS,
    Slot,
    current_rows,
    dotted,
    layer_numbers,
    stage_slots,
)
from megacore.errors import CheckpointError, ConversionError

FILE_NAME = "model_optim_rng.pt"
_FILE_NAMES = (FILE_NAME, "model_rng.pt")
"""The second is written where a distributed optimizer has files of its own."""
_RELEASE = "release"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")
_CHUNK = re.compile(r"model(\d*)")
VERSIONS = (0.0, 1.0, 2.0, 3.0)
Stage = tuple[Mapping[str, Tensor], ...]
"""What the tensor-parallel ranks of one pipeline stage hold, by dotted name, in their order."""
_NAMED_AT_ONCE = 4


@dataclass(frozen=True)
class RankFile:
    """The content of one rank's file, tensors mapped from the disk where its form allows it."""

    path: Path
    args: dict[str, Any]
    version: float
    """checkpoint_version, which says how rows of query_key_value are ordered."""
    iteration: int | None
    chunks: tuple[Mapping[str, Any], ...]
    """Nested tensors of each of the rank's model chunks: one, or as many as the virtual pipeline
    has."""


def checkpoint_directory(directory: Path) -> tuple[Path, int | None]:
    """The directory with the ranks' directories, and the iteration that tracker or name says.

    `directory` is that one, or the root with the tracker. Raises CheckpointError.
    """
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is no directory: give one with {TRACKER_NAME} or mp_rank_00 in it"
        )
    if any(_RANK.fullmatch(path.name) for path in directory.iterdir()):
        return directory, iteration_of(directory)
    _refuse_distributed(directory)
    iteration = read_tracker(directory)
    if iteration is not None:
        return _tracked(directory, directory_name(iteration)), iteration
    if _says_release(directory / TRACKER_NAME):
        return _tracked(directory, _RELEASE), 0
    raise CheckpointError(
        f"{directory} is no checkpoint of Megatron-LM: it has neither {TRACKER_NAME} with an "
        "iteration nor a directory mp_rank_00"
    )


def _tracked(root: Path, name: str) -> Path:
    target = root / name
    if not target.is_dir():
        raise CheckpointError(
            f"{root / TRACKER_NAME} names {name}, which is not there: use another checkpoint"
        )
    _refuse_distributed(target)
    return target


def _says_release(tracker: Path) -> bool:
    try:
        return tracker.read_text(encoding="ascii").strip() == _RELEASE
    except (OSError, ValueError):
        return False


def _refuse_distributed(directory: Path) -> None:
    if (directory / "metadata.json").is_file() or any(directory.glob("*.distcp")):
        raise ConversionError(
            f"{directory} is a checkpoint in Megatron core's distributed form (torch_dist), and "
            f"only the form with mp_rank_TT/{FILE_NAME} is read: save it with --ckpt-format torch"
        )


def rank_files(directory: Path) -> dict[tuple[int, int], Path]:
    """The file of each (tensor rank, pipeline rank).

    Raises:
        CheckpointError: there is none, or two for one rank.
        ConversionError: the ranks are divided in yet another way, as experts are.
    """
    found: dict[tuple[int, int], Path] = {}
    for folder in sorted(directory.iterdir()):
        match = _RANK.fullmatch(folder.name)
        path = next((folder / name for name in _FILE_NAMES if (folder / name).is_file()), None)
        if not match or path is None:
            continue
        if match[3]:
            raise ConversionError(
                f"{folder} is divided by a third number beside tensor and pipeline rank, as "
                "experts are, for which there is no model of ours"
            )
        rank = int(match[1]), int(match[2] or 0)
        if rank in found:
            raise CheckpointError(
                f"{found[rank]} and {path} are both of tensor rank {rank[0]} and pipeline rank "
                f"{rank[1]}: remove one"
            )
        found[rank] = path
    if not found:
        raise CheckpointError(
            f"{directory} has no {' or '.join(_FILE_NAMES)} in any mp_rank directory, only what "
            "else was saved: use a checkpoint that holds the model"
        )
    return found


def write_rank_file(path: Path, state: Mapping[str, Any]) -> None:
    """Write one file and its directory.

    Raises the OSError that torch's zip writer hides behind a RuntimeError.
    """
    path.parent.mkdir(exist_ok=True)
    try:
        # Given a path, torch's writer forgets why the operating system refused.
        with open(path, "wb") as file:
            torch.save(state, file)
    except RuntimeError as error:
        hidden = error.__context__
        if isinstance(hidden, OSError):
            raise hidden from None
        raise


def read_rank_file(path: Path) -> RankFile:
    """Read one file; its tensors are mapped, not copied, unless it is of torch's form before 1.6.

    Raises:
        CheckpointError: it cannot be read, asks for anything that could act, or holds no model.
        ConversionError: it is of Megatron core.
    """
    state = _load(path)
    chunks = _chunks(state, path)
    version = state.get("checkpoint_version", 0.0)
    if version not in VERSIONS:
        raise ConversionError(
            f"{path} has checkpoint_version {version!r}, known are "
            f"{', '.join(map(str, VERSIONS))}: use another"
        )
    iteration = state.get("iteration")
    return RankFile(
        path,
        args=args_in(state),
        version=float(version),
        iteration=iteration if type(iteration) is int else None,
        chunks=chunks,
    )


def args_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the program that wrote a file; nothing where it has none."""
    args = state.get("args")
    return (
        dict(args)
        if isinstance(args, Mapping)
        else dict(vars(args))
        if isinstance(args, Record)
        else {}
    )


def _load(path: Path) -> Mapping[str, Any]:
    state = load_inert(path)
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"{path} holds {type(state).__name__}, not a dictionary: use another checkpoint"
        )
    return state


def _chunks(state: Mapping[str, Any], path: Path) -> tuple[Mapping[str, Any], ...]:
    """The models in a file: `model`, or `model0`, `model1` … of a virtual pipeline."""
    numbered = {int(match[1] or 0): state[key] for key in state if (match := _CHUNK.fullmatch(key))}
    if not numbered:
        shown = ", ".join(map(str, list(state)[:6])) or "nothing"
        raise CheckpointError(
            f"{path} has no model, but {shown}: use a checkpoint that holds the model"
        )
    chunks = tuple(numbered[number] for number in sorted(numbered))
    for chunk in chunks:
        if not isinstance(chunk, Mapping) or "language_model" not in chunk:
            shown = (
                ", ".join(map(str, list(chunk)[:3]))
                if isinstance(chunk, Mapping)
                else type(chunk).__name__
            )
            raise ConversionError(
                f"{path} has no model.language_model, but {shown}: only Megatron-LM's own models "
                "before Megatron core are read from this form"
            )
    return chunks


def stages_of(files: Mapping[tuple[int, int], RankFile], where: Path) -> list[Stage]:
    """Pipeline stages in the order in which a sample runs through them.

    Those of a virtual pipeline count each.

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
            stages.append(
                tuple(dotted(file.chunks[chunk], begin, str(file.path)) for file in ranks)
            )
            begin += len(layer_numbers(stages[-1][0]))
    return stages


def _sizes(files: Mapping[tuple[int, int], RankFile], where: Path) -> tuple[int, int]:
    """Tensor and pipeline parallel size, as the args say, or as there are files."""
    args = next(iter(files.values())).args
    said = tensor_size(args), args.get("pipeline_model_parallel_size")
    there = 1 + max(rank[0] for rank in files), 1 + max(rank[1] for rank in files)
    tensor, pipeline = (
        size if type(size) is int else found for size, found in zip(said, there, strict=True)
    )
    wanted = {(rank, stage) for rank in range(tensor) for stage in range(pipeline)}
    missing, beyond = sorted(wanted - files.keys()), sorted(files.keys() - wanted)
    if missing or beyond:
        named = ", ".join(
            f"mp_rank_{rank:02d}_{stage:03d}"
            for rank, stage in (missing or beyond)[:_NAMED_AT_ONCE]
        )
        raise CheckpointError(
            f"{where} {'lacks' if missing else 'has too many:'} {named}/{FILE_NAME}: a tensor "
            f"parallel size of {tensor} and a pipeline parallel size of {pipeline} make "
            f"{len(wanted)} files, and {len(files)} are there"
        )
    return tensor, pipeline


def _check_agreement(files: Mapping[tuple[int, int], RankFile]) -> None:
    first, *others = files.values()
    for other in others:
        for what, one, two in _compared(first, other):
            if one != two:
                raise CheckpointError(
                    f"{first.path} has {what} {one!r} and {other.path} {two!r}: they are of "
                    "different checkpoints, use one that was saved as a whole"
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
        raise CheckpointError(
            f"{where} has no {name} in its first pipeline stage: use another checkpoint"
        )
    return sum(len(rank[name]) for rank in stages[0])


class MergedTensors(Mapping[str, Tensor]):
    """Our parameters in float32 by global name.

    Each look-up reads the parts of all ranks and joins them.

    Args:
        stages: what the ranks hold.
        table: of the model that their args describe.
        version: checkpoint_version.
        head_dim: size of one attention head (d).
        where: the checkpoint, for messages.

    Raises CheckpointError, when it is made, for tensors that are missing, not in the table, of a
    wrong shape, or of different values on ranks that must hold the same.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        table: Sequence[Slot],
        version: float,
        head_dim: int,
        where: Path,
    ) -> None:
        self._version, self._head_dim = version, head_dim
        self._held: dict[str, tuple[Slot, Stage]] = {}
        begin = 0
        for number, stage in enumerate(stages):
            layers = range(begin, begin + len(layer_numbers(stage[0])))
            begin = layers.stop
            first, last = number == 0, number == len(stages) - 1
            expected = list(stage_slots(table, layers, first=first, last=last))
            copies = [
                slot
                for slot in table
                if slot.place == "head copy" and last and slot.name in stage[0]
            ]
            known = {slot.name: slot for slot in [*expected, *copies]}
            _check_stage(stage, known, where)
            self._held |= {
                ours: (slot, stage)
                for slot in known.values()
                if slot not in copies
                for ours in slot.ours
            }
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
        return (
            current_rows(part, self._version, self._head_dim)
            if ".query_key_value." in slot.name
            else part
        )


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
                    f"{where} has {name} of shape {tuple(held[name].shape)} on tensor rank {rank}, "
                    f"where its args say {shape}: use another checkpoint"
                )
            if slot.cut is None:
                _check_same(
                    held[name],
                    stage[0][name],
                    f"{name} of tensor rank {rank}",
                    "tensor rank 0",
                    where,
                )


def _check_copies(first: Stage, last: Stage, slot: Slot, where: Path) -> None:
    table = f"language_model.{WORD_EMBEDDINGS}"
    for rank, (one, other) in enumerate(zip(first, last, strict=True)):
        _check_same(
            other[slot.name], one[table], f"{slot.name} of tensor rank {rank}", table, where
        )


def _check_same(one: Tensor, other: Tensor, what: str, against: str, where: Path) -> None:
    if one is other or torch.equal(one, other):
        return
    difference = float((one.float() - other.float()).abs().max())
    raise CheckpointError(
        f"{where} holds two of what should be one: {what} differs from that of {against} by up to "
        f"{difference:.3g}: use another checkpoint"
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_AT_ONCE} more" if len(names) > _NAMED_AT_ONCE else ""
    return ", ".join(names[:_NAMED_AT_ONCE]) + more
