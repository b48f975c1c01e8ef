"""Files of a checkpoint of Megatron-LM: which there are, and one of them without executing anything in it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megacore.checkpoint.format import TRACKER_NAME, directory_name, iteration_of, read_tracker
from megacore.convert.inert import Record, load_inert
from megacore.errors import CheckpointError, ConversionError

FILE_NAME = "model_optim_rng.pt"
_FILE_NAMES = (FILE_NAME, "model_rng.pt")
"""The second is written where a distributed optimizer has files of its own."""
_RELEASE = "release"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")
_CHUNK = re.compile(r"model(\d*)")
VERSIONS = (0.0, 1.0, 2.0, 3.0)


@dataclass(frozen=True)
class RankFile:
    """The content of one rank's file, tensors mapped from the disk where its form allows it."""

    path: Path
    args: dict[str, Any]
    version: float
    """checkpoint_version, which says how rows of query_key_value are ordered."""
    iteration: int | None
    chunks: tuple[Mapping[str, Any], ...]
    """Nested tensors of each of the rank's model chunks: one, or as many as the virtual pipeline has."""


def checkpoint_directory(directory: Path) -> tuple[Path, int | None]:
    """The directory with the ranks' directories, and the iteration that tracker or name says.

    `directory` is that one, or the root with the tracker. Raises CheckpointError.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory: give one with {TRACKER_NAME} or mp_rank_00 in it")
    if any(_RANK.fullmatch(path.name) for path in directory.iterdir()):
        return directory, iteration_of(directory)
    _refuse_distributed(directory)
    iteration = read_tracker(directory)
    if iteration is not None:
        return _tracked(directory, directory_name(iteration)), iteration
    if _says_release(directory / TRACKER_NAME):
        return _tracked(directory, _RELEASE), 0
    raise CheckpointError(
        f"{directory} is no checkpoint of Megatron-LM: it has neither {TRACKER_NAME} with an iteration nor a "
        "directory mp_rank_00"
    )


def _tracked(root: Path, name: str) -> Path:
    target = root / name
    if not target.is_dir():
        raise CheckpointError(f"{root / TRACKER_NAME} names {name}, which is not there: use another checkpoint")
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
            f"{directory} is a checkpoint in Megatron core's distributed form (torch_dist), and only the form with "
            f"mp_rank_TT/{FILE_NAME} is read: save it with --ckpt-format torch"
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
                f"{folder} is divided by a third number beside tensor and pipeline rank, as experts are, for which "
                "there is no model of ours"
            )
        rank = int(match[1]), int(match[2] or 0)
        if rank in found:
            raise CheckpointError(
                f"{found[rank]} and {path} are both of tensor rank {rank[0]} and pipeline rank {rank[1]}: remove one"
            )
        found[rank] = path
    if not found:
        raise CheckpointError(
            f"{directory} has no {' or '.join(_FILE_NAMES)} in any mp_rank directory, only what else was saved: "
            "use a checkpoint that holds the model"
        )
    return found


def write_rank_file(path: Path, state: Mapping[str, Any]) -> None:
    """Write one file and its directory. Raises the OSError that torch's zip writer hides behind a RuntimeError."""
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
            f"{path} has checkpoint_version {version!r}, known are {', '.join(map(str, VERSIONS))}: use another"
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
    return dict(args) if isinstance(args, Mapping) else dict(vars(args)) if isinstance(args, Record) else {}


def _load(path: Path) -> Mapping[str, Any]:
    state = load_inert(path)
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} holds {type(state).__name__}, not a dictionary: use another checkpoint")
    return state


def _chunks(state: Mapping[str, Any], path: Path) -> tuple[Mapping[str, Any], ...]:
    """The models in a file: `model`, or `model0`, `model1` … of a virtual pipeline."""
    numbered = {int(match[1] or 0): state[key] for key in state if (match := _CHUNK.fullmatch(key))}
    if not numbered:
        shown = ", ".join(map(str, list(state)[:6])) or "nothing"
        raise CheckpointError(f"{path} has no model, but {shown}: use a checkpoint that holds the model")
    chunks = tuple(numbered[number] for number in sorted(numbered))
    for chunk in chunks:
        if not isinstance(chunk, Mapping) or "language_model" not in chunk:
            shown = ", ".join(map(str, list(chunk)[:3])) if isinstance(chunk, Mapping) else type(chunk).__name__
            raise ConversionError(
                f"{path} has no model.language_model, but {shown}: only Megatron-LM's own models before Megatron core "
                "are read from this form"
            )
    return chunks
