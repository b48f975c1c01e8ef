"""OLMo 2 (Walsh et al. 2024) in the format of `transformers.Olmo2ForCausalLM`."""

from typing import Any

from megacore.config.spec import ModelSpec
from megacore.convert.hf.config import THEIR_ACTIVATION, HfConfig
from megacore.convert.hf.rope import read_rope, write_rope
from megacore.convert.key_map import (
    Entry,
    KeyMap,
    embedding,
    gated_mlp,
    norm,
    output_layer,
    self_attention,
)


def key_map(spec: ModelSpec) -> KeyMap:
    """Build the table of a model with norms after each branch and of whole queries and keys."""
    model = spec.model
    entries: list[Entry] = [embedding(spec, "model.embed_tokens.weight")]
    for layer in range(model.num_layers):
        ours, theirs = f"encoder.layers.{layer}", f"model.layers.{layer}"
        attention, their_attention = f"{ours}.self_attention", f"{theirs}.self_attn"
        keys = model.query_groups * model.head_dim
        entries += self_attention(spec, attention, their_attention)
        entries += norm(
            spec, f"{attention}.q_layernorm", f"{their_attention}.q_norm", model.attention_size
        )
        entries += norm(spec, f"{attention}.k_layernorm", f"{their_attention}.k_norm", keys)
        entries += norm(
            spec, f"{ours}.post_self_attn_layernorm", f"{theirs}.post_attention_layernorm"
        )
        entries += gated_mlp(spec, f"{ours}.mlp", f"{theirs}.mlp")
        entries += norm(spec, f"{ours}.post_mlp_layernorm", f"{theirs}.post_feedforward_layernorm")
    entries += norm(spec, "encoder.final_layernorm", "model.norm")
    entries += output_layer(spec, "lm_head.weight")
    return KeyMap(tuple(entries))


def write_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the class-specific values of config.json."""
    model, eod = spec.model, spec.special_tokens.eod
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "hidden_act": THEIR_ACTIVATION[model.activation],
        **write_rope(spec),
        "initializer_range": model.init_method_std,
        "rms_norm_eps": model.layernorm_epsilon,
        "attention_bias": False,
        "attention_dropout": model.attention_dropout,
        "bos_token_id": eod,
        "eos_token_id": eod,
        "pad_token_id": None,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "use_cache": True,
    }


def read_config(config: HfConfig) -> dict[str, Any]:
    """Translate config.json to values of `ModelConfig`.

    Raises:
        ConversionError: if our models do not support a value.
    """
    config.refuse_unless("attention_bias", False)
    heads, hidden = config.get("num_attention_heads", int), config.get("hidden_size", int)
    config.refuse_unless("head_dim", hidden // max(heads, 1))
    return {
        "num_layers": config.get("num_hidden_layers", int),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": config.optional("num_key_value_heads", int) or heads,
        "kv_channels": hidden // max(heads, 1),
        "ffn_hidden_size": config.get("intermediate_size", int),
        "activation": config.activation("hidden_act", "silu", gated=True),
        "normalization": "rmsnorm",
        "norm_position": "reordered",
        **read_rope(config, 2048),
        "qk_layernorm": True,
        "qk_layernorm_scope": "projection",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", bool, False),
        "hidden_dropout": 0.0,
        "attention_dropout": config.get("attention_dropout", float, 0.0),
        "init_method_std": config.get("initializer_range", float, 0.02),
        "layernorm_epsilon": config.get("rms_norm_eps", float, 1e-5),
    }


def module_pairs(spec: ModelSpec) -> list[tuple[str, str]]:
    """Return corresponding modules (ours, theirs) with equal outputs, in execution order."""
    pairs = [("embedding", "model.embed_tokens")]
    for layer in range(spec.model.num_layers):
        ours, theirs = f"encoder.layers.{layer}", f"model.layers.{layer}"
        pairs += [
            (f"{ours}.self_attention", f"{theirs}.self_attn"),
            (f"{ours}.post_self_attn_layernorm", f"{theirs}.post_attention_layernorm"),
            (f"{ours}.mlp", f"{theirs}.mlp"),
            (f"{ours}.post_mlp_layernorm", f"{theirs}.post_feedforward_layernorm"),
            (ours, theirs),
        ]
    return [*pairs, ("encoder.final_layernorm", "model.norm")]
