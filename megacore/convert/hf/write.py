"""Writing a transformers directory: weights, configuration, tokenizer."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megacore.artifact.files import workspace_errors, write_json
from megacore.config.spec import ModelSpec
from megacore.convert.exportable import Dtype
from megacore.convert.hf.config import CONFIG_NAME
from megacore.convert.hf.forms import form_of, model_config
from megacore.convert.hf.safetensors_stream import MAX_SHARD_SIZE, write_safetensors
from megacore.convert.key_map import KeyMap
from megacore.errors import ConversionError

SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 40}
"""How an exported model writes when nothing else is asked: decoded greedily, small models repeat themselves."""
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
    table = table or form_of(spec)[1].key_map(spec)
    with workspace_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory, table.their_shapes, table.forward(tensors), dtype=dtype, max_shard_size=max_shard_size)
    write_json(directory / CONFIG_NAME, model_config(spec, dtype))
    generation = generation_config(spec)
    if generation:
        write_json(directory / "generation_config.json", generation)


def generation_config(spec: ModelSpec) -> dict[str, Any]:
    """`generation_config.json` of a model that writes; nothing of one that does not."""
    special, eod = spec.special_tokens, spec.special_tokens.eod
    match spec.family:
        case "gpt":
            ends = {} if eod is None else {"bos_token_id": eod, "eos_token_id": eod, "pad_token_id": eod}
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
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConversionError(f"{path} cannot be read ({error}): build the tokenizer again") from error
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            with workspace_errors(directory):
                shutil.copyfile(source / name, directory / name)
    write_json(directory / path.name, {**settings, "model_max_length": positions})
