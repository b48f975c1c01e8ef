"""Files of a checkpoint that DeepSpeed's engine wrote: discovery by rank and reading."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megacore.artifact.files import reason_of, regular
from megacore.convert.inert import Record, load_inert_mapping
from megacore.errors import CheckpointError, ConversionError, listed, one_line
from megacore.paths import glob, is_dir, is_file

LATEST = ("latest", "latest_universal")
"""Files in a run's directory that name its newest checkpoint, or its newest universal checkpoint.
"""
UNIVERSAL = "zero"
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_DIVIDED_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(
    r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_"
    r"states\.pt"
)
_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
"""Stages of ZeRO by their names in DeepSpeed's enumeration."""
Rank = tuple[int, int]


@dataclass
class Saved:
    """Files of one checkpoint.

    Model ranks number the pipeline stages and, within each, the tensor-parallel ranks.
    """

    directory: Path
    model: dict[int, Path] = field(default_factory=dict)
    """Model file of each model rank; without ZeRO it also contains the optimizer's state."""
    divided_model: dict[Rank, Path] = field(default_factory=dict)
    """Model files of ZeRO stage 3, by data-parallel rank and model rank."""
    optimizer: dict[Rank, Path] = field(default_factory=dict)
    """Files with partitions of the optimizer's state, by data-parallel rank and model rank."""
    layers: dict[Rank, Path] = field(default_factory=dict)
    """Files of a pipeline's layers, by layer number and tensor-parallel rank."""
    universal: dict[str, Path] = field(default_factory=dict)
    """Directories of the parameters of a universal checkpoint, by name."""

    @property
    def files(self) -> tuple[Path, ...]:
        """All files of the checkpoint."""
        parameters = [
            path for folder in self.universal.values() for path in sorted(glob(folder, "*.pt"))
        ]
        saved = (self.model, self.divided_model, self.optimizer, self.layers)
        return (*(path for kind in saved for path in kind.values()), *parameters)

    @cached_property
    def states(self) -> dict[int, Mapping[str, Any]]:
        """Content of each model rank's model file; with ZeRO stage 3, of the first replica's."""
        paths = self.model or {
            rank: path for (replica, rank), path in self.divided_model.items() if replica == 0
        }
        return {rank: load_inert_mapping(path) for rank, path in sorted(paths.items())}

    def path_of(self, rank: int) -> Path:
        """Return the path of the file with `states[rank]`."""
        return self.model[rank] if self.model else self.divided_model[0, rank]

    @cached_property
    def tensor_size(self) -> int:
        """Tensor parallel size. Raises CheckpointError if files of a rank are missing."""
        count = len(self.states)
        dimensions = next(iter(self.states.values())).get("checkpoint_parallel_dimensions")
        if isinstance(dimensions, Mapping) and isinstance(dimensions.get("tp_degree"), int):
            size: int = dimensions["tp_degree"]
        else:
            size = 1 + max(rank for _, rank in self.layers) if self.layers else count
        if size < 1 or count % size:
            raise CheckpointError(
                f"{self.directory} has files of {count} model ranks, which is no multiple of the "
                f"tensor parallel size of {size}: a file is missing, use a whole checkpoint"
            )
        return size


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise CheckpointError naming `path` if its content is not in DeepSpeed's format."""
    try:
        yield
    except (
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        reason = one_line(error, 200)
        raise CheckpointError(
            f"{path} is not as DeepSpeed writes it ({type(error).__name__}: {reason}): use another "
            "checkpoint"
        ) from error


def zero_stage(value: Any) -> Any:
    """Return a stage of ZeRO, which a file may hold as a member of DeepSpeed's enumeration.

    Python 3.11.0 to 3.11.3 pickle a member by its name, others by its value.
    """
    arguments = value.given if isinstance(value, Record) else ()
    match arguments:
        case (_, str(name)):
            return _STAGES.get(name, name)
        case (number, *_):
            return number
    return value


def checkpoint_directory(directory: Path) -> Path:
    """Return the directory of one checkpoint.

    Args:
        directory: that directory, or a run's directory with a file `latest`.

    Raises:
        CheckpointError: if there is no checkpoint.
    """
    if not is_dir(directory):
        raise CheckpointError(
            f"{directory} is no directory: give a run's with a file latest, or one global_step*"
        )
    if is_dir(directory / UNIVERSAL) or any(glob(directory, "*_states.pt")):
        return directory
    tracker = next((directory / name for name in LATEST if is_file(directory / name)), None)
    if tracker is None:
        raise CheckpointError(
            f"{directory} is no checkpoint of DeepSpeed: it has neither *_model_states.pt, nor "
            f"{UNIVERSAL}/, nor a file latest that names a directory which has"
        )
    try:
        tag = regular(tracker).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{tracker} cannot be read ({reason_of(error)}): give the directory of one checkpoint"
        ) from error
    if not tag or not is_dir(directory / tag):
        raise CheckpointError(
            f"{tracker} names {tag!r}, which is not there: give the directory of one checkpoint"
        )
    return directory / tag


def saved_files(directory: Path) -> Saved:
    """List the files in the directory of one checkpoint.

    Raises:
        CheckpointError: if files of a rank are missing or duplicate, or files of ZeRO stage 3 are
            mixed with those of another stage.
        ConversionError: if the checkpoint contains experts.
    """
    saved = Saved(directory)
    for path in sorted(directory.iterdir()):
        if _EXPERT.fullmatch(path.name):
            raise ConversionError(f"{path} holds experts, which no model of megacore has")
        if match := _MODEL.fullmatch(path.name):
            saved.model[int(match[1])] = path
        elif match := _DIVIDED_MODEL.fullmatch(path.name):
            saved.divided_model[int(match[1]), int(match[2])] = path
        elif match := _LAYER.fullmatch(path.name):
            saved.layers[int(match[1]), int(match[2] or 0)] = path
        elif match := _OPTIMIZER.fullmatch(path.name):
            rank = int(match[1]), int(match[2])
            if rank in saved.optimizer:
                raise CheckpointError(
                    f"{saved.optimizer[rank]} and {path} are both of data-parallel rank {rank[0]} "
                    f"and model rank {rank[1]}: remove the one that an earlier run left"
                )
            saved.optimizer[rank] = path
    if is_dir(directory / UNIVERSAL):
        saved.universal = {
            path.parent.name: path.parent
            for path in sorted(glob(directory / UNIVERSAL, "*/fp32.pt"))
        }
        if not saved.universal:
            raise CheckpointError(
                f"{directory / UNIVERSAL} has no fp32.pt in any of its directories: use another"
            )
    _check(saved)
    return saved


def _check(saved: Saved) -> None:
    if not saved.model and not saved.divided_model:
        raise CheckpointError(f"{saved.directory} has no *_model_states.pt: use a whole checkpoint")
    if saved.model and saved.divided_model:
        raise CheckpointError(
            f"{saved.directory} has {next(iter(saved.divided_model.values())).name} of ZeRO stage "
            f"3 and {next(iter(saved.model.values())).name} of another stage: remove what an "
            "earlier run left"
        )
    ranks = {*saved.model, *(rank for _, rank in saved.divided_model)}
    optimizer_ranks = range(max((rank for _, rank in saved.optimizer), default=0) + 1)
    missing = sorted({*optimizer_ranks, *range(max(ranks) + 1)} - ranks)
    if missing:
        raise CheckpointError(
            f"{saved.directory} lacks *mp_rank_{missing[0]:02d}_model_states.pt, and has such "
            f"files of {len(ranks)} model ranks: use a whole checkpoint"
        )
    for kind in (saved.divided_model, saved.optimizer):
        _check_grid(saved.directory, kind, len(ranks))


def _check_grid(directory: Path, files: Mapping[Rank, Path], model_ranks: int) -> None:
    """Check that every model rank has a file of every data-parallel rank.

    The number of replicas is derived from the file names; the module `parts` checks it.
    """
    if not files:
        return
    replicas = 1 + max(replica for replica, _ in files)
    missing = [(d, m) for m in range(model_ranks) for d in range(replicas) if (d, m) not in files]
    if missing:
        suffix = next(iter(files.values())).name.rpartition("_mp_rank_")[2].partition("_")[2]
        named = [f"zero_pp_rank_{d}_mp_rank_{m:02d}_{suffix}" for d, m in missing]
        raise CheckpointError(
            f"{directory} lacks {listed(named)}: {model_ranks} model ranks and {replicas} "
            f"data-parallel ranks make {model_ranks * replicas} files, and {len(files)} are there"
        )
