"""Planted faults of conversions: what converters of transformers directories get wrong."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megacore.config.spec import ModelSpec

Weights = dict[str, Tensor]
Damage = Callable[[Path, ModelSpec], None]


@dataclass(frozen=True)
class Fault:
    """One damaged conversion."""

    name: str
    model: str
    """Name of the model in tests.convert._models."""
    damage: Damage
    """Function that damages a transformers directory."""
    cause: str
    """Cause that the comparison must name."""
    explains: bool = True
    """True if its correction changes the logits of the probe."""


def config(**changes: Any) -> Damage:
    """Return the damage of other values in config.json; None removes a key."""

    def damage(directory: Path, _spec: ModelSpec) -> None:
        path = directory / "config.json"
        values = json.loads(path.read_text(encoding="utf-8")) | changes
        for key in [key for key, value in changes.items() if value is None]:
            del values[key]
        path.write_text(json.dumps(values), encoding="utf-8")

    return damage


def theta(value: float) -> Damage:
    """Return the damage of another base of the rotary frequencies."""
    return config(rope_theta=value, rope_parameters={"rope_type": "default", "rope_theta": value})


def weights(change: Callable[[Weights, ModelSpec], None]) -> Damage:
    """Return the damage of changed weights."""

    def damage(directory: Path, spec: ModelSpec) -> None:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        change(tensors, spec)
        save_file(
            {name: tensor.clone().contiguous() for name, tensor in tensors.items()},
            path,
            metadata={"format": "pt"},
        )

    return damage


def each(part: str, function: Callable[[Tensor, ModelSpec], Tensor]) -> Damage:
    """Return the damage of every tensor whose name contains `part`."""

    def change(tensors: Weights, spec: ModelSpec) -> None:
        names = [name for name in tensors if part in name]
        assert names, f"no tensor is named like {part}"
        for name in names:
            tensors[name] = function(tensors[name], spec)

    return weights(change)


def both(*damages: Damage) -> Damage:
    """Return several damages in turn."""

    def damage(directory: Path, spec: ModelSpec) -> None:
        for function in damages:
            function(directory, spec)

    return damage


def without(part: str) -> Damage:
    """Return the damage of missing tensors."""

    def change(tensors: Weights, _spec: ModelSpec) -> None:
        names = [name for name in tensors if part in name]
        assert names
        for name in names:
            del tensors[name]

    return weights(change)


def exchange(first: str, second: str) -> Damage:
    """Return the damage of two kinds of tensors that are exchanged in every layer."""

    def change(tensors: Weights, _spec: ModelSpec) -> None:
        names = [name for name in tensors if first in name]
        assert names
        for name in names:
            other = name.replace(first, second)
            tensors[name], tensors[other] = tensors[other], tensors[name]

    return weights(change)


def layers(order: list[int], prefix: str) -> Damage:
    """Return the damage of layers in another order: layer i of B is layer order[i] of A."""

    def change(tensors: Weights, _spec: ModelSpec) -> None:
        old = dict(tensors)
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]
        for new, origin in enumerate(order):
            for name, tensor in old.items():
                if name.startswith(f"{prefix}{origin}."):
                    tensors[name.replace(f"{prefix}{origin}.", f"{prefix}{new}.", 1)] = tensor

    return weights(change)


def pairs(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """Order each head's rows for rotation in pairs, as Meta's files have them."""
    head = spec.model.head_dim
    return tensor.reshape(-1, 2, head // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def halves(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """Order each head's rows for rotation in halves, though they are already."""
    head = spec.model.head_dim
    return tensor.reshape(-1, head // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def by_head(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """Read rows [q, k, v][head][d] as [head][q, k, v][d]."""
    heads, head = spec.model.num_attention_heads, spec.model.head_dim
    rest = tensor.shape[1:]
    return tensor.reshape(3, heads, head, *rest).transpose(0, 1).reshape(tensor.shape)


def by_block(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """Read rows [head][q, k, v][d] as [q, k, v][head][d]."""
    heads, head = spec.model.num_attention_heads, spec.model.head_dim
    rest = tensor.shape[1:]
    return tensor.reshape(heads, 3, head, *rest).transpose(0, 1).reshape(tensor.shape)


def of_columns(function: Callable[[Tensor, ModelSpec], Tensor]) -> Any:
    """Apply a change of rows to the columns of GPT-2's Conv1D weights."""
    return lambda tensor, spec: (
        function(tensor.t().contiguous(), spec).t() if tensor.dim() == 2 else function(tensor, spec)
    )


def heads_by_size(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """Read rows [head][d] as [d][head]."""
    head = spec.model.head_dim
    return tensor.reshape(-1, head, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


def query_groups(tensor: Tensor, spec: ModelSpec) -> Tensor:
    """Order query heads [query head][group] instead of [group][query head]."""
    groups, head = spec.model.query_groups, spec.model.head_dim
    by_group = tensor.reshape(groups, -1, head, *tensor.shape[1:])
    return by_group.transpose(0, 1).reshape(tensor.shape)


def shards(tensor: Tensor, _spec: ModelSpec) -> Tensor:
    """Merge four shards in the wrong order."""
    first, second, third, fourth = tensor.chunk(4)
    return torch.cat([first, third, second, fourth])


def rolled(count: int) -> Callable[[Tensor, ModelSpec], Tensor]:
    """Return the change of rows that are shifted, as an index that is off does it."""
    return lambda tensor, _spec: torch.cat([tensor[:1].expand(count, -1), tensor[:-count]])


def moved_up(count: int) -> Callable[[Tensor, ModelSpec], Tensor]:
    """Return the change of a table whose first rows are another program's own."""
    return lambda tensor, _spec: torch.cat([tensor[count:], torch.zeros(count, *tensor.shape[1:])])


def gate_up_by_rank(tensors: Weights, _spec: ModelSpec) -> None:
    """Merge [gate; up] of two tensor-parallel ranks without separating them."""
    for name in [name for name in tensors if "gate_proj" in name]:
        other = name.replace("gate_proj", "up_proj")
        gate, up = tensors[name].chunk(2), tensors[other].chunk(2)
        merged = torch.cat([gate[0], up[0], gate[1], up[1]])
        tensors[name], tensors[other] = merged.chunk(2)


def tied_flag(tensors: Weights, _spec: ModelSpec) -> None:
    """Write the token embedding as the output layer."""
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def other_output_layer(tensors: Weights, _spec: ModelSpec) -> None:
    """Write an output layer of its own next to an embedding that the configuration ties."""
    tensors["lm_head.weight"] = 2 * tensors["transformer.wte.weight"]


def folded_norm(tensors: Weights, _spec: ModelSpec) -> None:
    """Multiply the weight of a norm into the layer behind it, and keep it in the norm."""
    for name in [name for name in tensors if "post_attention_layernorm" in name]:
        for projection in ("gate_proj", "up_proj"):
            target = name.replace("post_attention_layernorm", f"mlp.{projection}")
            tensors[target] = tensors[target] * tensors[name]


def all_as(dtype: torch.dtype) -> Damage:
    """Return the damage of weights that are rounded to a type."""
    return each("", lambda tensor, _spec: tensor.to(dtype))


def rows_to(count: int, *parts: str) -> Damage:
    """Return the damage of vocabulary tables with `count` rows, the new ones zero."""

    def change(tensors: Weights, _spec: ModelSpec) -> None:
        for name in [name for name in tensors if any(part in name for part in parts)]:
            table = tensors[name]
            zeros = torch.zeros(max(0, count - len(table)), *table.shape[1:])
            tensors[name] = torch.cat([table[:count], zeros])

    return weights(change)


def times(factor: float) -> Callable[[Tensor, ModelSpec], Tensor]:
    """Return the change of values that are multiplied."""
    return lambda tensor, _spec: tensor * factor


def plus(offset: float) -> Callable[[Tensor, ModelSpec], Tensor]:
    """Return the change of values that an offset is added to."""
    return lambda tensor, _spec: tensor + offset


def transposed(tensor: Tensor, _spec: ModelSpec) -> Tensor:
    """Transpose a matrix."""
    return tensor.t() if tensor.dim() == 2 else tensor


def noise(tensor: Tensor, _spec: ModelSpec) -> Tensor:
    """Add noise, which no arrangement explains."""
    generator = torch.Generator().manual_seed(0)
    return tensor + 0.05 * torch.randn(tensor.shape, generator=generator)


def ones(tensor: Tensor, _spec: ModelSpec) -> Tensor:
    """Replace values by ones."""
    return torch.ones_like(tensor)


def half_zero(tensor: Tensor, _spec: ModelSpec) -> Tensor:
    """Leave the last half of the rows at zero, as a lost shard does it."""
    return torch.cat([tensor[: len(tensor) // 2], torch.zeros_like(tensor[len(tensor) // 2 :])])


FAULTS = (
    # GPT-2
    Fault(
        "conv1d square not transposed", "gpt2", each("attn.c_proj.weight", transposed), "transposed"
    ),
    Fault("conv1d not transposed", "gpt2", each("mlp.c_fc.weight", transposed), "transposed"),
    Fault(
        "all conv1d not transposed",
        "gpt2",
        both(
            each("c_fc.weight", transposed),
            each("c_proj.weight", transposed),
            each("c_attn.weight", transposed),
        ),
        "transposed",
    ),
    Fault(
        "megatron qkv read as blocks",
        "gpt2",
        each("c_attn", of_columns(by_head)),
        "qkv_interleaving",
    ),
    Fault(
        "qkv blocks read by head", "gpt2", each("c_attn", of_columns(by_block)), "qkv_interleaving"
    ),
    Fault(
        "k and v exchanged",
        "gpt2",
        each("c_attn", of_columns(lambda t, _s: torch.cat([t.chunk(3)[i] for i in (0, 2, 1)]))),
        "qkv_order",
    ),
    Fault("positions off by two", "gpt2", each("wpe", moved_up(2)), "position_offset"),
    Fault("exact gelu", "gpt2", config(activation_function="gelu"), "activation"),
    Fault("relu", "gpt2", config(activation_function="relu"), "activation"),
    Fault("epsilon of gpt-2", "gpt2", config(layer_norm_epsilon=1e-2), "norm_epsilon"),
    Fault("norms exchanged", "gpt2", exchange("ln_1", "ln_2"), "norms_swapped"),
    Fault(
        "final norm dropped",
        "gpt2",
        both(each("ln_f.weight", ones), each("ln_f.bias", times(0))),
        "norm_reset",
    ),
    Fault("attention bias dropped", "gpt2", without("attn.c_proj.bias"), "missing_bias"),
    Fault("attention bias zero", "gpt2", each("attn.c_proj.bias", times(0)), "missing_bias"),
    Fault("layers by name order", "gpt2", layers([1, 0], "transformer.h."), "layer_order"),
    Fault(
        "last layer lost",
        "gpt2",
        both(layers([0], "transformer.h."), config(n_layer=1)),
        "layers_missing",
    ),
    Fault("layer repeated", "gpt2", layers([0, 0], "transformer.h."), "layers_missing"),
    Fault("scores not scaled", "gpt2", config(scale_attn_weights=False), "attention_scale"),
    Fault(
        "scores by layer", "gpt2", config(scale_attn_by_inverse_layer_idx=True), "attention_scale"
    ),
    Fault("heads", "gpt2", config(n_head=8), "heads"),
    Fault("vocabulary shifted", "gpt2", each("wte", rolled(1)), "vocabulary_shift"),
    Fault(
        "vocabulary padded",
        "gpt2",
        both(rows_to(112, "wte"), config(vocab_size=112)),
        "vocabulary_padding",
        explains=False,
    ),
    Fault(
        "vocabulary padded in the weights only",
        "gpt2",
        rows_to(112, "wte"),
        "vocabulary_padding",
        explains=False,
    ),
    Fault("nothing but noise", "gpt2", each("mlp.c_proj.weight", noise), "unexplained"),
    # Llama
    Fault(
        "rope not permuted",
        "llama",
        both(each("q_proj", pairs), each("k_proj", pairs)),
        "rope_layout",
    ),
    Fault(
        "rope permuted twice",
        "llama",
        both(each("q_proj", halves), each("k_proj", halves)),
        "rope_layout",
    ),
    Fault("keys not permuted", "llama-grouped", each("k_proj", pairs), "rope_layout"),
    Fault("base of the frequencies", "llama", theta(500000.0), "rope_base"),
    Fault(
        "base of version 4 lost",
        "llama-grouped",
        config(rope_theta=None, rope_parameters=None),
        "rope_base",
    ),
    Fault(
        "rope scaling",
        "llama",
        config(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
        "rope_scaling",
    ),
    Fault(
        "rope scaling beside rope parameters",
        "llama",
        config(rope_scaling={"type": "linear", "factor": 4.0}),
        "rope_scaling",
        explains=False,
    ),
    Fault(
        "other output layer beside a tied one",
        "gpt2",
        weights(other_output_layer),
        "tied_embeddings",
        explains=False,
    ),
    Fault("epsilon of llama", "llama", config(rms_norm_eps=1e-2), "norm_epsilon"),
    Fault("gate and up exchanged", "llama", exchange("gate_proj", "up_proj"), "gate_up_swapped"),
    Fault("gate and up by rank", "llama", weights(gate_up_by_rank), "gate_up_order"),
    Fault("silu or gelu", "llama", config(hidden_act="gelu"), "activation"),
    Fault("tied flag", "llama", config(tie_word_embeddings=True), "tied_embeddings"),
    Fault("output layer is the embedding", "llama", weights(tied_flag), "tied_embeddings"),
    Fault("bfloat16", "llama", all_as(torch.bfloat16), "precision"),
    Fault("float16", "llama", all_as(torch.float16), "precision"),
    Fault("norms with one added", "llama", each("norm.weight", plus(-1.0)), "norm_offset"),
    Fault("norm folded", "llama", weights(folded_norm), "folded_norm"),
    Fault("queries scaled", "llama", each("q_proj", times(8**-0.5)), "attention_scale"),
    Fault("embedding scaled", "llama", each("embed_tokens", times(32**0.5)), "embedding_scale"),
    Fault("shards in another order", "llama", each("down_proj", shards), "shard_order"),
    Fault("last shard lost", "llama", each("down_proj", half_zero), "missing_values"),
    Fault("biases lost", "llama-biases", without("q_proj.bias"), "missing_bias"),
    Fault(
        "biases denied",
        "llama-biases",
        config(attention_bias=False, mlp_bias=False),
        "missing_bias",
    ),
    Fault(
        "query heads by group",
        "llama-grouped",
        both(
            each("q_proj", query_groups),
            each("o_proj", lambda t, s: query_groups(t.t().contiguous(), s).t()),
        ),
        "query_groups_order",
    ),
    Fault("head size of q", "llama", each("q_proj", heads_by_size), "head_interleaving"),
    Fault(
        "key-value heads denied",
        "llama-grouped",
        config(num_key_value_heads=4),
        "config_contradicts_weights",
        explains=False,
    ),
    Fault("q and k exchanged", "llama", exchange("q_proj", "k_proj"), "qkv_order"),
    Fault("final norm lost", "llama", without("model.norm.weight"), "missing_tensors"),
    # Mistral, Qwen3
    Fault("window denied", "mistral", config(sliding_window=None), "sliding_window"),
    Fault("window", "mistral", config(sliding_window=3), "sliding_window"),
    Fault("value scaled", "mistral", each("v_proj", times(0.5)), "scaled"),
    Fault("norms of q and k exchanged", "qwen3", exchange("q_norm", "k_norm"), "norms_swapped"),
    Fault("norm of q lost", "qwen3", each("q_norm", ones), "norm_reset"),
    Fault(
        "window not used",
        "qwen3-window",
        config(use_sliding_window=False, sliding_window=None, max_window_layers=2),
        "sliding_window",
    ),
    Fault("head size", "qwen3", config(head_dim=8), "config_contradicts_weights", explains=False),
    # NeoX
    Fault("serial residual", "neox", config(use_parallel_residual=False), "parallel_residual"),
    Fault(
        "rotated share",
        "neox",
        config(
            rotary_pct=1.0,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            },
        ),
        "rope_share",
    ),
    Fault("neox qkv as blocks", "neox", each("query_key_value", by_head), "qkv_interleaving"),
    Fault("gelu of neox", "neox", config(hidden_act="gelu_new"), "activation"),
    Fault(
        "no numbers",
        "neox",
        each("dense_h_to_4h.weight", lambda t, _s: t.masked_fill(t > 0.5, float("nan"))),
        "not_finite",
    ),
    # BERT
    Fault("epsilon of bert", "bert", config(layer_norm_eps=1e-2), "norm_epsilon"),
    Fault("gelu of bert", "bert", config(hidden_act="gelu_new"), "activation"),
    Fault("segments lost", "bert", each("token_type_embeddings", times(0)), "constant"),
    Fault("q and k of bert", "bert", exchange("self.query", "self.key"), "qkv_order"),
    Fault("output bias lost", "bert", each("cls.predictions.bias", times(0)), "missing_bias"),
    # T5
    Fault("relu of t5", "t5", config(feed_forward_proj="gelu_new"), "activation"),
    Fault("distances", "t5", config(relative_attention_max_distance=128), "relative_bias"),
    Fault("gate of t5", "t5-v1.1", exchange("wi_0", "wi_1"), "gate_up_swapped"),
    Fault("tied head of t5", "t5-v1.1", config(tie_word_embeddings=True), "tied_embeddings"),
    Fault(
        "cross attention k and v",
        "t5",
        exchange("EncDecAttention.k", "EncDecAttention.v"),
        "qkv_order",
    ),
)
