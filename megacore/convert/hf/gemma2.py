"""Gemma 2 (Riviere et al. 2024) in the format of `transformers.Gemma2ForCausalLM`."""

from typing import Any

from megacore.config.model import MOST_LAYERS
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
from megacore.errors import ConversionError

_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
"""transformers' names of our norms. Our `post_attention_layernorm` is before the MLP, as in
Megatron-LM; transformers' is after attention."""
_WINDOWED, _FULL = "sliding_attention", "full_attention"


def key_map(spec: ModelSpec) -> KeyMap:
    """Build the table of a model with norms before and after each branch and a gated MLP."""
    entries: list[Entry] = [embedding(spec, "model.embed_tokens.weight")]
    for layer in range(spec.model.num_layers):
        ours, theirs = f"encoder.layers.{layer}", f"model.layers.{layer}"
        for our_name, their_name in _NORMS.items():
            entries += norm(spec, f"{ours}.{our_name}", f"{theirs}.{their_name}")
        entries += self_attention(spec, f"{ours}.self_attention", f"{theirs}.self_attn")
        entries += gated_mlp(spec, f"{ours}.mlp", f"{theirs}.mlp")
    entries += norm(spec, "encoder.final_layernorm", "model.norm")
    entries += output_layer(spec, "lm_head.weight")
    return KeyMap(tuple(entries))


def write_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the class-specific values of config.json.

    The class wants a window even if no layer has it; it is then the longest sequence.
    """
    model, eod = spec.model, spec.special_tokens.eod
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_dim,
        "hidden_activation": THEIR_ACTIVATION[model.activation],
        **write_rope(spec),
        "initializer_range": model.init_method_std,
        "rms_norm_eps": model.layernorm_epsilon,
        "attention_bias": False,
        "attention_dropout": model.attention_dropout,
        "query_pre_attn_scalar": model.attention_scalar,
        "attn_logit_softcapping": model.attn_logit_softcapping,
        "final_logit_softcapping": model.final_logit_softcapping,
        "sliding_window": model.sliding_window or spec.max_position_embeddings,
        "layer_types": [
            _WINDOWED if model.has_window(layer) else _FULL for layer in range(model.num_layers)
        ],
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
    config.refuse_unless("use_bidirectional_attention", False)
    layers, head_dim = config.get("num_hidden_layers", int), config.get("head_dim", int, 256)
    window, skip = _windows(config, min(layers, MOST_LAYERS))  # more are refused later
    return {
        "num_layers": layers,
        "hidden_size": config.get("hidden_size", int),
        "num_attention_heads": config.get("num_attention_heads", int),
        "num_query_groups": config.get("num_key_value_heads", int, 4),
        "kv_channels": head_dim,
        "ffn_hidden_size": config.get("intermediate_size", int),
        "activation": config.activation("hidden_activation", "gelu_pytorch_tanh", gated=True),
        "normalization": "rmsnorm",
        "apply_layernorm_1p": True,
        "norm_position": "sandwich",
        **read_rope(config, 8192),
        "sliding_window": window,
        "window_attn_skip_freq": skip,
        "query_pre_attn_scalar": config.get("query_pre_attn_scalar", int, 256),
        "attn_logit_softcapping": _cap(config, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _cap(config, "final_logit_softcapping", 30.0),
        "scale_embeddings": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", bool, True),
        "hidden_dropout": 0.0,
        "attention_dropout": config.get("attention_dropout", float, 0.0),
        "init_method_std": config.get("initializer_range", float, 0.02),
        "layernorm_epsilon": config.get("rms_norm_eps", float, 1e-6),
    }


def _cap(config: HfConfig, key: str, default: float) -> float | None:
    """Return a soft cap: null is none, a missing one the class's default."""
    return config.optional(key, float) if key in config.values else default


def _windows(config: HfConfig, layers: int) -> tuple[int | None, int | None]:
    """Return `sliding_window` and `window_attn_skip_freq`.

    Raises:
        ConversionError: if the layers with a window form no pattern that our models support.
    """
    window = config.optional("sliding_window", int) if "sliding_window" in config.values else 4096
    kinds = config.optional("layer_types", list)
    if kinds is None:
        kinds = [_FULL if (layer + 1) % 2 == 0 else _WINDOWED for layer in range(layers)]
    if kinds == [_FULL] * layers:
        return None, None
    if window is None:
        raise ConversionError(
            f"{config.path} has layers of type {_WINDOWED!r} and no sliding_window: give it"
        )
    first = kinds.index(_FULL) + 1 if _FULL in kinds else layers + 1
    skip = None if first > layers else first
    pattern = [_FULL if skip and (layer + 1) % skip == 0 else _WINDOWED for layer in range(layers)]
    if kinds != pattern or skip == 1:
        raise ConversionError(
            f"{config.path} has layer_types {kinds!r}, which models here lack: only {layers} "
            f"layers in which every n-th one is {_FULL!r} and the others {_WINDOWED!r} can be read"
        )
    return window, skip


def module_pairs(spec: ModelSpec) -> list[tuple[str, str]]:
    """Return corresponding modules (ours, theirs) with equal outputs, in execution order."""
    pairs = [("embedding", "model.embed_tokens")]
    for layer in range(spec.model.num_layers):
        ours, theirs = f"encoder.layers.{layer}", f"model.layers.{layer}"
        before, after, before_mlp, after_mlp = (
            (f"{ours}.{our_name}", f"{theirs}.{their_name}")
            for our_name, their_name in _NORMS.items()
        )
        attention = (f"{ours}.self_attention", f"{theirs}.self_attn")
        mlp = (f"{ours}.mlp", f"{theirs}.mlp")
        pairs += [before, attention, after, before_mlp, mlp, after_mlp, (ours, theirs)]
    return [*pairs, ("encoder.final_layernorm", "model.norm")]
