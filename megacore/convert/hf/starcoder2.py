"""StarCoder2 (Lozhkov et al. 2024) in the format of `transformers.Starcoder2ForCausalLM`."""

from typing import Any

from megacore.config.spec import ModelSpec
from megacore.convert.hf.config import THEIR_ACTIVATION, HfConfig
from megacore.convert.hf.rope import read_rope, write_rope
from megacore.convert.key_map import (
    Entry,
    KeyMap,
    embedding,
    linear,
    norm,
    output_layer,
    self_attention,
)


def key_map(spec: ModelSpec) -> KeyMap:
    """Build the table of a model with rotary positions, LayerNorm and a plain MLP."""
    model = spec.model
    hidden, inner, bias = model.hidden_size, model.ffn_size, model.add_bias_linear
    entries: list[Entry] = [embedding(spec, "model.embed_tokens.weight")]
    for layer in range(model.num_layers):
        ours, theirs = f"encoder.layers.{layer}", f"model.layers.{layer}"
        mlp, their_mlp = f"{ours}.mlp", f"{theirs}.mlp"
        for name in ("input_layernorm", "post_attention_layernorm"):
            entries += norm(spec, f"{ours}.{name}", f"{theirs}.{name}")
        entries += self_attention(spec, f"{ours}.self_attention", f"{theirs}.self_attn")
        entries += linear(f"{mlp}.dense_h_to_4h", f"{their_mlp}.c_fc", (inner, hidden), bias=bias)
        entries += linear(f"{mlp}.dense_4h_to_h", f"{their_mlp}.c_proj", (hidden, inner), bias=bias)
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
        "norm_epsilon": model.layernorm_epsilon,
        "use_bias": model.add_bias_linear,
        "sliding_window": model.sliding_window,
        "attention_dropout": model.attention_dropout,
        "residual_dropout": model.hidden_dropout,
        "embedding_dropout": model.hidden_dropout,
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
    heads, hidden = config.get("num_attention_heads", int), config.get("hidden_size", int)
    dropout = config.get("residual_dropout", float, 0.0)
    config.refuse_unless("embedding_dropout", dropout)
    config.refuse_unless("head_dim", hidden // max(heads, 1))
    config.refuse_unless("mlp_type", "default")
    config.refuse_unless("norm_type", "layer_norm")
    return {
        "num_layers": config.get("num_hidden_layers", int),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads", int, 2),
        "kv_channels": hidden // max(heads, 1),
        "ffn_hidden_size": config.get("intermediate_size", int),
        "activation": config.activation("hidden_act", "gelu_pytorch_tanh", gated=False),
        **read_rope(config, 4096),
        "sliding_window": config.optional("sliding_window", int),
        "add_bias_linear": config.get("use_bias", bool, True),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", bool, True),
        "hidden_dropout": dropout,
        "attention_dropout": config.get("attention_dropout", float, 0.0),
        "init_method_std": config.get("initializer_range", float, 0.018042),
        "layernorm_epsilon": config.get("norm_epsilon", float, 1e-5),
    }


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
