"""Loading: names, shapes and types are compared first, then filled in place; no pickle is executed.

Each rank reads what it needs by itself, so loading needs no process group and cannot deadlock.
"""

import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from megacore.checkpoint.collective import RankGroup
from megacore.checkpoint.format import latest_complete, read_state, reading
from megacore.checkpoint.metadata import SafeFileSystemReader
from megacore.checkpoint.shard import ShardLoadPlanner, TensorShard
from megacore.errors import CheckpointError

__all__ = ["latest_complete", "load_checkpoint", "names_of_all", "read_state", "read_tensors", "tensor_shapes"]

_SHOWN = 4


def load_checkpoint(
    path: Path,
    tensors: Mapping[str, torch.Tensor | TensorShard],
    *,
    prefix: str = "",
    expected: Collection[str] | None = None,
) -> dict[str, Any]:
    """Fill `tensors` in place from the checkpoint in `path` and return its state that is no tensor.

    The files' hashes are not checked again: take `path` from `latest_complete`, or call `format.verify` first. The
    checkpoint is not deleted while it is read; hold `format.reading` around several readings that belong together.

    Args:
        path: of the checkpoint, whatever layout wrote it.
        tensors: what this rank wants, by global name, with the checkpoint's global shapes and dtypes; a TensorShard
            gets its rectangles.
        prefix: what the names of a part of the checkpoint start with, if only that part is loaded.
        expected: names that all ranks want together (see `names_of_all`); None means those of `tensors`.

    Raises:
        CheckpointError: `expected` are not exactly the checkpoint's names that start with `prefix`, or a shape or
            dtype differs: both sides are shown, and nothing was changed. Or a file is damaged, or holds anything but
            tensors, or `path` is no complete checkpoint.
    """
    with reading(path):
        reader = SafeFileSystemReader(path)
        state = read_state(path)
        saved = {name: entry for name, entry in reader.tensors.items() if name.startswith(prefix)}
        _check_names(path, saved, {*tensors, *(expected or ())})
        _check_entries(path, saved, tensors)
        _fill(reader, tensors, path)
        return state


def names_of_all(tensors: Iterable[str], group: dist.ProcessGroup | None = None) -> frozenset[str]:
    """The names that the ranks of `group` (None: all ranks, or one alone) hold together. Collective."""
    own = sorted(tensors)
    return frozenset(name for names in RankGroup(group).everywhere(lambda: own) for name in names)


def read_tensors(
    path: Path, names: Iterable[str] | None = None, *, prefix: str = "", dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Whole tensors of a checkpoint on the CPU: those in `names`, or all whose name starts with `prefix`.

    `dtype` converts floating-point tensors. Needs no process group. Raises CheckpointError for a name that the
    checkpoint has not.
    """
    with reading(path):
        tensors = _read_whole(SafeFileSystemReader(path), path, names, prefix)
    return {
        name: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def _read_whole(
    reader: SafeFileSystemReader, path: Path, names: Iterable[str] | None, prefix: str
) -> dict[str, torch.Tensor]:
    wanted = list(names) if names is not None else [name for name in reader.tensors if name.startswith(prefix)]
    missing = [name for name in wanted if name not in reader.tensors]
    if missing or not wanted:
        asked = _listed(missing) if missing else f"any name that starts with {prefix!r}"
        raise CheckpointError(f"{path} has no tensor {asked}: it has {_listed(list(reader.tensors))}")
    tensors = {
        name: torch.empty(reader.tensors[name].size, dtype=reader.tensors[name].properties.dtype) for name in wanted
    }
    _fill(reader, tensors, path)
    return tensors


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Global shape of every tensor in a checkpoint, by name. Raises CheckpointError."""
    return {name: tuple(entry.size) for name, entry in SafeFileSystemReader(path).tensors.items()}


def _check_names(path: Path, saved: Collection[str], wanted: Collection[str]) -> None:
    missing = sorted(set(wanted) - set(saved))
    unexpected = sorted(set(saved) - set(wanted))
    if missing or unexpected:
        raise CheckpointError(
            f"{path} is of another model: it lacks {_listed(missing)} of the {len(wanted)} tensors asked for, "
            f"and has {_listed(unexpected)} among {len(saved)} that nobody asked for: load it with the configuration "
            "it was saved with"
        )


def _check_entries(
    path: Path, saved: Mapping[str, TensorStorageMetadata], wanted: Mapping[str, torch.Tensor | TensorShard]
) -> None:
    differing = [
        f"{name} is {_form(saved[name].size, saved[name].properties.dtype)} there and "
        f"{_form(tensor.shape, tensor.dtype)} here"
        for name, tensor in wanted.items()
        if (saved[name].size, saved[name].properties.dtype) != (tensor.shape, tensor.dtype)
    ]
    if differing:
        raise CheckpointError(
            f"{path} is of another model: {_listed(differing)}: load it with the configuration it was saved with"
        )


def _fill(reader: SafeFileSystemReader, tensors: Mapping[str, torch.Tensor | TensorShard], path: Path) -> None:
    """Read the slices of `tensors` from the files."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(dict(tensors), storage_reader=reader, planner=ShardLoadPlanner(), no_dist=True)
    except CheckpointException as error:
        _, (cause, _) = next(iter(error.failures.items()))
        reason = " ".join(str(cause).split()).partition(". ")[0][:300]  # without torch's advice to execute it
        raise CheckpointError(
            f"{path} cannot be read: {type(cause).__name__}: {reason}: use another checkpoint"
        ) from error


def _form(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _listed(items: list[str]) -> str:
    """The first few of many, or `none`."""
    shown = ", ".join(items[:_SHOWN]) or "none"
    return f"{shown} and {len(items) - _SHOWN} more" if len(items) > _SHOWN else shown
