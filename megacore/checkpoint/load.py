"""Loading: names, shapes and types are compared first, then filled in place; no pickle is executed.

Each rank reads what it needs by itself, so loading needs no process group and cannot deadlock.
"""

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from megacore.checkpoint.format import latest_complete, read_state
from megacore.checkpoint.metadata import SafeFileSystemReader
from megacore.errors import CheckpointError

__all__ = ["latest_complete", "load_checkpoint", "read_state", "read_tensors", "tensor_shapes"]

_SHOWN = 4


def load_checkpoint(path: Path, tensors: Mapping[str, torch.Tensor], *, prefix: str = "") -> dict[str, Any]:
    """Fill `tensors` in place from the checkpoint in `path` and return its state that is no tensor.

    `tensors` must be exactly the checkpoint's tensors whose name starts with `prefix`, with the same global shape
    and dtype; a DTensor takes its shard, whatever layout wrote the checkpoint. The files' hashes are not checked
    again: take `path` from `latest_complete`, or call `format.verify` first.

    Raises CheckpointError that shows both sides of every difference, before anything was changed, or when a file
    is damaged or holds anything but tensors.
    """
    reader = SafeFileSystemReader(path)
    state = read_state(path)
    saved = {name: entry for name, entry in reader.tensors.items() if name.startswith(prefix)}
    _check_names(path, saved, tensors)
    _check_entries(path, saved, tensors)
    _fill(reader, tensors, path)
    return state


def read_tensors(
    path: Path, names: Iterable[str] | None = None, *, prefix: str = "", dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Whole tensors of a checkpoint on the CPU: those in `names`, or all whose name starts with `prefix`.

    `dtype` converts floating-point tensors. Needs no process group. Raises CheckpointError for a name that the
    checkpoint has not.
    """
    reader = SafeFileSystemReader(path)
    wanted = list(names) if names is not None else [name for name in reader.tensors if name.startswith(prefix)]
    missing = [name for name in wanted if name not in reader.tensors]
    if missing or not wanted:
        asked = _listed(missing) if missing else f"any name that starts with {prefix!r}"
        raise CheckpointError(f"{path} has no tensor {asked}: it has {_listed(list(reader.tensors))}")
    tensors = {
        name: torch.empty(reader.tensors[name].size, dtype=reader.tensors[name].properties.dtype) for name in wanted
    }
    _fill(reader, tensors, path)
    return {
        name: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Global shape of every tensor in a checkpoint, by name. Raises CheckpointError."""
    return {name: tuple(entry.size) for name, entry in SafeFileSystemReader(path).tensors.items()}


def _check_names(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    missing = [name for name in wanted if name not in saved]
    unexpected = [name for name in saved if name not in wanted]
    if missing or unexpected:
        raise CheckpointError(
            f"{path} is of another model: it lacks {_listed(missing)} of the {len(wanted)} tensors asked for, "
            f"and has {_listed(unexpected)} among {len(saved)} that nobody asked for: load it with the configuration "
            "it was saved with"
        )


def _check_entries(path: Path, saved: Mapping[str, TensorStorageMetadata], wanted: Mapping[str, torch.Tensor]) -> None:
    differing = [
        f"{name} is {_form(entry.size, entry.properties.dtype)} there and "
        f"{_form(wanted[name].shape, wanted[name].dtype)} here"
        for name, entry in saved.items()
        if (entry.size, entry.properties.dtype) != (wanted[name].shape, wanted[name].dtype)
    ]
    if differing:
        raise CheckpointError(
            f"{path} is of another model: {_listed(differing)}: load it with the configuration it was saved with"
        )


def _fill(reader: SafeFileSystemReader, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Read the slices of `tensors` from the files."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(dict(tensors), storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
    except CheckpointException as error:
        _, (cause, _) = next(iter(error.failures.items()))
        reason = " ".join(str(cause).split())[:300]
        raise CheckpointError(
            f"{path} cannot be read: {type(cause).__name__}: {reason}: use another checkpoint"
        ) from error


def _form(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _listed(items: list[str]) -> str:
    """The first few of many, or `none`."""
    shown = ", ".join(items[:_SHOWN]) or "none"
    return f"{shown} and {len(items) - _SHOWN} more" if len(items) > _SHOWN else shown
