"""Import of nanotron's checkpoints of Llama and Qwen2 models.

`1000/` has `model_config.json`, `checkpoint_metadata.json`, and in `model/` a safetensors file for
each parameter and tensor-parallel rank, which says in its header where its values belong in the
complete parameter. Only weights are converted, and one tensor at a time is in memory.

Source: huggingface/nanotron, src/nanotron/serialize and examples/llama/convert_weights.py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megacore.artifact.files import read_json, reason_of, regular
from megacore.checkpoint.shard import tile
from megacore.config.model import ModelConfig, check_model
from megacore.config.rope import LinearRope
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.convert.key_map import (
    Entry,
    Fused,
    KeyMap,
    LazyTensors,
    Shape,
    embedding,
    fused_layer,
    name_mismatch,
    norm,
    output_layer,
)
from megacore.convert.megatron.args import usual_divisor
from megacore.convert.source import HALF_PRECISION, Foreign
from megacore.errors import CheckpointError, ConversionError, listed, one_line
from megacore.paths import is_dir, is_file, rglob

CONFIG_NAME = "model_config.json"
METADATA_NAME = "checkpoint_metadata.json"
LATEST_NAME = "latest.txt"
_KINDS = {"is_llama_config": "Llama", "is_qwen2_config": "Qwen2"}
_ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
_OFF = (
    "attention_bias",
    "moe_config",
    "no_rope_layer",
    "rope_scaling",
    "sliding_window_size",
)
"""Settings that are imported only with a false value or null."""
_FILE = re.compile(r"model_(\w+?)(?:_pp-rank-(\d+)-of-(\d+)_tp-rank-(\d+)-of-(\d+))?\.safetensors")
_NUMBER = re.compile(r"(?:np\.int\d+\()?(\d+)\)?")


def open_nanotron(directory: Path) -> Foreign:
    """Open a checkpoint: the directory of a step, or the root with `latest.txt`.

    Raises:
        CheckpointError: if a file is missing or damaged, or disagrees with another file.
        ConversionError: if our models do not support it.
    """
    where = _step_directory(directory)
    config = _json(where / CONFIG_NAME)
    kind = next((kind for key, kind in _KINDS.items() if config.get(key) is True), None)
    if kind is None:
        shown = ", ".join(key for key in config if key.startswith("is_")) or "no kind of model"
        raise ConversionError(
            f"{where / CONFIG_NAME} has {shown}: only Llama and Qwen2 models of nanotron are read"
        )
    spec = _spec(config, kind, where)
    parameters = _parameters(where)
    # Llamas saved before the setting existed rotate adjacent elements.
    interleaved = bool(config.get("rope_interleaved", kind == "Llama"))
    tensors = _our_tensors(parameters, spec, interleaved, where)
    metadata = where / METADATA_NAME
    step = _json(metadata).get("metas", {}) if is_file(metadata) else {}
    value = step.get("last_train_step") if isinstance(step, Mapping) else None
    iteration = value if type(value) is int and value >= 0 else 0
    files = [path for path in (where / CONFIG_NAME, metadata) if is_file(path)]
    files += [part.path for parts in parameters.values() for part in parts]
    half = any(part.dtype != "F32" for parts in parameters.values() for part in parts)
    return Foreign(
        "nanotron",
        f"nanotron {kind}",
        spec,
        tensors,
        tuple(files),
        iteration,
        (HALF_PRECISION,) if half else (),
    )


def _step_directory(directory: Path) -> Path:
    if not is_dir(directory):
        raise CheckpointError(
            f"{directory} is no directory: give one with {LATEST_NAME} or {CONFIG_NAME}"
        )
    if is_file(directory / CONFIG_NAME):
        return directory
    try:
        step = regular(directory / LATEST_NAME).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        raise CheckpointError(
            f"{directory} is no checkpoint of nanotron: it has neither {CONFIG_NAME} nor "
            f"{LATEST_NAME} with the number of a step"
        ) from None
    if not step.isdigit() or not is_file(directory / step / CONFIG_NAME):
        raise CheckpointError(
            f"{directory / LATEST_NAME} names {step[:50]!r}, where there is no {CONFIG_NAME}: give "
            "the directory of one step"
        )
    return directory / step


def _json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({reason_of(error)}): use another checkpoint"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no settings: use another checkpoint")
    return content


def _spec(config: Mapping[str, Any], kind: str, where: Path) -> ModelSpec:
    used = [f"{name} {config[name]!r}" for name in _OFF if config.get(name)]
    if config.get("rope_interleaved") and kind == "Qwen2" and not config.get("_use_qkv_packed"):
        used.append("rope_interleaved True without _use_qkv_packed")
    factor = config.get("rope_seq_len_interpolation_factor")
    if factor and not (kind == "Qwen2" and config.get("_use_qkv_packed")):
        used.append(f"rope_seq_len_interpolation_factor {factor!r} without Qwen2's _use_qkv_packed")
    if used:
        raise ConversionError(f"{where} was trained with {', '.join(used)}, which is not read")
    activation = config.get("hidden_act", "silu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ConversionError(f"{where} was trained with hidden_act {activation!r}, not read here")
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    try:
        vocabulary = config["vocab_size"]
        model = ModelConfig(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_attention_heads=config["num_attention_heads"],
            num_query_groups=None if groups in (None, heads) else groups,
            ffn_hidden_size=config["intermediate_size"],
            activation=_ACTIVATIONS[activation],  # type: ignore[arg-type]
            normalization="rmsnorm",
            layernorm_epsilon=config["rms_norm_eps"],
            position_embedding_type="rope",
            rotary_base=config["rope_theta"],
            rope_scaling=LinearRope(kind="linear", factor=factor) if factor else None,
            add_bias_linear=False,
            untie_embeddings_and_output_weights=not config["tie_word_embeddings"],
            max_position_embeddings=config["max_position_embeddings"],
            init_method_std=config.get("initializer_range", 0.02),
            hidden_dropout=0.0,
            attention_dropout=0.0,
            make_vocab_size_divisible_by=usual_divisor(vocabulary),
        )
        check_model("gpt", model, 1)
        eod = config.get("eos_token_id")
        known = type(eod) is int and 0 <= eod < vocabulary
        tokens = SpecialTokens(eod=eod if known else None)
        return ModelSpec(family="gpt", model=model, vocab_size=vocabulary, special_tokens=tokens)
    except (ValidationError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        reason = one_line(f"{type(error).__name__}: {error}", 300)
        raise CheckpointError(
            f"{where / CONFIG_NAME} describes no model: {reason}: use another checkpoint"
        ) from error


@dataclass(frozen=True)
class _Part:
    """File with a part of a parameter."""

    path: Path
    dtype: str
    """Type of the values, as safetensors names it."""
    shape: Shape
    """Shape of the complete parameter."""
    slices: tuple[tuple[tuple[slice, ...], tuple[slice, ...]], ...]
    """Pairs of a rectangle in the file's tensor and its place in the complete parameter."""


def _parameters(where: Path) -> dict[str, list[_Part]]:
    """Return the files of every parameter, by name."""
    root = where / "model"
    parameters: dict[str, list[_Part]] = {}
    for path in sorted(rglob(root, "*.safetensors")):
        match = _FILE.fullmatch(path.name)
        if match is None:
            raise ConversionError(
                f"{path} is not named as a parameter of nanotron without experts: only such are "
                "read"
            )
        name = ".".join((*path.parent.relative_to(root).parts, match[1]))
        parameters.setdefault(name, []).append(_part(path))
    if not parameters:
        raise CheckpointError(f"{root} has no safetensors files: use another checkpoint")
    return parameters


def _part(path: Path) -> _Part:
    """Read the header of a file."""
    try:
        with safe_open(regular(path), framework="pt") as file:
            if list(file.keys()) != ["data"]:
                raise ValueError(f"it has the tensors {listed(list(file.keys()))}")
            view, metadata = file.get_slice("data"), file.metadata() or {}
            local = tuple(view.get_shape())
            dtype = str(view.get_dtype())
        if dtype not in ("F32", "BF16", "F16"):
            raise ValueError(f"its tensor is of type {dtype}")
        if "unsharded_shape" not in metadata:
            whole = tuple(slice(0, length) for length in local)
            return _Part(path, dtype, local, ((whole, whole),))
        text = metadata["unsharded_shape"].strip("() ").rstrip(",")
        shape = tuple(_count(number) for number in text.split(",") if number.strip())
        slices = tuple(
            _pair(pair, local, shape) for pair in metadata["local_global_slices_pairs"].split(";")
        )
        return _Part(path, dtype, shape, slices)
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        reason = one_line(reason_of(error), 200)
        raise CheckpointError(
            f"{path} cannot be read ({reason}): use another checkpoint"
        ) from error


def _count(text: str) -> int:
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"its header has {text!r} where a number belongs")
    return int(match[1])


def _pair(text: str, local: Shape, whole: Shape) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    sides = [side.split("|") for side in text.split("#")]
    if len(sides) != 2 or any(len(side) != len(local) or len(side) != len(whole) for side in sides):
        raise ValueError(f"its header has slices {text[:80]!r}")
    first, second = (
        tuple(_slice(part, length) for part, length in zip(side, shape, strict=True))
        for side, shape in zip(sides, (local, whole), strict=True)
    )
    if [part.stop - part.start for part in first] != [part.stop - part.start for part in second]:
        raise ValueError(f"its header has slices of different lengths: {text[:80]!r}")
    return first, second


def _slice(text: str, length: int) -> slice:
    numbers = [None if part == "None" else _count(part) for part in text.split(",")]
    if len(numbers) != 3 or numbers[2] not in (None, 1):
        raise ValueError(f"its header has the slice {text[:40]!r}")
    start = 0 if numbers[0] is None else numbers[0]
    stop = length if numbers[1] is None else numbers[1]
    if not 0 <= start < stop <= length:
        raise ValueError(f"its header has the slice {text[:40]!r} of {length} elements")
    return slice(start, stop)


def _key_map(spec: ModelSpec) -> KeyMap:
    """Build the table of the weights."""
    words = "model.token_position_embeddings.pp_block.token_embedding.weight"
    entries: list[Entry | Fused] = [embedding(spec, words)]
    for layer in range(spec.model.num_layers):
        ours, theirs = f"encoder.layers.{layer}", f"model.decoder.{layer}.pp_block"
        entries += fused_layer(spec, ours, theirs, "attn")
    entries += norm(spec, "encoder.final_layernorm", "model.final_layer_norm.pp_block")
    entries += output_layer(spec, "model.lm_head.pp_block.weight")
    return KeyMap(tuple(entries))


def _our_tensors(
    parameters: Mapping[str, Sequence[_Part]], spec: ModelSpec, interleaved: bool, where: Path
) -> LazyTensors:
    """Return our fp32 parameters by global name, each joined from its files on access.

    With `interleaved` rotary positions, rows of queries and keys are reordered: adjacent elements
    of a head are rotated together there, and elements that are half a head apart here.

    Raises:
        CheckpointError: if a parameter is missing, unknown, incomplete or of a wrong shape.
    """
    table, model = _key_map(spec), spec.model
    mismatch = name_mismatch(parameters.keys(), table.their_shapes)
    if mismatch is not None:
        raise CheckpointError(
            f"{where} is of another model than its {CONFIG_NAME} says: {mismatch}: use another "
            "checkpoint"
        )
    for name, parts in parameters.items():
        _check_parts(name, parts, table.their_shapes[name], where)

    def read(name: str) -> Tensor:
        whole = _joined(parameters[name])
        if interleaved and name.endswith(".qkv_proj.weight"):
            rotated = whole[: (model.num_attention_heads + model.query_groups) * model.head_dim]
            pairs = rotated.view(-1, model.head_dim // 2, 2, model.hidden_size)
            rotated.copy_(pairs.transpose(1, 2).reshape(rotated.shape))
        return whole

    return table.ours(LazyTensors(parameters, read), str(where))


def _joined(parts: Sequence[_Part]) -> Tensor:
    """Read a complete parameter."""
    whole = torch.empty(parts[0].shape, dtype=torch.float32)
    for part in parts:
        with safe_open(part.path, framework="pt") as file:
            view = file.get_slice("data")
            for source, target in part.slices:
                whole[target] = view[source]
    return whole


def _check_parts(name: str, parts: Sequence[_Part], shape: Shape, where: Path) -> None:
    """Check that the files of a parameter give every element of this shape exactly once."""
    shapes = {part.shape for part in parts}
    if shapes != {shape}:
        raise CheckpointError(
            f"{where} has {name} of shape {sorted(shapes)[0]}, where its {CONFIG_NAME} says "
            f"{shape}: use another checkpoint"
        )
    places = [
        (
            tuple(side.start for side in target),
            tuple(side.stop - side.start for side in target),
        )
        for part in parts
        for _, target in part.slices
    ]
    if not tile(places, shape):
        raise CheckpointError(
            f"{where} does not hold every number of {name} exactly once: it has {len(parts)} files "
            "of it; use a whole checkpoint"
        )
