"""Llama (Touvron et al. 2023) and related models in the format of transformers.

These are LlamaForCausalLM, MistralForCausalLM with a sliding window (Jiang et al. 2023), and
Qwen3ForCausalLM with normalized queries and keys (Yang et al. 2025).
"""

from typing import Any

from megacore.config.spec import ModelSpec
from megacore.convert.counterparts import counterpart
from megacore.convert.hf.config import THEIR_ACTIVATION, HfConfig
from megacore.convert.key_map import (
    Entry,
    KeyMap,
    embedding,
    linear,
    norm,
    output_layer,
    queries_keys_values,
)


def key_map(spec: ModelSpec) -> KeyMap:
    """Build the table of a model with rotary positions, RMSNorm and a gated MLP."""
    entries = [embedding(spec, "model.embed_tokens.weight")]
    for layer in range(spec.model.num_layers):
        entries += _layer_entries(spec, f"encoder.layers.{layer}", f"model.layers.{layer}")
    entries += norm(spec, "encoder.final_layernorm", "model.norm")
    entries += output_layer(spec, "lm_head.weight")
    return KeyMap(tuple(entries))


def _layer_entries(spec: ModelSpec, ours: str, theirs: str) -> list[Entry]:
    model = spec.model
    hidden, inner, bias = model.hidden_size, model.ffn_size, model.add_bias_linear
    attention, their_attention = f"{ours}.self_attention", f"{theirs}.self_attn"
    names = (f"{their_attention}.{part}_proj" for part in "qkv")
    entries = [
        *norm(spec, f"{ours}.input_layernorm", f"{theirs}.input_layernorm"),
        *queries_keys_values(spec, attention, *names),
        *linear(
            f"{attention}.dense",
            f"{their_attention}.o_proj",
            (hidden, model.attention_size),
            bias=bias,
        ),
        *norm(spec, f"{ours}.post_attention_layernorm", f"{theirs}.post_attention_layernorm"),
        *linear(
            f"{ours}.mlp.dense_h_to_4h_gate", f"{theirs}.mlp.gate_proj", (inner, hidden), bias=bias
        ),
        *linear(f"{ours}.mlp.dense_h_to_4h", f"{theirs}.mlp.up_proj", (inner, hidden), bias=bias),
        *linear(f"{ours}.mlp.dense_4h_to_h", f"{theirs}.mlp.down_proj", (hidden, inner), bias=bias),
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
        "max_position_embeddings": spec.max_position_embeddings,
        "initializer_range": model.init_method_std,
        "rms_norm_eps": model.layernorm_epsilon,
        "attention_dropout": model.attention_dropout,
        "rope_theta": model.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "bos_token_id": eod,
        "eos_token_id": eod,
        "pad_token_id": None,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "use_cache": True,
    }
    match counterpart(spec.family, model).model_type:
        case "llama":
            return values | {
                "attention_bias": model.add_bias_linear,
                "mlp_bias": model.add_bias_linear,
            }
        case "mistral":
            return values | {"sliding_window": model.sliding_window}
        case _:
            window = model.sliding_window
            return values | {
                "attention_bias": False,
                "use_sliding_window": window is not None,
                "sliding_window": window,
                "max_window_layers": model.num_layers if window is None else 0,
            }


def read_config(config: HfConfig) -> dict[str, Any]:
    """Translate config.json to values of `ModelConfig`.

    Raises:
        ConversionError: if our models do not support a value.
    """
    model_type = config.get("model_type", str)
    config.refuse_unless("pretraining_tp", 1)
    config.refuse_unless("partial_rotary_factor", 1.0)
    heads = config.get("num_attention_heads", int)
    hidden = config.get("hidden_size", int)
    defaults = {"llama": (heads, 2048), "mistral": (8, 131072), "qwen3": (32, 32768)}[model_type]
    bias = config.get("attention_bias", bool, False)
    config.refuse_unless("mlp_bias", bias)
    if model_type != "llama":
        config.refuse_unless("attention_bias", False)
    return {
        "num_layers": config.get("num_hidden_layers", int),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads", int, defaults[0]),
        "kv_channels": config.get(
            "head_dim", int, 128 if model_type == "qwen3" else hidden // heads
        ),
        "ffn_hidden_size": config.get("intermediate_size", int),
        "activation": config.activation("hidden_act", "silu", gated=True),
        "normalization": "rmsnorm",
        "position_embedding_type": "rope",
        "rotary_base": config.rope_base(),
        "sliding_window": _window(config, model_type),
        "qk_layernorm": model_type == "qwen3",
        "add_bias_linear": bias,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", bool, False),
        "max_position_embeddings": config.get("max_position_embeddings", int, defaults[1]),
        "hidden_dropout": 0.0,
        "attention_dropout": config.get("attention_dropout", float, 0.0),
        "init_method_std": config.get("initializer_range", float, 0.02),
        "layernorm_epsilon": config.get("rms_norm_eps", float, 1e-6),
    }


def _window(config: HfConfig, model_type: str) -> int | None:
    if model_type == "mistral":
        return config.optional("sliding_window", int) if "sliding_window" in config.values else 4096
    if model_type == "llama" or not config.get("use_sliding_window", bool, False):
        return None
    config.refuse_unless("max_window_layers", 0)
    return config.get("sliding_window", int, 4096)


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
