"""Llama (Touvron et al. 2023) and related models in the format of transformers.

These are LlamaForCausalLM, MistralForCausalLM with a sliding window (Jiang et al. 2023),
Qwen2ForCausalLM with biases of queries, keys and values (Yang et al. 2024), Qwen3ForCausalLM with
normalized queries and keys (Yang et al. 2025), and Phi3ForCausalLM with fused projections (Abdin et
al. 2024).
"""

from typing import Any

from megacore.config.rope import LongRope
from megacore.config.spec import ModelSpec
from megacore.convert.counterparts import counterpart
from megacore.convert.hf.config import THEIR_ACTIVATION, HfConfig
from megacore.convert.hf.rope import ORIGINAL, read_rope, write_rope
from megacore.convert.key_map import (
    Entry,
    Fused,
    KeyMap,
    embedding,
    fused_queries_keys_values,
    fused_rows,
    linear,
    norm,
    output_layer,
    queries_keys_values,
)


def key_map(spec: ModelSpec) -> KeyMap:
    """Build the table of a model with rotary positions, RMSNorm and a gated MLP."""
    return _table(spec, fused=False)


def fused_key_map(spec: ModelSpec) -> KeyMap:
    """Build the table of Phi-3, which fuses the projections that read the same input."""
    return _table(spec, fused=True)


def _table(spec: ModelSpec, *, fused: bool) -> KeyMap:
    entries: list[Entry | Fused] = [embedding(spec, "model.embed_tokens.weight")]
    for layer in range(spec.model.num_layers):
        ours, theirs = f"encoder.layers.{layer}", f"model.layers.{layer}"
        entries += _layer_entries(spec, ours, theirs, fused=fused)
    entries += norm(spec, "encoder.final_layernorm", "model.norm")
    entries += output_layer(spec, "lm_head.weight")
    return KeyMap(tuple(entries))


def _layer_entries(spec: ModelSpec, ours: str, theirs: str, *, fused: bool) -> list[Entry | Fused]:
    model = spec.model
    hidden, inner, bias = model.hidden_size, model.ffn_size, model.add_bias_linear
    attention, their_attention = f"{ours}.self_attention", f"{theirs}.self_attn"
    mlp, their_mlp = f"{ours}.mlp", f"{theirs}.mlp"
    if fused:
        projections = fused_queries_keys_values(spec, attention, f"{their_attention}.qkv_proj")
        gates: tuple[Entry | Fused, ...] = fused_rows(
            (f"{mlp}.dense_h_to_4h_gate", f"{mlp}.dense_h_to_4h"),
            f"{their_mlp}.gate_up_proj",
            (inner, hidden),
        )
    else:
        names = (f"{their_attention}.{part}_proj" for part in "qkv")
        projections = queries_keys_values(spec, attention, *names)
        gates = (
            *linear(
                f"{mlp}.dense_h_to_4h_gate", f"{their_mlp}.gate_proj", (inner, hidden), bias=bias
            ),
            *linear(f"{mlp}.dense_h_to_4h", f"{their_mlp}.up_proj", (inner, hidden), bias=bias),
        )
    entries: list[Entry | Fused] = [
        *norm(spec, f"{ours}.input_layernorm", f"{theirs}.input_layernorm"),
        *projections,
        *linear(
            f"{attention}.dense",
            f"{their_attention}.o_proj",
            (hidden, model.attention_size),
            bias=bias,
        ),
        *norm(spec, f"{ours}.post_attention_layernorm", f"{theirs}.post_attention_layernorm"),
        *gates,
        *linear(f"{mlp}.dense_4h_to_h", f"{their_mlp}.down_proj", (hidden, inner), bias=bias),
    ]
    if model.qk_layernorm:
        entries += norm(
            spec, f"{attention}.q_layernorm", f"{their_attention}.q_norm", model.head_dim
        )
        entries += norm(
            spec, f"{attention}.k_layernorm", f"{their_attention}.k_norm", model.head_dim
        )
    return entries


def write_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the class-specific values of config.json.

    The values of rotary positions are those of both transformers 4 and 5.
    """
    model, eod = spec.model, spec.special_tokens.eod
    values = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_dim,
        "hidden_act": THEIR_ACTIVATION[model.activation],
        **write_rope(spec),
        "initializer_range": model.init_method_std,
        "rms_norm_eps": model.layernorm_epsilon,
        "attention_dropout": model.attention_dropout,
        "bos_token_id": eod,
        "eos_token_id": eod,
        "pad_token_id": None,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "use_cache": True,
    }
    window = model.sliding_window
    windows = {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": model.num_layers if window is None else 0,
    }
    match counterpart(spec.family, model).model_type:
        case "llama":
            return values | {
                "attention_bias": model.add_bias_linear,
                "mlp_bias": model.add_bias_linear,
            }
        case "mistral":
            return values | {"sliding_window": window}
        case "phi3":
            del values["head_dim"]
            return values | _phi3(spec)
        case "qwen2":
            return values | windows
        case _:
            return values | {"attention_bias": False} | windows


def _phi3(spec: ModelSpec) -> dict[str, Any]:
    """Return the values of config.json that only Phi-3 has."""
    model = spec.model
    original = (
        model.rope_scaling.original_max_position_embeddings
        if isinstance(model.rope_scaling, LongRope)
        else spec.max_position_embeddings
    )
    return {
        ORIGINAL: original,
        "partial_rotary_factor": model.rotary_percent,
        "sliding_window": model.sliding_window,
        "resid_pdrop": 0.0,
    }


def read_config(config: HfConfig) -> dict[str, Any]:
    """Translate config.json to values of `ModelConfig`.

    Raises:
        ConversionError: if our models do not support a value.
    """
    model_type = config.get("model_type", str)
    heads = config.get("num_attention_heads", int)
    hidden = config.get("hidden_size", int)
    bias = model_type == "llama" and config.get("attention_bias", bool, False)
    if model_type == "llama":
        config.refuse_unless("mlp_bias", bias)
        config.refuse_unless("pretraining_tp", 1)
        config.refuse_unless("rope_interleaved", False)
    if model_type == "qwen2":
        config.refuse_unless("use_mrope", False)
    if model_type == "qwen3":
        config.refuse_unless("attention_bias", False)
    if model_type == "phi3":
        config.refuse_unless("resid_pdrop", 0.0)  # ours would drop the embedding too
    head_dim = config.optional("head_dim", int)
    if head_dim is None:
        head_dim = 128 if model_type == "qwen3" else hidden // max(heads, 1)
    return {
        "num_layers": config.get("num_hidden_layers", int),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": _groups(config, model_type, heads),
        "kv_channels": head_dim,
        "ffn_hidden_size": config.get("intermediate_size", int),
        "activation": config.activation("hidden_act", "silu", gated=True),
        "normalization": "rmsnorm",
        **read_rope(config, _POSITIONS[model_type]),
        "sliding_window": _window(config, model_type),
        "qk_layernorm": model_type == "qwen3",
        "add_bias_linear": bias,
        "add_qkv_bias": model_type == "qwen2",
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", bool, False),
        "hidden_dropout": 0.0,
        "attention_dropout": config.get("attention_dropout", float, 0.0),
        "init_method_std": config.get("initializer_range", float, 0.02),
        "layernorm_epsilon": config.get(
            "rms_norm_eps", float, 1e-5 if model_type == "phi3" else 1e-6
        ),
    }


_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768, "phi3": 4096}
"""Defaults of `max_position_embeddings` by `model_type`."""
_GROUPS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
"""Defaults of `num_key_value_heads` by `model_type`, where not the number of heads."""


def _groups(config: HfConfig, model_type: str, heads: int) -> int:
    """Return the number of key-value heads; null means one for each query head."""
    key = "num_key_value_heads"
    groups = config.optional(key, int)
    if groups is None:
        return heads if key in config.values else _GROUPS.get(model_type, heads)
    return groups


def _window(config: HfConfig, model_type: str) -> int | None:
    """Return the sliding window that all layers have, or None if no layer has one.

    Qwen2 and Qwen3 have it from layer `max_window_layers` on, or in the layers that `layer_types`
    names.
    """
    if model_type == "llama":
        return None
    window = config.optional("sliding_window", int)
    if model_type == "phi3":
        return window
    if window is None and "sliding_window" not in config.values:
        window = 4096
    if model_type == "mistral":
        return window
    first = config.get("max_window_layers", int, 28)
    types = config.optional("layer_types", list)
    if not config.get("use_sliding_window", bool, False):
        window = None
    if types is not None:
        config.refuse_unless(
            "layer_types", *([kind] * len(types) for kind in ("full_attention", _SLIDING))
        )
        sliding = _SLIDING in types
        if sliding and window is None:
            config.refuse_unless("layer_types", ["full_attention"] * len(types))
        return window if sliding else None
    layers = config.get("num_hidden_layers", int)
    if window is not None and 0 < first < layers:
        config.refuse_unless("max_window_layers", 0, layers)
    return window if first <= 0 else None


_SLIDING = "sliding_attention"


def module_pairs(spec: ModelSpec) -> list[tuple[str, str]]:
    """Return corresponding modules (ours, theirs) with equal outputs, in execution order."""
    pairs = [("embedding", "model.embed_tokens")]
    for layer in range(spec.model.num_layers):
        ours, theirs = f"encoder.layers.{layer}", f"model.layers.{layer}"
        pairs += [
            (f"{ours}.input_layernorm", f"{theirs}.input_layernorm"),
            (f"{ours}.self_attention", f"{theirs}.self_attn"),
            (f"{ours}.post_attention_layernorm", f"{theirs}.post_attention_layernorm"),
            (f"{ours}.mlp", f"{theirs}.mlp"),
            (ours, theirs),
        ]
    return [*pairs, ("encoder.final_layernorm", "model.norm")]
