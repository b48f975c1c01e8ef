"""Writing of a transformers directory: weights, configuration, tokenizer.

`.safetensors` files are written tensor by tensor, so that at most one tensor is in memory. Their
layout (huggingface/safetensors) is N as u64 little endian, N bytes of JSON (name -> dtype, shape,
[begin, end) in the data), then the data, without gaps, in the header's order. The JSON is padded
with spaces to a multiple of 8 bytes. `model.safetensors.index.json` lists the files if there are
several.
"""

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from megacore.artifact.files import read_json, reason_of, workspace_errors, write_json
from megacore.config.spec import ModelSpec
from megacore.convert.counterparts import Dtype
from megacore.convert.hf.config import CONFIG_NAME, GENERATION_NAME
from megacore.convert.hf.forms import hf_form_of, model_config
from megacore.convert.hf.t5 import caches_decoder, end_token
from megacore.convert.key_map import KeyMap
from megacore.convert.tokenizers import (
    ADDED_NAME,
    SENTENCEPIECE_NAMES,
    SPLIT_SPECIAL,
    read_tokenizer,
)
from megacore.errors import ConversionError
from megacore.paths import is_file
from megacore.tokenizer.load import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME

Shapes = Mapping[str, tuple[int, ...]]
_MAX_SHARD_SIZE = 5_000_000_000
"""Maximum bytes of tensors per file; a larger tensor gets a separate file."""
FILE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_CODES: dict[Dtype, tuple[str, torch.dtype, torch.dtype]] = {
    "float32": ("F32", torch.float32, torch.int32),
    "bfloat16": ("BF16", torch.bfloat16, torch.int16),
}
"""For each type, its name in the header, its torch type, and an integer type of the same size that
NumPy supports."""
_BLOCK = 1 << 20
"""Number of bytes that are converted and written at a time."""
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 40}
"""Default sampling of an exported model, because small models repeat themselves with greedy
decoding."""
_TOKENIZER_FILES = (
    TOKENIZER_NAME,
    *SENTENCEPIECE_NAMES,
    ADDED_NAME,
    "chat_template.jinja",
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
) -> None:
    """Write weights and configuration, with one tensor in memory at a time.

    Args:
        directory: target directory, created if it does not exist.
        spec: spec of the model.
        tensors: weights under our names.
        dtype: type of the written weights.
        table: table of the weights; None means that of the spec's class.

    Raises:
        ConversionError: if no class of transformers has this configuration, or `tensors` are of
            another model.
        WorkspaceError: if the files cannot be written.
    """
    table = table or hf_form_of(spec)[1].key_map(spec)
    with workspace_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory, table.their_shapes, table.forward(tensors), dtype=dtype)
    write_json(directory / CONFIG_NAME, model_config(spec, dtype))
    generation = generation_config(spec)
    if generation:
        write_json(directory / GENERATION_NAME, generation)


def generation_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the content of `generation_config.json`; empty for BERT, which does not generate."""
    special, eod = spec.special_tokens, spec.special_tokens.eod
    match spec.family:
        case "gpt":
            ids = {
                "bos_token_id": special.begin,
                "eos_token_id": special.all_ends(eod),
                "pad_token_id": eod if special.pad is None else special.pad,
            }
            return {key: value for key, value in ids.items() if value is not None} | SAMPLING
        case "t5":
            start = special.pad or 0
            end = special.all_ends(end_token(special))
            ends = {} if end is None else {"eos_token_id": end}
            cache = {} if caches_decoder(spec.model) else {"use_cache": False}
            return {"decoder_start_token_id": start, "pad_token_id": start, **ends, **cache}
        case "bert":
            return {}


def copy_tokenizer(source: Path, directory: Path, spec: ModelSpec) -> None:
    """Copy the tokenizer's files and set its `model_max_length` to the model's positions.

    The source is a directory of megacore or transformers. A tokenizer without a bos_token gets the
    model's, if it has one that is not eod. A SentencePiece model also gets a tokenizer.json that
    encodes and decodes as it does, if `SentencePieceModel.exported` has one. BERT's also returns
    segment ids, without which the model would take both sentences of a pair for the first one.

    Raises:
        ConversionError: if the tokenizer's configuration cannot be read or no token ends a
            document.
        DataFormatError: if its other files are damaged.
    """
    path = source / TOKENIZER_CONFIG_NAME
    try:
        settings: dict[str, Any] = read_json(path)
    except (OSError, ValueError) as error:
        raise ConversionError(
            f"{path} cannot be read ({reason_of(error)}): build the tokenizer again"
        ) from error
    for name in _TOKENIZER_FILES:
        if is_file(source / name):
            with workspace_errors(directory):
                shutil.copyfile(source / name, directory / name)
    model = next((source / name for name in SENTENCEPIECE_NAMES if is_file(source / name)), None)
    if model is not None and not is_file(source / TOKENIZER_NAME):
        settings |= _write_backend(model, directory)
    bos = spec.special_tokens.bos
    if bos is not None and settings.get("bos_token") is None:
        tokenizer, roles = read_tokenizer(source)
        tokens = [] if tokenizer is None else tokenizer.tokens()
        if roles.get("bos_token") is None and bos < len(tokens) and tokens[bos]:
            settings["bos_token"] = tokens[bos]
    if spec.family == "bert":
        settings.setdefault("model_input_names", ["input_ids", "token_type_ids", "attention_mask"])
    write_json(
        directory / path.name, {**settings, "model_max_length": spec.max_position_embeddings}
    )


def _write_backend(model: Path, directory: Path) -> dict[str, Any]:
    """Write the tokenizer.json of a SentencePiece model and return the settings that it needs.

    A model that has none needs no settings.
    """
    # imported here because only SentencePiece tokenizers need it
    from megacore.tokenizer.sentencepiece_model import SentencePieceModel

    backend = SentencePieceModel.read(model).exported()
    if backend is None:
        return {}
    with workspace_errors(directory):
        (directory / TOKENIZER_NAME).write_text(backend.to_str(), encoding="utf-8")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        SPLIT_SPECIAL: True,
    }


def write_safetensors(
    directory: Path,
    shapes: Shapes,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: Dtype = "float32",
    max_shard_size: int = _MAX_SHARD_SIZE,
) -> None:
    """Write `tensors` to `directory`.

    The function requests one tensor at a time, which may be a view, and allocates a few megabytes
    in addition.

    Args:
        directory: directory for model.safetensors or, if there is more than one file,
            model-00001-of-0000N.safetensors and the index.
        shapes: names and shapes of the tensors, in order.
        tensors: names and values in the same order.
        dtype: type of the written weights.
        max_shard_size: maximum bytes of tensors per file.

    Raises:
        WorkspaceError: if the files cannot be written.
    """
    shards = _shards(shapes, dtype, max_shard_size)
    names = [FILE_NAME]
    if len(shards) > 1:
        names = [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
    stream = iter(tensors)
    for name, shard in zip(names, shards, strict=True):
        _write_file(directory / name, shard, stream, dtype)
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


def _shards(shapes: Shapes, dtype: Dtype, limit: int) -> list[Shapes]:
    """Divide the tensors into files, in order."""
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
) -> None:
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
            del tensor  # free it before the next one is read


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
