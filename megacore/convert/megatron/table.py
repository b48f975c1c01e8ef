"""Names and shards of a model's tensors in Megatron-LM's checkpoint files.

One table serves both directions.

A rank's file nests its tensors by module. This module joins the keys to dotted names such as
"language_model.encoder.layers.3.mlp.dense_4h_to_h.bias". Dotted names have the number of the layer
in the complete model; in files, layers start at 0 in every pipeline stage.

Checkpoints of Megatron core have other names for the same tensors. All layers of a tensor are one
tensor with a further dimension in front, or one tensor per layer. Transformer Engine names the
norms before a linear layer as part of it; local layers of early versions name them as modules of
their own.

Source: NVIDIA/Megatron-LM, megatron/legacy/model, megatron/training/checkpointing.py,
megatron/core/models/gpt/gpt_layer_specs.py and megatron/core/transformer/transformer_block.py.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megacore.config.model import ModelConfig
from megacore.config.spec import ModelSpec
from megacore.convert.key_map import SAME, Relayout, Shape
from megacore.errors import CheckpointError

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
SEGMENTS = 2
"""Rows of BERT's token type embedding, and outputs of its binary head."""
_LAYER = re.compile(r"^language_model\.encoder\.layers\.(\d+)\.")
_CONTAINERS = (
    "language_model.embedding.word_embeddings",
    "language_model.embedding.position_embeddings",
    "language_model.embedding.tokentype_embeddings",
    "language_model.encoder",
    "language_model.pooler",
    "language_model.output_layer",
    "lm_head",
    "binary_head",
    "word_embeddings_for_head",
)
"""Paths of the nested dictionaries in a file. The rest of a dotted name is a single key."""
_OLD_NAMES = (
    (re.compile(r"^language_model\.transformer\."), "language_model.encoder."),
    (re.compile(r"(?<=\d\.)attention\."), "self_attention."),
    (
        re.compile(
            r"(?<=input_)norm\.|(?<=post_attention_)norm\.|(?<=final_)norm\.|(?<=lm_head\.)norm\."
        ),
        "layernorm.",
    ),
)
"""Names of the same modules in earlier and later versions of Megatron-LM, with replacements."""
_NO_WEIGHTS = re.compile(r"_extra_state$|rotary\w*\.inv_freq$")
"""Entries that are not parameters: state of Transformer Engine and rotary tables."""
_CUTS = {
    "word_embeddings.weight": 0,
    "word_embeddings_for_head.weight": 0,
    "output_layer.weight": 0,
    "lm_head.bias": 0,
    "self_attention.query_key_value.weight": 0,
    "self_attention.query_key_value.bias": 0,
    "self_attention.dense.weight": 1,
    "mlp.dense_h_to_4h.weight": 0,
    "mlp.dense_h_to_4h.bias": 0,
    "mlp.dense_4h_to_h.weight": 1,
}
"""Dimension along which a tensor is divided over tensor-parallel ranks, by the end of its name. All
other tensors are complete on each rank."""


@dataclass(frozen=True)
class Slot:
    """One tensor of Megatron's format."""

    name: str
    """Dotted name of the tensor."""
    ours: tuple[str, ...]
    """Global names of our parameters that the tensor consists of."""
    shapes: tuple[Shape, ...]
    """Complete shapes of our parameters."""
    place: int | Literal["first", "last", "head copy"]
    """Layer or pipeline stage of the tensor. A head copy is in the last stage, unless that is also
    the first."""
    layout: Relayout = SAME
    """Relayout from one rank's shard to that rank's shards of our parameters; the same for every
    tensor parallel size."""

    @property
    def cut(self) -> int | None:
        """Dimension that is divided over tensor-parallel ranks; None if it is not divided."""
        return next((cut for end, cut in _CUTS.items() if self.name.endswith(end)), None)

    def shape(self, tensor: int) -> Shape:
        """Return the shape of one rank's shard at tensor parallel size `tensor`."""
        parts = tuple(
            torch.empty(
                [n // tensor if dim == self.cut else n for dim, n in enumerate(shape)],
                device="meta",
            )
            for shape in self.shapes
        )
        return tuple(self.layout.merge(parts).shape)

    def part(self, ours: Iterable[Tensor], rank: int, tensor: int) -> Tensor:
        """Return a copy of one rank's shard, from our complete tensors."""
        parts = (
            complete if self.cut is None else complete.chunk(tensor, self.cut)[rank]
            for complete in ours
        )
        return self.layout.merge(tuple(parts)).clone(memory_format=torch.contiguous_format)

    def whole(self, parts: Iterable[Tensor], ours: str) -> Tensor:
        """Return a copy of our complete tensor `ours`, from all ranks' shards in order."""
        index = self.ours.index(ours)
        pieces = [self.layout.split(part)[index] for part in parts]
        return torch.cat(pieces[:1] if self.cut is None else pieces, self.cut or 0)


def slots(spec: ModelSpec) -> tuple[Slot, ...]:
    """Build the table of a model in file order: embeddings, layers, final norm and heads."""
    model = spec.model
    table = [*_embedding(spec)]
    for layer in range(model.num_layers):
        table += _layer(model, layer)
    table += _norm(model, "encoder.final_layernorm", "last")
    table += _heads(spec)
    names = [slot.name for slot in table]
    assert len(set(names)) == len(names), "the table names a tensor twice"
    return tuple(table)


def stage_slots(table: Iterable[Slot], layers: range, *, first: bool, last: bool) -> Iterator[Slot]:
    """Return the slots of the pipeline stage with `layers`.

    `first` and `last` are True for the first and the last stage.
    """
    present = {"first": first, "last": last, "head copy": last and not first}
    return (
        slot
        for slot in table
        if (slot.place in layers if isinstance(slot.place, int) else present[slot.place])
    )


def _slot(name: str, shape: Shape, place: int | Literal["first", "last"]) -> Slot:
    return Slot(f"language_model.{name}", (name,), (shape,), place)


def _embedding(spec: ModelSpec) -> Iterator[Slot]:
    model = spec.model
    hidden = model.hidden_size
    table = (spec.padded_vocab_size, hidden)
    yield _slot(WORD_EMBEDDINGS, table, "first")
    if model.position_embedding_type == "learned_absolute":
        yield _slot(
            "embedding.position_embeddings.weight", (spec.max_position_embeddings, hidden), "first"
        )
    if spec.family == "bert":
        yield _slot("embedding.tokentype_embeddings.weight", (SEGMENTS, hidden), "first")


def _layer(model: ModelConfig, layer: int) -> Iterator[Slot]:
    hidden, inner = model.hidden_size, model.ffn_size
    prefix = f"encoder.layers.{layer}"
    yield from _norm(model, f"{prefix}.input_layernorm", layer)
    yield from _query_key_value(model, f"{prefix}.self_attention", layer)
    yield from _linear(
        model, f"{prefix}.self_attention.dense", (hidden, model.attention_size), layer
    )
    yield from _norm(model, f"{prefix}.post_attention_layernorm", layer)
    if model.gated:
        halves = (f"{prefix}.mlp.dense_h_to_4h_gate", f"{prefix}.mlp.dense_h_to_4h")
        yield from _joined(
            model,
            f"{prefix}.mlp.dense_h_to_4h",
            halves,
            ((inner, hidden), (inner, hidden)),
            layer,
            _GATED_HALVES,
        )
    else:
        yield from _linear(model, f"{prefix}.mlp.dense_h_to_4h", (inner, hidden), layer)
    yield from _linear(model, f"{prefix}.mlp.dense_4h_to_h", (hidden, inner), layer)


def _query_key_value(model: ModelConfig, prefix: str, layer: int) -> Iterator[Slot]:
    name, hidden = f"{prefix}.query_key_value", model.hidden_size
    if model.query_groups == model.num_attention_heads:
        yield from _linear(model, name, (3 * model.attention_size, hidden), layer)
        return
    parts = (f"{prefix}.query", f"{prefix}.key_value")
    shapes = ((model.attention_size, hidden), (2 * model.query_groups * model.head_dim, hidden))
    sharing = model.num_attention_heads // model.query_groups
    yield from _joined(model, name, parts, shapes, layer, _grouped_rows(sharing, model.head_dim))


def _heads(spec: ModelSpec) -> Iterator[Slot]:
    hidden, vocabulary = spec.model.hidden_size, spec.padded_vocab_size
    square, table = (hidden, hidden), (vocabulary, hidden)
    if spec.family == "bert":
        heads: dict[str, Shape] = {
            "lm_head.bias": (vocabulary,),
            "lm_head.dense.weight": square,
            "lm_head.dense.bias": (hidden,),
            "lm_head.layernorm.weight": (hidden,),
            "lm_head.layernorm.bias": (hidden,),
        }
        if spec.model.bert_binary_head:
            yield _slot("pooler.dense.weight", square, "last")
            yield _slot("pooler.dense.bias", (hidden,), "last")
            heads |= {"binary_head.weight": (SEGMENTS, hidden), "binary_head.bias": (SEGMENTS,)}
        for name, shape in heads.items():
            yield Slot(name, (name,), (shape,), "last")
    if spec.model.untie_embeddings_and_output_weights:
        yield _slot("output_layer.weight", table, "last")
    else:
        yield Slot("word_embeddings_for_head.weight", (WORD_EMBEDDINGS,), (table,), "head copy")


def _norm(model: ModelConfig, name: str, place: int | Literal["last"]) -> Iterator[Slot]:
    yield _slot(f"{name}.weight", (model.hidden_size,), place)
    if model.normalization == "layernorm":
        yield _slot(f"{name}.bias", (model.hidden_size,), place)


def _linear(model: ModelConfig, name: str, shape: Shape, layer: int) -> Iterator[Slot]:
    return _joined(model, name, (name,), (shape,), layer, SAME)


def _joined(
    model: ModelConfig,
    name: str,
    ours: tuple[str, ...],
    shapes: tuple[Shape, ...],
    layer: int,
    layout: Relayout,
) -> Iterator[Slot]:
    """Yield the slots of a weight and its bias, joined from our linear layers `ours`."""
    bias = model.qkv_bias if name.endswith("query_key_value") else model.add_bias_linear
    for end, columns in (("weight", slice(None)), ("bias", slice(1))):
        if end == "weight" or bias:
            parts = tuple(f"{part}.{end}" for part in ours)
            cut_shapes = tuple(shape[columns] for shape in shapes)
            yield Slot(f"language_model.{name}.{end}", parts, cut_shapes, layer, layout)


_GATED_HALVES = Relayout(lambda theirs: theirs.chunk(2), torch.cat)
"""Relayout of a gated layer's shard: first its rows for the activation, then its linear rows."""


def _grouped_rows(sharing: int, head_dim: int) -> Relayout:
    """Return the relayout from a grouped query_key_value to separate query and key_value.

    Rows [group][q of each of `sharing` heads, k, v][d] become [head][d] and [group][k, v][d].
    """
    rows = [sharing * head_dim, 2 * head_dim]

    def split(theirs: Tensor) -> tuple[Tensor, ...]:
        groups = theirs.reshape(-1, sum(rows), *theirs.shape[1:])
        return tuple(part.reshape(-1, *theirs.shape[1:]) for part in torch.split(groups, rows, 1))

    def merge(ours: tuple[Tensor, ...]) -> Tensor:
        rest = ours[0].shape[1:]
        groups = [part.reshape(-1, length, *rest) for part, length in zip(ours, rows, strict=True)]
        return torch.cat(groups, 1).reshape(-1, *rest)

    return Relayout(split, merge)


def current_rows(theirs: Tensor, version: float, head_dim: int) -> Tensor:
    """Reorder one rank's rows of query_key_value to [head][q, k, v][d].

    The order in the file is [q, k, v][head][d] for checkpoint_version below 1.0, [head][d][q, k, v]
    for 1.0, and already correct from 2.0 on.
    """
    rest = theirs.shape[1:]
    if version < 1.0:
        return theirs.reshape(3, -1, head_dim, *rest).transpose(0, 1).reshape(theirs.shape)
    if version < 2.0:
        return theirs.reshape(-1, head_dim, 3, *rest).transpose(1, 2).reshape(theirs.shape)
    return theirs


def nested(tensors: Iterable[tuple[str, Tensor]], first_layer: int) -> dict[str, Any]:
    """Nest the tensors of one stage as in its file, with layers numbered from 0."""
    model: dict[str, Any] = {}
    for name, tensor in tensors:
        local = _renumbered(name, -first_layer)
        container = next(prefix for prefix in _CONTAINERS if local.startswith(f"{prefix}."))
        target = model
        for key in container.split("."):
            target = target.setdefault(key, {})
        target[local.removeprefix(f"{container}.")] = tensor
    return model


def dotted(model: Mapping[str, Any], first_layer: int, where: str) -> dict[str, Tensor]:
    """Flatten one stage's dictionaries, of any version of Megatron-LM, to dotted names.

    Args:
        model: nested dictionaries of the file.
        first_layer: number of the stage's first layer in the complete model.
        where: file that errors name.

    Raises:
        CheckpointError: if a weight is not a tensor of floating-point numbers, or a tensor occurs
            twice.
    """
    tensors: dict[str, Tensor] = {}
    for old, value in leaves(model):
        name = current_name(old)
        if name is None:
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point():
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(
                f"{where} holds {kind} as {name} where a tensor of floating-point numbers belongs: "
                "use another"
            )
        if name in tensors:
            raise CheckpointError(
                f"{where} holds {name} twice, under an old name and a new one: use another"
            )
        tensors[name] = value
    return {_renumbered(name, first_layer): value for name, value in tensors.items()}


def layer_numbers(names: Iterable[str]) -> set[int]:
    """Return the layer numbers that occur in dotted names."""
    return {int(match[1]) for name in names if (match := _LAYER.match(name))}


def current_name(name: str) -> str | None:
    """Translate a dotted name of any version of Megatron-LM to this table's name.

    Returns None if the entry is not a weight.
    """
    if _NO_WEIGHTS.search(name):
        return None
    for old, new in _OLD_NAMES:
        name = old.sub(new, name)
    return name


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted name and value of every leaf of nested dictionaries."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _renumbered(name: str, shift: int) -> str:
    match = _LAYER.match(name)
    return (
        f"{name[: match.start(1)]}{int(match[1]) + shift}{name[match.end(1) :]}" if match else name
    )


_STACKS = {"gpt": "decoder", "bert": "encoder"}
"""Module with the layers, by family."""
_IN_LAYER: dict[str, tuple[str, ...]] = {
    "input_layernorm.": ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    "self_attention.query_key_value.": ("self_attention.linear_qkv.",),
    "self_attention.q_layernorm.": ("self_attention.q_layernorm.",),
    "self_attention.k_layernorm.": ("self_attention.k_layernorm.",),
    "self_attention.dense.": ("self_attention.linear_proj.",),
    "post_attention_layernorm.": ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    "mlp.dense_h_to_4h.": ("mlp.linear_fc1.",),
    "mlp.dense_4h_to_h.": ("mlp.linear_fc2.",),
}
"""Beginnings of the names within a layer; of several names, the first is written."""
_OUTSIDE = (
    ("language_model.encoder.", "{stack}."),
    ("language_model.", ""),
    ("lm_head.bias", "output_layer.bias"),
    ("lm_head.layernorm.", "lm_head.layer_norm."),
    ("", ""),
)
"""Beginnings of the names of all other tensors; the first that fits is replaced."""
_NAME_IN_LAYER = re.compile(r"^language_model\.encoder\.layers\.(\d+)\.(.+)$")
GATED = "mlp.linear_fc1."
"""Beginning of the name of a gated layer, whose halves are two tensors in some versions."""
HALVES = ("_w", "_v")
"""Ends of the names of these two tensors."""
OTHERS = re.compile(
    r"^(?:optimizer\.|chained_\d+\.|common_state/|rng_state(?:/|$)|rerun_state_machine_state)"
    r"|\._extra_state(?:/|$)"
)
"""Names of what is no parameter: the optimizer's state, states of random number generators, and
what Transformer Engine keeps for training in 8 bits."""


@dataclass(frozen=True)
class CoreName:
    """Place of a tensor of the table in Megatron core's form."""

    names: tuple[str, ...]
    """Names of the tensor, one of which is present; each may have `{layer}`."""
    layer: int | None
    """Number of the layer; None outside layers."""

    def separate(self) -> tuple[str, ...]:
        """Return the names with the layer's number."""
        return tuple(name.replace("layers.", f"layers.{self.layer}.", 1) for name in self.names)


def core_slots(spec: ModelSpec) -> tuple[Slot, ...]:
    """Return the table of a model, without copies for the last pipeline stage."""
    model = spec.model
    table = [slot for slot in slots(spec) if slot.place != "head copy"]
    if model.qk_layernorm:
        table += [
            Slot(f"language_model.{name}", (name,), ((model.head_dim,),), layer)
            for layer in range(model.num_layers)
            for name in _norms_of_heads(spec, layer)
        ]
    return tuple(table)


def _norms_of_heads(spec: ModelSpec, layer: int) -> Iterator[str]:
    for norm in ("q_layernorm", "k_layernorm"):
        for end in ("weight", "bias") if spec.model.normalization == "layernorm" else ("weight",):
            yield f"encoder.layers.{layer}.self_attention.{norm}.{end}"


def core_name(slot: Slot, family: str) -> CoreName:
    """Return the place of a slot's tensor."""
    stack = _STACKS[family]
    if match := _NAME_IN_LAYER.match(slot.name):
        rest = match[2]
        old = next(beginning for beginning in _IN_LAYER if rest.startswith(beginning))
        names = tuple(f"{stack}.layers.{new}{rest.removeprefix(old)}" for new in _IN_LAYER[old])
        return CoreName(names, int(match[1]))
    old, new = next(pair for pair in _OUTSIDE if slot.name.startswith(pair[0]))
    return CoreName((new.format(stack=stack) + slot.name.removeprefix(old),), None)
