"""Checkpoints as Megatron core writes them, made with torch.distributed.checkpoint.

Names, shapes, the division of every tensor over the ranks, objects that are no tensors, and the
plans in `.metadata` are those of Megatron core; no code of it is used.
"""

import argparse
import enum
import io
import json
import pickle
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from megacore.config.rope import LinearRope, Llama3Rope, RopeScaling
from megacore.config.spec import ModelSpec
from tests.convert._megatron import megatron_spec, weights

ITERATION = 1000
ROWS, COLUMNS = 0, 1
_CUTS = {
    "word_embeddings.weight": ROWS,
    "output_layer.weight": ROWS,
    "output_layer.bias": ROWS,
    "linear_qkv.weight": ROWS,
    "linear_qkv.bias": ROWS,
    "linear_proj.weight": COLUMNS,
    "linear_fc1.weight": ROWS,
    "linear_fc1.bias": ROWS,
    "linear_fc2.weight": COLUMNS,
}
"""Dimension that Megatron core divides over the tensor-parallel ranks."""


class ModelType(enum.Enum):
    """Enumeration in the args, as Megatron core has many."""

    encoder_or_decoder = 1


ModelType.__module__ = "megatron.core.enums"


class Sharded:
    """Parts of a tensor by their first element; torch's planner calls the methods."""

    def __init__(self, shape: tuple[int, ...], parts: Mapping[tuple[int, ...], Tensor]) -> None:
        self.shape = torch.Size(shape)
        self.parts = {torch.Size(corner): part for corner, part in parts.items()}

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, corner),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(corner, part.size()),
                    TensorProperties.create_from_tensor(part),
                    self.shape,
                ),
            )
            for corner, part in self.parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(corner, part.size()) for corner, part in self.parts.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.parts[index.offset]


class Planner(DefaultSavePlanner):
    """Planner that writes objects as they are; Megatron core has packed them before."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, Sharded) else value

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object


def _rope_args(scaling: RopeScaling | None) -> dict[str, Any]:
    match scaling:
        case Llama3Rope(factor=factor):
            return {"use_rope_scaling": True, "rope_scaling_factor": factor}
        case LinearRope(factor=factor):
            return {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": int(factor)}
        case _:
            return {"use_rope_scaling": False, "rope_scaling_factor": 8.0}


def core_args(spec: ModelSpec, /, *, tensor: int = 1, **changes: Any) -> argparse.Namespace:
    """Return the arguments with which Megatron core builds the model."""
    model = spec.model
    values = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_size,
        "num_attention_heads": model.num_attention_heads,
        "group_query_attention": model.query_groups != model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "kv_channels": model.head_dim,
        "max_position_embeddings": spec.max_position_embeddings,
        "position_embedding_type": model.position_embedding_type,
        "rotary_base": int(model.rotary_base),
        "rotary_percent": model.rotary_percent,
        "normalization": "RMSNorm" if model.normalization == "rmsnorm" else "LayerNorm",
        "norm_epsilon": model.layernorm_epsilon,
        "swiglu": model.activation == "swiglu",
        "bert_binary_head": model.bert_binary_head,
        "bias_gelu_fusion": model.activation == "gelu_tanh",
        "openai_gelu": False,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.qkv_bias,
        **_rope_args(model.rope_scaling),
        "qk_layernorm": model.qk_layernorm,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_method_std,
        "window_size": (model.sliding_window - 1, 0) if model.sliding_window else None,
        "window_attn_skip_freq": model.window_attn_skip_freq,
        "softmax_type": "vanilla",
        "num_experts": None,
        "special_tokens": None,
        "padded_vocab_size": spec.padded_vocab_size,
        "make_vocab_size_divisible_by": 16,
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": 1,
        "params_dtype": torch.float32,
        "model_type": ModelType.encoder_or_decoder,
    }
    return argparse.Namespace(**(values | changes))


def core_tensors(spec: ModelSpec, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by Megatron core's names with the number of each layer."""
    model = spec.model
    yield "embedding.word_embeddings.weight", ours["embedding.word_embeddings.weight"]
    if model.position_embedding_type == "learned_absolute":
        yield "embedding.position_embeddings.weight", ours["embedding.position_embeddings.weight"]
    ends = ("weight", "bias") if model.add_bias_linear else ("weight",)
    norm_ends = ("weight", "bias") if model.normalization == "layernorm" else ("weight",)
    for layer in range(model.num_layers):
        old, new = f"encoder.layers.{layer}", f"decoder.layers.{layer}"
        for end in norm_ends:
            yield (
                f"{new}.self_attention.linear_qkv.layer_norm_{end}",
                ours[f"{old}.input_layernorm.{end}"],
            )
            yield (
                f"{new}.mlp.linear_fc1.layer_norm_{end}",
                ours[f"{old}.post_attention_layernorm.{end}"],
            )
            for norm in ("q_layernorm", "k_layernorm") if model.qk_layernorm else ():
                name = f"self_attention.{norm}.{end}"
                yield f"{new}.{name}", ours[f"{old}.{name}"]
        for end in ("weight", "bias") if model.qkv_bias else ("weight",):
            yield f"{new}.self_attention.linear_qkv.{end}", _qkv(spec, ours, old, end)
        for end in ends:
            dense, up = ours[f"{old}.self_attention.dense.{end}"], f"{old}.mlp.dense_h_to_4h"
            yield f"{new}.self_attention.linear_proj.{end}", dense
            halves = [f"{up}_gate.{end}"] if model.gated else []
            fc1 = torch.cat([ours[name] for name in [*halves, f"{up}.{end}"]])
            yield f"{new}.mlp.linear_fc1.{end}", fc1
            yield f"{new}.mlp.linear_fc2.{end}", ours[f"{old}.mlp.dense_4h_to_h.{end}"]
    for end in norm_ends:
        yield f"decoder.final_layernorm.{end}", ours[f"encoder.final_layernorm.{end}"]
    if model.untie_embeddings_and_output_weights:
        yield "output_layer.weight", ours["output_layer.weight"]


def bert_tensors(spec: ModelSpec, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield BERT's tensors by Megatron core's names: those of GPT's layers, and its heads."""
    for name, value in core_tensors(spec, ours):
        yield name.replace("decoder.", "encoder."), value
    table = "embedding.tokentype_embeddings.weight"
    yield table, ours[table]
    for name, value in ours.items():
        if name == "lm_head.bias":
            yield "output_layer.bias", value
        elif name.startswith(("lm_head.", "pooler.", "binary_head.")):
            yield name.replace("lm_head.layernorm.", "lm_head.layer_norm."), value


def _qkv(spec: ModelSpec, ours: Mapping[str, Tensor], layer: str, end: str) -> Tensor:
    """Return the rows [group][queries, k, v][d], head by head."""
    model, size = spec.model, spec.model.head_dim
    attention = f"{layer}.self_attention"
    if model.query_groups == model.num_attention_heads:
        return ours[f"{attention}.query_key_value.{end}"]
    queries = ours[f"{attention}.query.{end}"].split(size)
    keys = ours[f"{attention}.key_value.{end}"].split(size)
    each = model.num_attention_heads // model.query_groups
    rows: list[Tensor] = []
    for group in range(model.query_groups):
        rows += [*queries[group * each : (group + 1) * each], *keys[2 * group : 2 * group + 2]]
    return torch.cat(rows)


def core_state(
    spec: ModelSpec,
    ours: Mapping[str, Tensor],
    *,
    tensor: int = 1,
    stacked: bool = True,
    local_norms: bool = False,
    halves: str = "whole",
) -> dict[str, Any]:
    """Return the state to save: parts of tensors and packed objects.

    Args:
        spec: spec of the model.
        ours: our parameters.
        tensor: tensor parallel size.
        stacked: whether layers are one tensor, as they are unless their kinds differ.
        local_norms: whether norms have names of their own, as in early versions.
        halves: gated layers: `whole` (each half whole), `named` (each half a tensor) or `joined`
            (each rank's parts of both as one).
    """
    grouped: dict[str, dict[int, Tensor]] = {}
    tensors = bert_tensors if spec.family == "bert" else core_tensors
    for name, value in tensors(spec, ours):
        if local_norms:
            name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
            name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        stack, _, rest = name.partition(".layers.")
        layer, _, rest = rest.partition(".")
        if rest and stacked:
            grouped.setdefault(f"{stack}.layers.{rest}", {})[int(layer)] = value
        else:
            grouped[name] = {-1: value}
    state: dict[str, Any] = {}
    for name, layers in grouped.items():
        gated = spec.model.gated and "linear_fc1." in name and "norm" not in name
        if gated and halves == "named":
            for end, half in (("_w", 0), ("_v", 1)):
                part = {layer: value.chunk(2)[half] for layer, value in layers.items()}
                state[name + end] = _sharded(part, _cut(name), tensor)
        elif gated and halves == "joined":
            joined = {
                layer: torch.cat(
                    [
                        row
                        for pair in zip(*(h.chunk(tensor) for h in value.chunk(2)), strict=True)
                        for row in pair
                    ]
                )
                for layer, value in layers.items()
            }
            state[name] = _sharded(joined, _cut(name), tensor)
        else:
            state[name] = _sharded(layers, _cut(name), 2 * tensor if gated else tensor)
    for layer in range(spec.model.num_layers):
        key = f"decoder.layers.self_attention.linear_qkv._extra_state/shard_{layer}_4"
        state[key] = packed([io.BytesIO()])
    state["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = Sharded(
        (32,), {(0,): torch.ones(32)}
    )
    return state


def _cut(name: str) -> int | None:
    return next((cut for end, cut in _CUTS.items() if name.endswith(end)), None)


def _sharded(layers: Mapping[int, Tensor], cut: int | None, count: int) -> Sharded:
    parts = {}
    for layer, value in layers.items():
        front = () if layer < 0 else (layer,)
        pieces = value.chunk(1 if cut is None else count, cut or 0)
        for number, piece in enumerate(pieces):
            corner = [0] * value.dim()
            corner[cut or 0] = number * piece.shape[cut or 0]
            parts[(*front, *corner)] = piece[None].clone() if front else piece.clone()
    shape = tuple(value.shape)
    return Sharded(shape if -1 in layers else (len(layers), *shape), parts)


def packed(value: Any) -> io.BytesIO:
    """Return an object as Megatron core packs it."""
    stream = io.BytesIO()
    module = types.ModuleType(ModelType.__module__)
    module.ModelType = ModelType  # type: ignore[attr-defined]
    names = ("megatron", "megatron.core", ModelType.__module__)
    with mock.patch.dict(sys.modules, dict.fromkeys(names, module)):
        torch.save(value, stream)
    return stream


def write_core(
    root: Path,
    state: dict[str, Any],
    args: argparse.Namespace | None,
    *,
    common_file: bool = False,
    plans: bool = True,
) -> Path:
    """Write a checkpoint below `root` and return the directory of its iteration."""
    directory = root / f"iter_{ITERATION:07d}"
    directory.mkdir(parents=True)
    common = {"checkpoint_version": 3.0, "iteration": ITERATION, "content_metadata": {"a": 1}}
    common |= {} if args is None else {"args": args}
    if common_file:
        (directory / "common.pt").write_bytes(packed(common).getvalue())
    else:
        state = state | {"common_state/shard_0_1": packed([common])}
    writer = FileSystemWriter(directory, single_file_per_rank=False)
    save(state, storage_writer=writer, planner=Planner(), no_dist=True)
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    metadata.planner_data = None
    if plans:
        items = [
            item
            for name, value in state.items()
            if isinstance(value, Sharded)
            for item in value.__create_write_items__(name, value)
        ]
        metadata.all_local_plans = [SavePlan(items)]
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(backend))
    (root / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    return directory


def written_core(
    root: Path, name: str = "gpt", *, model: Mapping[str, Any] | None = None, **options: Any
) -> tuple[Path, dict[str, Tensor], ModelSpec]:
    """Write a checkpoint; return the directory of its iteration, its tensors and its spec."""
    spec = megatron_spec(name, **(model or {}))
    ours = weights(spec)
    file = {key: options.pop(key) for key in ("common_file", "plans") if key in options}
    state = core_state(spec, ours, **options)
    args = core_args(spec, tensor=options.get("tensor", 1))
    return write_core(root, state, args, **file), ours, spec
