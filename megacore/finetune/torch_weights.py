"""Weights that lie in torch's own files: read as tensors and nothing else, and written as safetensors.

Many models of the Hugging Face hub have `pytorch_model.bin` alone. Such a file is a pickle; torch's `weights_only`
reader knows tensors, numbers, text and containers, and refuses whatever would run code.
"""

import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megacore.errors import ConfigError

TORCH_NAME = "pytorch_model.bin"
TORCH_INDEX_NAME = "pytorch_model.bin.index.json"


def convert_torch_weights(path: str, source: Path, files: Sequence[str], target: Path) -> None:
    """Write the weights of torch's files into `target` as safetensors, in bf16 where all of them are, else in fp32.

    Values that are no weights (whole numbers, such as positions that are counted) are left out; tensors that share
    memory are written once for each name.

    Args:
        path: how the user named the model.
        source: directory of the files.
        files: `pytorch_model.bin`, or several and their index.
        target: directory to write into.

    Raises:
        ConfigError: a file is missing or damaged, or holds more than tensors.
        WorkspaceError: the disk refuses.
    """
    import torch

    from megacore.convert.safetensors_stream import write_safetensors

    shapes, kinds = dict[str, tuple[int, ...]](), set[torch.dtype]()
    names = _parts(path, source, files)
    for name, tensor in _tensors(path, source, names):
        shapes[name] = tuple(tensor.shape)
        kinds.add(tensor.dtype)
    if not shapes:
        raise ConfigError(f"model.path {path} has no weights in {', '.join(names)}: give a whole model")
    dtype = "bfloat16" if kinds == {torch.bfloat16} else "float32"
    write_safetensors(target, shapes, _tensors(path, source, names), dtype=dtype)  # type: ignore[arg-type]


def _parts(path: str, source: Path, files: Sequence[str]) -> list[str]:
    """The files that hold tensors, those of an index in its order."""
    if TORCH_INDEX_NAME not in files:
        if TORCH_NAME not in files:
            raise ConfigError(
                f"model.path {path} has {files[0]} and lacks {TORCH_INDEX_NAME}, which names all parts: get the model "
                "again"
            )
        return [TORCH_NAME]
    try:
        index = json.loads((source / TORCH_INDEX_NAME).read_text(encoding="utf-8"))
        names = list(dict.fromkeys(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"model.path {path}: {TORCH_INDEX_NAME} is damaged ({error}): get the model again") from error
    missing = [name for name in names if name not in files]
    if missing:
        raise ConfigError(f"model.path {path} lacks {missing[0]}, which {TORCH_INDEX_NAME} names: get the model again")
    return names


def _tensors(path: str, source: Path, names: Sequence[str]) -> "Iterator[tuple[str, Any]]":
    """Every weight with its name, of one file after another; a name that comes twice counts once."""
    seen = set[str]()
    for name in names:
        for key, tensor in _read(path, source / name).items():
            if tensor.is_floating_point() and key not in seen:
                seen.add(key)
                yield key, tensor


def _read(path: str, file: Path) -> "Mapping[str, Any]":
    import torch

    try:
        # Mapped, so that a weight is in memory only while it is written; files older than torch 1.6 cannot be.
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"model.path {path}: {file.name} holds more than tensors, which could run code and is never read: save the "
            "model as safetensors, which save_pretrained does"
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle has many ways to fail
        raise ConfigError(
            f"model.path {path}: {file.name} is damaged ({' '.join(str(error).split())[:200]}): get the model again"
        ) from error
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()
    ):
        raise ConfigError(f"model.path {path}: {file.name} is no mapping of names to weights: give a whole model")
    return found
