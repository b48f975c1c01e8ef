"""Writing a transformers directory: weights, configuration, tokenizer.

`.safetensors` files are written tensor by tensor, so that no more than one of them is in memory.
Their layout (huggingface/safetensors): u64 little endian N, N bytes of JSON (name -> dtype, shape,
[begin, end) in the data), then the data, without holes, in the header's order. N is padded with
spaces to a multiple of 8. Several files are named by `model.safetensors.index.json`.
"""

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megacore.artifact.files import read_json, workspace_errors, write_json
from megacore.config.spec import ModelSpec
from megacore.convert.counterparts import Dtype
from megacore.convert.hf.config import CONFIG_NAME
from megacore.convert.hf.forms import hf_form_of, model_config
from megacore.convert.key_map import KeyMap
from megacore.errors import ConversionError

Shapes = Mapping[str, tuple[int, ...]]
MAX_SHARD_SIZE = 5_000_000_000
"""Bytes of one file's tensors; a larger tensor has a file to itself."""
FILE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_CODES: dict[Dtype, tuple[str, torch.dtype, torch.dtype]] = {
    "float32": ("F32", torch.float32, torch.int32),
    "bfloat16": ("BF16", torch.bfloat16, torch.int16),
}
"""Of each type: its name in the header, itself, and an integer of its size, which NumPy knows."""
_BLOCK = 1 << 20
"""Bytes that are converted and written at a time."""
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 40}
"""How an exported model writes when nothing else is asked: decoded greedily, small models repeat
themselves."""
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)


def write_model(
    directory: Path,
    spec: ModelSpec,
    tensors: Mapping[str, Tensor],
    *,
    dtype: Dtype = "float32",
    table: KeyMap | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> None:
    """Write weights and configuration; one tensor is in memory at a time.

    Args:
        directory: made if absent.
        spec: of the model.
        tensors: its weights under our names.
        dtype: of the files.
        table: of the weights; None takes that of the spec's class.
        max_shard_size: bytes of one file's tensors.

    Raises:
        ConversionError: no class of transformers is this model, or `tensors` are of another.
        WorkspaceError: the disk refuses.
    """
    table = table or hf_form_of(spec)[1].key_map(spec)
    with workspace_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(
        directory,
        table.their_shapes,
        table.forward(tensors),
        dtype=dtype,
        max_shard_size=max_shard_size,
    )
    write_json(directory / CONFIG_NAME, model_config(spec, dtype))
    generation = generation_config(spec)
    if generation:
        write_json(directory / "generation_config.json", generation)


def generation_config(spec: ModelSpec) -> dict[str, Any]:
    """`generation_config.json` of a model that writes; nothing of one that does not."""
    special, eod = spec.special_tokens, spec.special_tokens.eod
    match spec.family:
        case "gpt":
            ends = (
                {}
                if eod is None
                else {"bos_token_id": eod, "eos_token_id": eod, "pad_token_id": eod}
            )
            return {**ends, **SAMPLING}
        case "t5":
            start = special.pad or 0
            end = eod if special.sep is None else special.sep
            ends = {} if end is None else {"eos_token_id": end}
            return {"decoder_start_token_id": start, "pad_token_id": start, **ends}
        case "bert":
            return {}


def copy_tokenizer(source: Path, directory: Path, positions: int) -> None:
    """Copy the tokenizer's files; its `model_max_length` becomes the model's positions.

    Raises ConversionError when the tokenizer has no configuration.
    """
    path = source / _TOKENIZER_CONFIG
    try:
        settings: dict[str, Any] = read_json(path)
    except (OSError, ValueError) as error:
        raise ConversionError(
            f"{path} cannot be read ({error}): build the tokenizer again"
        ) from error
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            with workspace_errors(directory):
                shutil.copyfile(source / name, directory / name)
    write_json(directory / path.name, {**settings, "model_max_length": positions})


def write_safetensors(
    directory: Path,
    shapes: Shapes,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: Dtype = "float32",
    max_shard_size: int = MAX_SHARD_SIZE,
) -> int:
    """Write `tensors` into `directory` and return the bytes of all files.

    Beside the one tensor that is asked for at a time, which may be a view, a few megabytes are
    allocated.

    Args:
        directory: where model.safetensors goes; with more than one file
            model-00001-of-0000N.safetensors and the index.
        shapes: says beforehand which tensors will come, in which order.
        tensors: name and values.
        dtype: of the files.
        max_shard_size: bytes of a file's tensors.

    Raises:
        WorkspaceError: the disk refuses.
    """
    shards = _shards(shapes, dtype, max_shard_size)
    names = [FILE_NAME]
    if len(shards) > 1:
        names = [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
    stream = iter(tensors)
    size = sum(
        _write_file(directory / name, shard, stream, dtype)
        for name, shard in zip(names, shards, strict=True)
    )
    surplus = next(stream, None)
    assert surplus is None, f"{surplus and surplus[0]} came after all that was announced"
    if len(shards) > 1:
        total = sum(math.prod(shape) for shape in shapes.values()) * _CODES[dtype][1].itemsize
        weight_map = {
            tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        }
        write_json(
            directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
    return size


def _shards(shapes: Shapes, dtype: Dtype, limit: int) -> list[Shapes]:
    """The tensors of each file, in order."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * _CODES[dtype][1].itemsize
        if shards[-1] and filled + size > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = shape
        filled += size
    return list(shards)


def _write_file(
    path: Path, shapes: Shapes, stream: Iterator[tuple[str, Tensor]], dtype: Dtype
) -> int:
    header = _header(shapes, dtype)
    with workspace_errors(path), open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for expected, shape in shapes.items():
            name, tensor = next(stream, ("nothing", None))
            assert tensor is not None, f"nothing came where {expected} {shape} was announced"
            assert (name, tuple(tensor.shape)) == (expected, shape), (
                f"{name} came where {expected} {shape} was announced"
            )
            _write_tensor(file, tensor.detach(), dtype)
            del tensor  # the next one is read while nothing keeps this one
        return file.tell()


def _write_tensor(file: IO[bytes], tensor: Tensor, dtype: Dtype) -> None:
    """Write a tensor of any strides, a block of rows at a time."""
    _, kind, bits = _CODES[dtype]
    rows = tensor if tensor.dim() else tensor[None]
    row_bytes = max(1, rows[0].numel() * kind.itemsize) if len(rows) else 1
    for block in torch.split(rows, max(1, _BLOCK // row_bytes)):
        values = block.to("cpu", kind).contiguous().view(bits)
        file.write(values.numpy().reshape(-1).data)


def _header(shapes: Shapes, dtype: Dtype) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    code, kind, _ = _CODES[dtype]
    offset = 0
    for name, shape in shapes.items():
        end = offset + kind.itemsize * math.prod(shape)
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    return text + b" " * (-len(text) % 8)
