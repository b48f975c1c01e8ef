"""Files of all ranks of a Megatron-LM checkpoint: reading, writing and merging.

Nothing in them is executed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megacore.artifact.files import regular
from megacore.checkpoint.format import (
    METADATA_NAME,
    TRACKER_NAME,
    directory_name,
    iteration_of,
    read_tracker,
)
from megacore.convert.inert import Record, load_inert_mapping
from megacore.convert.key_map import LazyTensors, name_mismatch
from megacore.convert.megatron.args import MODEL_ARGS, tensor_size
from megacore.convert.megatron.table import (
    WORD_EMBEDDINGS,
    Slot,
    current_rows,
    dotted,
    layer_numbers,
    stage_slots,
)
from megacore.errors import CheckpointError, ConversionError, listed
from megacore.paths import exists, is_dir, is_file

FILE_NAME = "model_optim_rng.pt"
_FILE_NAMES = (FILE_NAME, "model_rng.pt")
"""Names of a rank's file. A distributed optimizer with separate files uses the second name."""
_RELEASE = "release"
CONFIG_NAME = "metadata.json"
_DISTRIBUTED = (CONFIG_NAME, METADATA_NAME)
"""Files in a directory of Megatron core's distributed form."""
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")
_CHUNK = re.compile(r"model(\d*)")
VERSIONS = (0.0, 1.0, 2.0, 3.0)
CHECKPOINT_VERSION = VERSIONS[-1]
"""checkpoint_version that is written."""
Stage = tuple[Mapping[str, Tensor], ...]
"""Tensors by dotted name of each tensor-parallel rank of one pipeline stage, in rank order."""


@dataclass(frozen=True)
class RankFile:
    """Content of one rank's file, with memory-mapped tensors if its format permits."""

    path: Path
    args: dict[str, Any]
    version: float
    """checkpoint_version, which determines the row order of query_key_value."""
    iteration: int | None
    chunks: tuple[Mapping[str, Any], ...]
    """Nested tensors of each of the rank's model chunks, one unless the pipeline is virtual."""


def checkpoint_directory(directory: Path) -> tuple[Path, int | None]:
    """Return the directory of one checkpoint, of either form, and its iteration if known.

    Args:
        directory: that directory, or the root with the tracker file.

    Raises:
        CheckpointError: if there is no checkpoint, or the tracker names a missing directory.
    """
    if not is_dir(directory):
        raise CheckpointError(
            f"{directory} is no directory: give one with {TRACKER_NAME} or mp_rank_00 in it"
        )
    names = [path.name for path in directory.iterdir()]
    if any(_RANK.fullmatch(name) or name in _DISTRIBUTED for name in names):
        return directory, iteration_of(directory)
    iteration = read_tracker(directory)
    if iteration is not None:
        return _tracked(directory, directory_name(iteration)), iteration
    if _says_release(directory / TRACKER_NAME):
        return _tracked(directory, _RELEASE), 0
    raise CheckpointError(
        f"{directory} is no checkpoint of Megatron-LM: it has neither {TRACKER_NAME} with an "
        "iteration nor a directory mp_rank_00"
    )


def is_distributed(directory: Path) -> bool:
    """Return True for an `iter_*` directory of torch.distributed.checkpoint."""
    return any(exists(directory / name) for name in _DISTRIBUTED)


def _tracked(root: Path, name: str) -> Path:
    target = root / name
    if not is_dir(target):
        raise CheckpointError(
            f"{root / TRACKER_NAME} names {name}, which is not there: use another checkpoint"
        )
    return target


def _says_release(tracker: Path) -> bool:
    try:
        return regular(tracker).read_text(encoding="ascii").strip() == _RELEASE
    except (OSError, ValueError):
        return False


def rank_files(directory: Path) -> dict[tuple[int, int], Path]:
    """Return the file of each (tensor rank, pipeline rank).

    Raises:
        CheckpointError: if there is none, or a rank has two files.
        ConversionError: if the ranks have a third dimension, such as experts.
    """
    files: dict[tuple[int, int], Path] = {}
    for folder in sorted(directory.iterdir()):
        match = _RANK.fullmatch(folder.name)
        path = next((folder / name for name in _FILE_NAMES if is_file(folder / name)), None)
        if not match or path is None:
            continue
        if match[3]:
            raise ConversionError(
                f"{folder} is divided by a third number in addition to tensor and pipeline rank, "
                "as experts are, which no model of megacore has"
            )
        rank = int(match[1]), int(match[2] or 0)
        if rank in files:
            raise CheckpointError(
                f"{files[rank]} and {path} are both of tensor rank {rank[0]} and pipeline rank "
                f"{rank[1]}: remove one"
            )
        files[rank] = path
    if not files:
        raise CheckpointError(
            f"{directory} has no {' or '.join(_FILE_NAMES)} in any mp_rank directory, only what "
            "else was saved: use a checkpoint that holds the model"
        )
    return files


def write_rank_file(path: Path, state: Mapping[str, Any]) -> None:
    """Write one file and its directory. Raises OSError if it cannot be written."""
    path.parent.mkdir(exist_ok=True)
    with open(path, "wb") as file:
        save_to(file, state)


def save_to(file: IO[bytes], value: object) -> None:
    """Write `value` to an open file with torch.save, which loses the errors of a path.

    Raises:
        OSError: if the file cannot be written; torch's zip writer hides it behind a RuntimeError.
    """
    try:
        torch.save(value, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def read_rank_file(path: Path) -> RankFile:
    """Read one file; its tensors are memory-mapped, except in the format of torch before 1.6.

    Raises:
        CheckpointError: if the file cannot be read, refers to a name that could execute code, or
            contains no model.
        ConversionError: if it is from Megatron core, or its checkpoint_version is unknown.
    """
    state = load_inert_mapping(path)
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
    """Return the arguments of the program that wrote a file; empty if it has none."""
    args = state.get("args")
    if isinstance(args, Record):
        args = vars(args)
    return dict(args) if isinstance(args, Mapping) else {}


def _chunks(state: Mapping[str, Any], path: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the models in a file: `model`, or `model0`, `model1` … of a virtual pipeline."""
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
    """Return the pipeline stages in execution order, including those of a virtual pipeline.

    Args:
        files: files by (tensor rank, pipeline rank).
        where: directory of the files.

    Raises:
        CheckpointError: if a file is missing, or two files are of different runs.
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
    """Return tensor and pipeline parallel size from the args, or from the number of files."""
    args = next(iter(files.values())).args
    args_sizes = tensor_size(args), args.get("pipeline_model_parallel_size")
    file_sizes = 1 + max(rank[0] for rank in files), 1 + max(rank[1] for rank in files)
    tensor, pipeline = (
        size if type(size) is int else file_size
        for size, file_size in zip(args_sizes, file_sizes, strict=True)
    )
    expected = {(rank, stage) for rank in range(tensor) for stage in range(pipeline)}
    missing, surplus = sorted(expected - files.keys()), sorted(files.keys() - expected)
    if missing or surplus:
        wrong = [
            f"mp_rank_{rank:02d}_{stage:03d}/{FILE_NAME}" for rank, stage in missing or surplus
        ]
        raise CheckpointError(
            f"{where} {'lacks' if missing else 'has too many:'} {listed(wrong)}: a tensor "
            f"parallel size of {tensor} and a pipeline parallel size of {pipeline} make "
            f"{len(expected)} files, and {len(files)} are there"
        )
    return tensor, pipeline


def _check_agreement(files: Mapping[tuple[int, int], RankFile]) -> None:
    first, *others = files.values()
    for other in others:
        for what, value, second in _compared(first, other):
            if value != second:
                raise CheckpointError(
                    f"{first.path} has {what} {value!r} and {other.path} {second!r}: they are of "
                    "different checkpoints, use one that was saved as a whole"
                )


def _compared(first: RankFile, other: RankFile) -> Iterator[tuple[str, Any, Any]]:
    yield "checkpoint_version", first.version, other.version
    yield "iteration", first.iteration, other.iteration
    yield "model chunks", len(first.chunks), len(other.chunks)
    for name in MODEL_ARGS:
        yield name, first.args.get(name), other.args.get(name)


def layers_held(stages: Sequence[Stage]) -> int:
    """Return the number of layers of all stages."""
    return sum(len(layer_numbers(stage[0])) for stage in stages)


def vocabulary_rows(stages: Sequence[Stage], where: Path) -> int:
    """Return the number of rows of the complete token embedding.

    Raises:
        CheckpointError: if the first stage has no token embedding.
    """
    name = f"language_model.{WORD_EMBEDDINGS}"
    if any(name not in rank or rank[name].dim() != 2 for rank in stages[0]):
        raise CheckpointError(
            f"{where} has no {name} in its first pipeline stage: use another checkpoint"
        )
    return sum(len(rank[name]) for rank in stages[0])


class MergedTensors(LazyTensors):
    """Mapping of our fp32 parameters by global name, merged from all ranks on access.

    Args:
        stages: tensors of all ranks.
        table: table of the model that the args describe.
        version: checkpoint_version.
        head_dim: size of one attention head (d).
        where: checkpoint that errors name.

    Raises:
        CheckpointError: on construction, if a tensor is missing, unknown or of a wrong shape, or
            differs between ranks that must have the same values.
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

        super().__init__(self._held, self._merged)

    def _merged(self, name: str) -> Tensor:
        slot, stage = self._held[name]
        parts = (rank[slot.name] for rank in stage)
        if ".query_key_value." in slot.name:
            parts = (current_rows(part, self._version, self._head_dim) for part in parts)
        return slot.whole(parts, name).to(torch.float32)


def _check_stage(stage: Stage, known: Mapping[str, Slot], where: Path) -> None:
    for rank, part in enumerate(stage):
        mismatch = name_mismatch(part, known)
        if mismatch is not None:
            raise CheckpointError(
                f"{where}, tensor rank {rank}, is of another model than its args say: {mismatch}: "
                "use another checkpoint"
            )
        for name, slot in known.items():
            tensor, shape = part[name], slot.shape(len(stage))
            if tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"{where} has {name} of shape {tuple(tensor.shape)} on tensor rank {rank}, "
                    f"where its args say {shape}: use another checkpoint"
                )
            if rank and slot.cut is None:
                _check_same(
                    tensor,
                    stage[0][name],
                    f"{name} of tensor rank {rank}",
                    "tensor rank 0",
                    where,
                )


def _check_copies(first: Stage, last: Stage, slot: Slot, where: Path) -> None:
    table = f"language_model.{WORD_EMBEDDINGS}"
    for rank, (reference, other) in enumerate(zip(first, last, strict=True)):
        _check_same(
            other[slot.name], reference[table], f"{slot.name} of tensor rank {rank}", table, where
        )


def _check_same(one: Tensor, other: Tensor, what: str, against: str, where: Path) -> None:
    if torch.equal(one, other):
        return
    difference = float((one.float() - other.float()).abs().max())
    raise CheckpointError(
        f"{where} holds two of what should be one: {what} differs from that of {against} by up to "
        f"{difference:.3g}: use another checkpoint"
    )
