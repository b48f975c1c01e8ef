"""Import of GPT-NeoX's checkpoints.

`global_step1000/` has a file `layer_NN-model_MM-model_states.pt` for each layer of the pipeline and
each tensor-parallel rank, or the same tensors in `mp_rank_MM_model_states.pt` without pipeline. The
configuration is in the YAML files of `configs/`. Only weights are converted. Nothing in the
files is executed, and one tensor at a time is in memory.

Source: EleutherAI/gpt-neox, megatron/checkpointing.py, megatron/model/transformer.py and
tools/ckpts/convert_neox_to_hf.py.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from megacore.config.model import ModelConfig, check_model
from megacore.config.spec import ModelSpec
from megacore.convert.deepspeed.files import Saved, checkpoint_directory, saved_files
from megacore.convert.inert import load_inert_mapping
from megacore.convert.key_map import LazyTensors, interleaved_rows
from megacore.convert.megatron.args import refuse_used, usual_divisor
from megacore.convert.source import HALF_PRECISION, Foreign, parameter_shapes
from megacore.errors import CheckpointError, ConfigError, ConversionError, listed, one_line
from megacore.foreign.files import read_yaml
from megacore.paths import glob

_ACTIVATIONS = {"relu": "relu", "swiglu": "swiglu", "geglu": "geglu"}
_POSITIONS = {"rotary": "rope", "learned": "learned_absolute", "alibi": "alibi", "none": "none"}
_NORMS = {
    "layernorm": ("layernorm", "layernorm_epsilon", 1e-5),
    "te_layernorm": ("layernorm", "layernorm_epsilon", 1e-5),
    "rmsnorm": ("rmsnorm", "rms_norm_epsilon", 1e-8),
    "te_rmsnorm": ("rmsnorm", "rms_norm_epsilon", 1e-8),
}
"""Our normalization, the name of its epsilon and GPT-NeoX's default, by the value of `norm`."""
_ATTENTION = frozenset({"global", "flash"})
_OFF: dict[str, tuple[Any, ...]] = {
    "gpt_j_tied": (),
    "moe_num_experts": (1,),
    "num_experts": (1,),
    "num_unique_layers": (),
    "opt_pos_emb_offset": (),
    "soft_prompt_tuning": (),
    "te_layernorm_mlp": (),
    "te_mha": (),
    "use_mup": (),
    "use_qk_layernorm": (),
}
"""Settings that our models support only with a false value, null or one of these values."""
_NUMBERED = re.compile(r"^sequential\.(\d+)\.(.+)$")
_NO_WEIGHTS = re.compile(r"_extra_state$|rotary_emb\.|inv_freq$|attention\.(?:masked_)?bias$")
_DOWN = ("linear2", "dense_4h_to_h", "w2")
"""Names of the MLP's second linear layer, by version and kind."""
_STEP = re.compile(r"global_step(\d+)")
_DRIFT = 0.05
"""Largest difference between the copies of a norm, relative to its largest number."""
Parts = Sequence[Tensor]
"""One tensor of each tensor-parallel rank."""


@dataclass(frozen=True)
class _Entry:
    """One of our parameters and its counterparts."""

    layer: int
    """Number of the layer in GPT-NeoX's pipeline."""
    names: tuple[str, ...]
    """Names in that layer, one of which is present."""
    merge: Callable[[Parts], Tensor]
    """Function from the tensors of all ranks to ours."""


def open_neox(directory: Path) -> Foreign:
    """Open a checkpoint: its directory, or the run's with a file `latest`.

    Raises:
        CheckpointError: if a file is missing or damaged, asks for more than data, or disagrees
            with another file.
        ConversionError: if our models do not support it.
    """
    where = checkpoint_directory(directory)
    saved = saved_files(where)
    paths = sorted(glob(where / "configs", "*.y*ml"))
    settings = _settings(paths, where)
    layers = _LayerFiles(saved, settings)
    spec = _spec(settings, layers, where)
    tensors = NeoxTensors(layers, spec)
    remarks = [*tensors.remarks]
    if layers.parts(0, "word_embeddings.weight")[0].dtype != torch.float32:
        remarks.append(HALF_PRECISION)
    remarks += _version_remarks(spec, settings)
    remarks.append(
        "the files do not say how many rows of the padded vocabulary are tokens: all of them count "
        "as such"
    )
    files = (*paths, *layers.files)
    iteration = _iteration(saved, where)
    return Foreign("neox", "GPT-NeoX gpt", spec, tensors, files, iteration, tuple(remarks))


def _version_remarks(spec: ModelSpec, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield what earlier versions of GPT-NeoX, which the files do not name, computed otherwise."""
    model = spec.model
    if model.query_groups != model.num_attention_heads:
        yield (
            "GPT-NeoX before 14 November 2024 (commit 96c242e) ordered the rows of queries, keys "
            "and values with num_kv_heads otherwise, and the files do not name their version: if "
            "an earlier one trained this model, it computes something else here"
        )
    if settings.get("norm") == "rmsnorm" and not settings.get("rmsnorm_fusion"):
        yield (
            "GPT-NeoX before 9 May 2025 (commit 4c9f108) added rms_norm_epsilon to the root of the "
            "mean square, not to the mean square, and the files do not name their version: if an "
            "earlier one trained this model, small inputs of norms are scaled otherwise here"
        )


def _settings(paths: Sequence[Path], where: Path) -> dict[str, Any]:
    """Merge the YAML files of a run; dashes in names become underscores."""
    if not paths:
        raise CheckpointError(
            f"{where} has no YAML files in configs/, without which its weights cannot be told "
            "apart: copy those of the run there"
        )
    settings: dict[str, Any] = {}
    for path in paths:
        try:
            content = read_yaml(path)
        except ConfigError as error:
            raise CheckpointError(str(error)) from error
        if not isinstance(content, Mapping):
            raise CheckpointError(f"{path} holds no settings: use another checkpoint")
        for key, value in content.items():
            name = str(key).replace("-", "_")
            if settings.setdefault(name, value) != value:
                raise CheckpointError(
                    f"{where / 'configs'} has {name} {settings[name]!r} and {value!r}: remove the "
                    "file that is not of this run"
                )
    return settings


def _iteration(saved: Saved, where: Path) -> int:
    value = saved.states[0].get("iteration")
    if type(value) is int and value >= 0:
        return value
    match = _STEP.fullmatch(where.name)
    return int(match[1]) if match else 0


class _LayerFiles:
    """Tensors of every layer by tensor-parallel rank, memory-mapped.

    Raises:
        CheckpointError: if a file is missing, or the number of ranks differs from the settings'.
    """

    def __init__(self, saved: Saved, settings: Mapping[str, Any]) -> None:
        self.where = saved.directory
        self.files = tuple(saved.layers.values()) or tuple(saved.model.values())
        self.states: dict[int, dict[int, dict[str, Tensor]]] = {}
        if saved.layers:
            for (layer, rank), path in saved.layers.items():
                self._add(layer, rank, load_inert_mapping(path))
        else:
            for rank, state in saved.states.items():
                module = state.get("module")
                for name, value in module.items() if isinstance(module, Mapping) else ():
                    if match := _NUMBERED.match(str(name)):
                        self._add(int(match[1]), rank, {match[2]: value})
        self.size = 1 + max((rank for ranks in self.states.values() for rank in ranks), default=-1)
        expected = settings.get("model_parallel_size", self.size)
        for layer, ranks in self.states.items():
            missing = sorted(set(range(self.size)) - ranks.keys())
            if missing or expected != self.size:
                raise CheckpointError(
                    f"{self.where} has layer {layer} of tensor ranks {sorted(ranks)}, where its "
                    f"configuration says model_parallel_size {expected}: use a whole checkpoint"
                )

    def _add(self, layer: int, rank: int, tensors: Mapping[str, Any]) -> None:
        target = self.states.setdefault(layer, {}).setdefault(rank, {})
        for name, value in tensors.items():
            if _NO_WEIGHTS.search(str(name)):
                continue
            if not isinstance(value, Tensor) or not value.is_floating_point():
                raise CheckpointError(
                    f"{self.where} holds {type(value).__name__} as {name} of layer {layer} where "
                    "weights belong: use another checkpoint"
                )
            target[str(name)] = value

    def parts(self, layer: int, name: str) -> list[Tensor]:
        """Return a tensor of every rank.

        Raises CheckpointError if a rank lacks it.
        """
        ranks = self.states.get(layer, {})
        if not ranks or any(name not in ranks[rank] for rank in range(self.size)):
            raise CheckpointError(
                f"{self.where} is of another model than its configuration says: it lacks {name} of "
                f"layer {layer}: use another checkpoint"
            )
        return [ranks[rank][name] for rank in range(self.size)]

    def name_of(self, layer: int, names: Sequence[str]) -> str:
        """Return the name that a layer has; the first if it has none."""
        present = [name for name in names if name in self.states.get(layer, {}).get(0, {})]
        return (present or list(names))[0]


def _spec(settings: Mapping[str, Any], layers: _LayerFiles, where: Path) -> ModelSpec:
    """Return the spec of the model that the settings describe."""
    kinds = set(_strings(settings.get("attention_config") or ["global"]))
    others = [f"attention_config {kind!r}" for kind in sorted(kinds - _ATTENTION)]
    refuse_used(settings, _OFF, where, others)
    rows = sum(len(part) if part.dim() else 0 for part in layers.parts(0, "word_embeddings.weight"))
    try:
        fields = _model_fields(settings, layers, kinds)
        model = ModelConfig(**fields, make_vocab_size_divisible_by=usual_divisor(rows))
        check_model("gpt", model, 1)
        return ModelSpec(family="gpt", model=model, vocab_size=rows)
    except (ValidationError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        reason = one_line(error, 300)
        raise CheckpointError(
            f"the configuration in {where / 'configs'} describes no model: {reason}: use another "
            "checkpoint"
        ) from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _model_fields(
    settings: Mapping[str, Any], layers: _LayerFiles, kinds: set[str]
) -> dict[str, Any]:
    heads, groups = settings["num_attention_heads"], settings.get("num_kv_heads")
    norm = settings.get("norm", "layernorm")
    if norm not in _NORMS:
        raise ConversionError(f"{layers.where} was trained with norm {norm!r}, which is not read")
    normalization, epsilon, usual = _NORMS[norm]
    position = settings.get("pos_emb", "learned")
    if position not in _POSITIONS:
        raise ConversionError(
            f"{layers.where} was trained with pos_emb {position!r}, which is not read"
        )
    biases = {settings.get(f"use_bias_in_{part}", True) for part in ("attn_linear", "mlp")}
    if len(biases) > 1:
        raise ConversionError(
            f"{layers.where} was trained with biases in only one of attention and MLP, which no "
            "model of megacore has"
        )
    activation = settings.get("activation", "gelu")
    if activation == "gelu":
        fused = settings.get("bias_gelu_fusion") and not settings.get("onnx_safe")
        ours = "gelu_tanh" if fused else "gelu"
    elif activation in _ACTIVATIONS:
        ours = _ACTIVATIONS[activation]
    else:
        raise ConversionError(
            f"{layers.where} was trained with activation {activation!r}, which is not read"
        )
    down = layers.parts(2, layers.name_of(2, [f"mlp.{name}.weight" for name in _DOWN]))
    rotary = {
        "rotary_base": settings.get("rotary_emb_base", 10000),
        "rotary_percent": settings.get("rotary_pct", 1.0),
    }
    return {
        "num_layers": settings["num_layers"],
        "hidden_size": settings["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": None if groups in (None, heads) else groups,
        "ffn_hidden_size": sum(part.shape[-1] for part in down),
        "activation": ours,
        "normalization": normalization,
        "layernorm_epsilon": settings.get(epsilon, usual),
        "position_embedding_type": _POSITIONS[position],
        "parallel_residual": bool(settings.get("gpt_j_residual", False)),
        "add_bias_linear": biases.pop(),
        "untie_embeddings_and_output_weights": bool(settings.get("no_weight_tying", False)),
        "max_position_embeddings": settings["max_position_embeddings"],
        "sliding_window": _window(settings, layers, kinds),
        **{
            name: settings[name]
            for name in ("hidden_dropout", "attention_dropout", "init_method_std")
            if name in settings
        },
        **(rotary if position == "rotary" else {}),
    }


def _window(settings: Mapping[str, Any], layers: _LayerFiles, kinds: set[str]) -> int | None:
    """Return our sliding_window, which counts the token itself.

    Flash attention has the window, and the mask of global attention in a pipeline, where a fused
    softmax may replace it.
    """
    width, pipeline = settings.get("sliding_window_width"), settings.get("pipe_parallel_size")
    if width is None or not (pipeline or "flash" in kinds):
        return None
    if "global" in kinds and not (
        pipeline and not settings.get("scaled_upper_triang_masked_softmax_fusion")
    ):
        raise ConversionError(
            f"{layers.where} was trained with sliding_window_width {width} in only some layers or "
            "kernels, which no model of megacore has"
        )
    return int(width) + 1


class NeoxTensors(LazyTensors):
    """Mapping of our fp32 parameters by global name, merged from all ranks on access.

    With parallel residual branches, each rank adds its own bias to its part of the sum, so the
    model's bias is the sum of the ranks'; else the ranks' biases are copies.

    Raises:
        CheckpointError: on construction, if a tensor is missing, unknown or of a wrong shape, or
            differs between ranks that must have the same values.
    """

    def __init__(self, layers: _LayerFiles, spec: ModelSpec) -> None:
        self._layers = layers
        self._spec = spec
        self.remarks: list[str] = []
        """Sentences about copies that differ."""
        self._entries = dict(self._table())
        super().__init__(self._entries, self._merged)
        used = self._check()
        unknown = [
            f"{name} of layer {layer}"
            for layer, ranks in sorted(layers.states.items())
            for rank in ranks.values()
            for name in rank
            if (layer, name) not in used
        ]
        if unknown:
            raise CheckpointError(
                f"{layers.where} is of another model than its configuration says: it has "
                f"{listed(unknown)}, for which there is no place: use another checkpoint"
            )

    def _merged(self, name: str) -> Tensor:
        entry = self._entries[name]
        parts = self._layers.parts(entry.layer, self._layers.name_of(entry.layer, entry.names))
        return entry.merge(parts).to(torch.float32).contiguous()

    def _table(self) -> Iterator[tuple[str, _Entry]]:
        model = self._spec.model
        last = model.num_layers
        words = "word_embeddings.weight"
        yield f"embedding.{words}", _Entry(0, (words,), _rows)
        if model.position_embedding_type == "learned_absolute":
            name = "position_embeddings.weight"
            yield f"embedding.{name}", _Entry(0, (name,), _copy)
        for layer in range(model.num_layers):
            yield from self._layer(f"encoder.layers.{layer}", layer + 2)
        yield from self._norm("encoder.final_layernorm", last + 3, "norm")
        if model.untie_embeddings_and_output_weights:
            yield "output_layer.weight", _Entry(last + 4, ("final_linear.weight",), _rows)

    def _layer(self, ours: str, layer: int) -> Iterator[tuple[str, _Entry]]:
        model = self._spec.model
        row_bias = _sum if model.parallel_residual else _copy
        yield from self._norm(f"{ours}.input_layernorm", layer, "input_layernorm")
        yield from self._norm(f"{ours}.post_attention_layernorm", layer, "post_attention_layernorm")
        for end in ("weight", "bias") if model.add_bias_linear else ("weight",):
            rows = _columns if end == "weight" else row_bias
            yield from self._queries_keys_values(f"{ours}.self_attention", layer, end)
            dense = f"attention.dense.{end}"
            yield f"{ours}.self_attention.dense.{end}", _Entry(layer, (dense,), rows)
            down = tuple(f"mlp.{name}.{end}" for name in _DOWN)
            yield f"{ours}.mlp.dense_4h_to_h.{end}", _Entry(layer, down, rows)
            up = tuple(f"mlp.{name}.{end}" for name in ("linear1", "dense_h_to_4h"))
            name = f"{ours}.mlp.dense_h_to_4h"
            if not model.gated:
                yield f"{name}.{end}", _Entry(layer, up, _rows)
            elif f"mlp.w1.{end}" in self._layers.states.get(layer, {}).get(0, {}):
                yield f"{name}.{end}", _Entry(layer, (f"mlp.w3.{end}",), _rows)
                yield f"{name}_gate.{end}", _Entry(layer, (f"mlp.w1.{end}",), _rows)
            else:
                yield f"{name}.{end}", _Entry(layer, up, _half(0))
                yield f"{name}_gate.{end}", _Entry(layer, up, _half(1))

    def _norm(self, ours: str, layer: int, theirs: str) -> Iterator[tuple[str, _Entry]]:
        names = (f"{theirs}.weight", f"{theirs}.scale")
        yield f"{ours}.weight", _Entry(layer, names, _copy)
        if self._spec.model.normalization == "layernorm":
            yield f"{ours}.bias", _Entry(layer, (f"{theirs}.bias",), _copy)

    def _queries_keys_values(self, ours: str, layer: int, end: str) -> Iterator[tuple[str, _Entry]]:
        """Yield the entries of the projections: rows [head][q, k, v][d], or grouped [q, k, v]."""
        model, size = self._spec.model, self._layers.size
        names = (f"attention.query_key_value.{end}",)
        if model.query_groups == model.num_attention_heads:
            yield f"{ours}.query_key_value.{end}", _Entry(layer, names, _rows)
            return
        groups = model.query_groups // size
        rows = [model.attention_size // size, *[groups * model.head_dim] * 2]
        pairs = interleaved_rows(groups, 2, model.head_dim)

        def queries(parts: Parts) -> Tensor:
            return torch.cat([torch.split(part, rows)[0] for part in parts])

        def keys(parts: Parts) -> Tensor:
            return torch.cat([pairs.merge(torch.split(part, rows)[1:]) for part in parts])

        yield f"{ours}.query.{end}", _Entry(layer, names, queries)
        yield f"{ours}.key_value.{end}", _Entry(layer, names, keys)

    def _check(self) -> set[tuple[int, str]]:
        """Check shapes and copies; return layer and name of the tensors that are used."""
        shapes = parameter_shapes(self._spec)
        assert shapes.keys() == self._entries.keys(), "the table has other tensors than the model"
        used: set[tuple[int, str]] = set()
        for ours, entry in self._entries.items():
            name = self._layers.name_of(entry.layer, entry.names)
            parts = self._layers.parts(entry.layer, name)
            used.add((entry.layer, name))
            self._check_ranks(name, entry.layer, parts)
            copied = entry.merge is _copy
            shape = tuple(parts[0].shape) if copied else _merged_shape(entry, parts)
            if shape != shapes[ours]:
                raise CheckpointError(
                    f"{self._layers.where} has {name} of layer {entry.layer} for {ours} of shape "
                    f"{shape}, where its configuration says {shapes[ours]}: use another checkpoint"
                )
            if copied:
                self._compare(name, entry.layer, parts)
        return used | self._tied(shapes)

    def _check_ranks(self, name: str, layer: int, parts: Parts) -> None:
        """Refuse ranks whose parts of a tensor have different shapes."""
        first = tuple(parts[0].shape)
        for rank, part in enumerate(parts):
            if tuple(part.shape) != first:
                raise CheckpointError(
                    f"{self._layers.where} has {name} of layer {layer} of shape {first} on tensor "
                    f"rank 0 and of {tuple(part.shape)} on tensor rank {rank}: use another "
                    "checkpoint"
                )

    def _compare(self, name: str, layer: int, parts: Parts) -> None:
        first = parts[0].float()
        largest = max(float((part.float() - first).abs().max()) for part in parts)
        if largest > _DRIFT * max(float(first.abs().max()), 1e-3):
            raise CheckpointError(
                f"{self._layers.where} holds two of what should be one: {name} of layer {layer} "
                f"differs between tensor ranks by up to {largest:.3g}: use another checkpoint"
            )
        if largest > 0 and not self.remarks:
            self.remarks.append(
                f"copies on tensor ranks have drifted apart, such as {name} of layer {layer} by "
                f"up to {largest:.3g}: their mean is taken"
            )

    def _tied(self, shapes: Mapping[str, tuple[int, ...]]) -> set[tuple[int, str]]:
        """Check the copy of a tied embedding at the pipeline's end, if there is one."""
        last = self._spec.model.num_layers + 4
        if self._spec.model.untie_embeddings_and_output_weights or last not in self._layers.states:
            return set()
        used = set()
        for name in self._layers.states[last][0]:
            same = zip(self._layers.parts(0, name), self._layers.parts(last, name), strict=True)
            if name == "word_embeddings.weight" and not all(torch.equal(a, b) for a, b in same):
                raise CheckpointError(
                    f"{self._layers.where} holds two of what should be one: {name} of layer {last} "
                    "differs from that of layer 0: use another checkpoint"
                )
            used.add((last, name))
        return used


def _merged_shape(entry: _Entry, parts: Parts) -> tuple[int, ...]:
    """Return the shape that ranks' tensors have together; that of the first if they do not fit."""
    try:
        return tuple(entry.merge([part.to("meta") for part in parts]).shape)
    except (RuntimeError, IndexError):
        return tuple(parts[0].shape)


def _rows(parts: Parts) -> Tensor:
    """Join the rows of all ranks."""
    return torch.cat(list(parts))


def _columns(parts: Parts) -> Tensor:
    """Join the columns of all ranks."""
    return torch.cat(list(parts), 1)


def _sum(parts: Parts) -> Tensor:
    return sum((part.float() for part in parts[1:]), parts[0].float())


def _copy(parts: Parts) -> Tensor:
    """Return what is the same on every rank, or the mean of what has drifted apart."""
    if all(torch.equal(part, parts[0]) for part in parts[1:]):
        return parts[0]
    return torch.stack([part.float() for part in parts]).mean(0)


def _half(index: int) -> Callable[[Parts], Tensor]:
    """Return the function that joins the first or second half of every rank's rows."""
    return lambda parts: torch.cat([part.chunk(2)[index] for part in parts])
