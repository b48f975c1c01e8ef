"""Llama (Touvron et al. 2023) and related models in the format of transformers.

These are LlamaForCausalLM, MistralForCausalLM with a sliding window (Jiang et al. 2023),
Qwen2ForCausalLM with biases of queries, keys and values (Yang et al. 2024), Qwen3ForCausalLM with
normalized queries and keys (Yang et al. 2025), Phi3ForCausalLM with fused projections (Abdin et al.
2024), Gemma2ForCausalLM with norms before and after each branch (Riviere et al. 2024),
Olmo2ForCausalLM with norms after each branch (Walsh et al. 2024), and Starcoder2ForCausalLM with
LayerNorm and a plain MLP (Lozhkov et al. 2024). They share names of modules and keys of
config.json.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megacore.config.model import MOST_LAYERS
from megacore.config.rope import LongRope
from megacore.config.spec import ModelSpec
from megacore.convert.counterparts import counterpart
from megacore.convert.hf.config import THEIR_ACTIVATION, HfConfig, T
from megacore.convert.hf.rope import ORIGINAL, RopeKeys, read_rope, write_rope
from megacore.convert.key_map import (
    Entry,
    Fused,
    KeyMap,
    decoder_pairs,
    embedding,
    fused_layer,
    gated_mlp,
    linear,
    norm,
    output_layer,
    self_attention,
)
from megacore.errors import ConversionError

Entries = Sequence[Entry | Fused]
LayerEntries = Callable[[ModelSpec, str, str], Entries]
"""Function that returns the entries of a layer with these names, ours and theirs."""

_MODULES = {
    "pre": {
        "input_layernorm": "input_layernorm",
        "self_attention": "self_attn",
        "post_attention_layernorm": "post_attention_layernorm",
        "mlp": "mlp",
    },
    "sandwich": {
        "input_layernorm": "input_layernorm",
        "self_attention": "self_attn",
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp": "mlp",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
    "reordered": {
        "self_attention": "self_attn",
        "post_self_attn_layernorm": "post_attention_layernorm",
        "mlp": "mlp",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
}
"""transformers' names of our modules in a layer, in execution order, by the position of its norms.
Our `post_attention_layernorm` is before the MLP, as in Megatron-LM; that of Gemma 2 and OLMo 2 is
after attention."""
_SLIDING, _FULL = "sliding_attention", "full_attention"


def key_map(spec: ModelSpec, layer_entries: LayerEntries | None = None) -> KeyMap:
    """Build the table of the weights of a class, whose layers are Llama's unless it says others."""
    of_layer = layer_entries or _llama
    entries: list[Entry | Fused] = [embedding(spec, "model.embed_tokens.weight")]
    for layer in range(spec.model.num_layers):
        entries += of_layer(spec, f"encoder.layers.{layer}", f"model.layers.{layer}")
    entries += norm(spec, "encoder.final_layernorm", "model.norm")
    entries += output_layer(spec, "lm_head.weight")
    return KeyMap(tuple(entries))


def _llama(spec: ModelSpec, ours: str, theirs: str) -> Entries:
    model = spec.model
    attention, their_attention = f"{ours}.self_attention", f"{theirs}.self_attn"
    entries = [
        *norm(spec, f"{ours}.input_layernorm", f"{theirs}.input_layernorm"),
        *self_attention(spec, attention, their_attention),
        *norm(spec, f"{ours}.post_attention_layernorm", f"{theirs}.post_attention_layernorm"),
        *gated_mlp(spec, f"{ours}.mlp", f"{theirs}.mlp"),
    ]
    if model.qk_layernorm:
        for part in "qk":
            entries += norm(
                spec,
                f"{attention}.{part}_layernorm",
                f"{their_attention}.{part}_norm",
                model.head_dim,
            )
    return entries


def _gemma2(spec: ModelSpec, ours: str, theirs: str) -> Entries:
    entries: list[Entry] = []
    for our_name, their_name in _MODULES["sandwich"].items():
        if our_name.endswith("norm"):
            entries += norm(spec, f"{ours}.{our_name}", f"{theirs}.{their_name}")
    entries += self_attention(spec, f"{ours}.self_attention", f"{theirs}.self_attn")
    return [*entries, *gated_mlp(spec, f"{ours}.mlp", f"{theirs}.mlp")]


def _olmo2(spec: ModelSpec, ours: str, theirs: str) -> Entries:
    """Return the entries of a layer with norms of whole queries and keys."""
    model = spec.model
    attention, their_attention = f"{ours}.self_attention", f"{theirs}.self_attn"
    keys = model.query_groups * model.head_dim
    return [
        *self_attention(spec, attention, their_attention),
        *norm(spec, f"{attention}.q_layernorm", f"{their_attention}.q_norm", model.attention_size),
        *norm(spec, f"{attention}.k_layernorm", f"{their_attention}.k_norm", keys),
        *norm(spec, f"{ours}.post_self_attn_layernorm", f"{theirs}.post_attention_layernorm"),
        *gated_mlp(spec, f"{ours}.mlp", f"{theirs}.mlp"),
        *norm(spec, f"{ours}.post_mlp_layernorm", f"{theirs}.post_feedforward_layernorm"),
    ]


def _starcoder2(spec: ModelSpec, ours: str, theirs: str) -> Entries:
    model = spec.model
    hidden, inner, bias = model.hidden_size, model.ffn_size, model.add_bias_linear
    mlp, their_mlp = f"{ours}.mlp", f"{theirs}.mlp"
    return [
        *norm(spec, f"{ours}.input_layernorm", f"{theirs}.input_layernorm"),
        *norm(spec, f"{ours}.post_attention_layernorm", f"{theirs}.post_attention_layernorm"),
        *self_attention(spec, f"{ours}.self_attention", f"{theirs}.self_attn"),
        *linear(f"{mlp}.dense_h_to_4h", f"{their_mlp}.c_fc", (inner, hidden), bias=bias),
        *linear(f"{mlp}.dense_4h_to_h", f"{their_mlp}.c_proj", (hidden, inner), bias=bias),
    ]


def module_pairs(spec: ModelSpec) -> list[tuple[str, str]]:
    """Return corresponding modules (ours, theirs) with equal outputs, in execution order."""
    modules = _MODULES[spec.model.norm_position]
    return decoder_pairs(spec, "model.embed_tokens", "model.layers", modules, "model.norm")


def write_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the class-specific values of config.json.

    The values of rotary positions are those of both transformers 4 and 5.
    """
    model, special = spec.model, spec.special_tokens
    hf_class = counterpart(spec.family, model)
    of = CLASSES[hf_class.model_type]
    values = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        of.activation_key: THEIR_ACTIVATION[model.activation],
        **write_rope(spec),
        "initializer_range": model.init_method_std,
        of.epsilon_key: model.layernorm_epsilon,
        "attention_dropout": model.attention_dropout,
        "bos_token_id": special.begin,
        "eos_token_id": special.all_ends(special.eod),
        "pad_token_id": special.pad,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "use_cache": True,
    }
    if hf_class.any_head_size:
        values["head_dim"] = model.head_dim
    return values | of.write(spec)


def read_config(config: HfConfig) -> dict[str, Any]:
    """Translate config.json to values of `ModelConfig`.

    Raises:
        ConversionError: if our models do not support a value.
    """
    of = CLASSES[config.get("model_type", str)]
    for key, value in of.fixed.items():
        config.refuse_unless(key, value)
    heads = config.get("num_attention_heads", int)
    hidden = config.get("hidden_size", int)
    return {
        "num_layers": config.get("num_hidden_layers", int),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": _groups(config, of, heads),
        "kv_channels": _head_dim(config, of, hidden // max(heads, 1)),
        "ffn_hidden_size": config.get("intermediate_size", int),
        "activation": config.activation(of.activation_key, of.activation, gated=of.gated),
        "normalization": "rmsnorm",
        **read_rope(config, of.positions, of.rope),
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", bool, of.tied),
        "hidden_dropout": 0.0,
        "attention_dropout": config.get("attention_dropout", float, 0.0),
        "init_method_std": config.get("initializer_range", float, of.init_std),
        "layernorm_epsilon": config.get(of.epsilon_key, float, of.epsilon),
        **of.read(config),
    }


def _groups(config: HfConfig, of: "_Class", heads: int) -> int:
    """Return the number of key-value heads; in most classes, null means one for each query head."""
    key, default = "num_key_value_heads", of.groups
    if not of.nullable:
        return config.get(key, int, default)
    groups = config.optional(key, int)
    if groups is None:
        return heads if default is None or key in config.values else default
    return groups


def _head_dim(config: HfConfig, of: "_Class", derived: int) -> int:
    """Return the size of a head, which some classes only derive from the widths."""
    key = "head_dim"
    if of.derives_head_dim:
        config.refuse_unless(key, derived)
        return derived
    if not of.nullable:
        return config.get(key, int, of.head_dim)
    head_dim = config.optional(key, int)
    return (of.head_dim or derived) if head_dim is None else head_dim


def _write_llama(spec: ModelSpec) -> dict[str, Any]:
    bias = spec.model.add_bias_linear
    return {"attention_bias": bias, "mlp_bias": bias}


def _read_llama(config: HfConfig) -> dict[str, Any]:
    bias = config.get("attention_bias", bool, False)
    config.refuse_unless("mlp_bias", bias)
    return {"add_bias_linear": bias}


def _write_mistral(spec: ModelSpec) -> dict[str, Any]:
    return {"sliding_window": spec.model.sliding_window}


def _read_mistral(config: HfConfig) -> dict[str, Any]:
    return {"sliding_window": _window(config)}


def _window(config: HfConfig) -> int | None:
    return _nullable(config, "sliding_window", 4096)


def _nullable(config: HfConfig, key: str, default: T) -> T | None:
    """Return a value that a class may lack: null is none, a missing one the class's default."""
    return config.optional(key, type(default)) if key in config.values else default


def _write_qwen2(spec: ModelSpec) -> dict[str, Any]:
    window = spec.model.sliding_window
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": spec.model.num_layers if window is None else 0,
    }


def _write_qwen3(spec: ModelSpec) -> dict[str, Any]:
    return {"attention_bias": False} | _write_qwen2(spec)


def _read_qwen2(config: HfConfig) -> dict[str, Any]:
    return {"sliding_window": _qwen_window(config), "add_qkv_bias": True}


def _read_qwen3(config: HfConfig) -> dict[str, Any]:
    return {"sliding_window": _qwen_window(config), "qk_layernorm": True}


def _qwen_window(config: HfConfig) -> int | None:
    """Return the sliding window that all layers have, or None if no layer has one.

    Qwen2 and Qwen3 have it from layer `max_window_layers` on, or in the layers that `layer_types`
    names.
    """
    window = _window(config)
    first = config.get("max_window_layers", int, 28)
    types = config.optional("layer_types", list)
    if not config.get("use_sliding_window", bool, False):
        window = None
    layers = config.get("num_hidden_layers", int)
    if types is not None:
        config.refuse_unless("layer_types", *([kind] * layers for kind in (_FULL, _SLIDING)))
        sliding = _SLIDING in types
        if sliding and window is None:
            config.refuse_unless("layer_types", [_FULL] * layers)
        return window if sliding else None
    if window is not None and 0 < first < layers:
        config.refuse_unless("max_window_layers", 0, layers)
    return window if first <= 0 else None


def _write_phi3(spec: ModelSpec) -> dict[str, Any]:
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


def _read_phi3(config: HfConfig) -> dict[str, Any]:
    return {"sliding_window": config.optional("sliding_window", int)}


def _write_gemma2(spec: ModelSpec) -> dict[str, Any]:
    model = spec.model
    kinds = (_SLIDING if model.has_window(n) else _FULL for n in range(model.num_layers))
    return {
        "attention_bias": False,
        "query_pre_attn_scalar": model.attention_scalar,
        "attn_logit_softcapping": model.attn_logit_softcapping,
        "final_logit_softcapping": model.final_logit_softcapping,
        # Gemma2Config wants a window even if no layer has it.
        "sliding_window": model.sliding_window or spec.max_position_embeddings,
        "layer_types": list(kinds),
    }


def _read_gemma2(config: HfConfig) -> dict[str, Any]:
    layers = config.get("num_hidden_layers", int)
    # more are refused later
    window, skip = _gemma2_windows(config, min(layers, MOST_LAYERS))
    return {
        "apply_layernorm_1p": True,
        "norm_position": "sandwich",
        "sliding_window": window,
        "window_attn_skip_freq": skip,
        "query_pre_attn_scalar": config.get("query_pre_attn_scalar", int, 256),
        "attn_logit_softcapping": _nullable(config, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _nullable(config, "final_logit_softcapping", 30.0),
        "scale_embeddings": True,
    }


def _gemma2_windows(config: HfConfig, layers: int) -> tuple[int | None, int | None]:
    """Return `sliding_window` and `window_attn_skip_freq`.

    Raises:
        ConversionError: if the layers with a window form no pattern that our models support.
    """
    window = _window(config)
    kinds = config.optional("layer_types", list)
    if kinds is None:
        kinds = [_FULL if (layer + 1) % 2 == 0 else _SLIDING for layer in range(layers)]
    if kinds == [_FULL] * layers:
        return None, None
    if window is None:
        raise ConversionError(
            f"{config.path} has layers of type {_SLIDING!r} and no sliding_window: give it"
        )
    first = kinds.index(_FULL) + 1 if _FULL in kinds else layers + 1
    skip = None if first > layers else first
    pattern = [_FULL if skip and (layer + 1) % skip == 0 else _SLIDING for layer in range(layers)]
    if kinds != pattern or skip == 1:
        raise ConversionError(
            f"{config.path} has layer_types {kinds!r}, which models here lack: only {layers} "
            f"layers in which every n-th one is {_FULL!r} and the others {_SLIDING!r} can be read"
        )
    return window, skip


def _write_olmo2(spec: ModelSpec) -> dict[str, Any]:
    return {"attention_bias": False}


def _read_olmo2(config: HfConfig) -> dict[str, Any]:
    return {"norm_position": "reordered", "qk_layernorm": True, "qk_layernorm_scope": "projection"}


def _write_starcoder2(spec: ModelSpec) -> dict[str, Any]:
    model = spec.model
    return {
        "use_bias": model.add_bias_linear,
        "sliding_window": model.sliding_window,
        "residual_dropout": model.hidden_dropout,
        "embedding_dropout": model.hidden_dropout,
    }


def _read_starcoder2(config: HfConfig) -> dict[str, Any]:
    dropout = config.get("residual_dropout", float, 0.0)
    config.refuse_unless("embedding_dropout", dropout)
    return {
        "normalization": "layernorm",
        "sliding_window": config.optional("sliding_window", int),
        "add_bias_linear": config.get("use_bias", bool, True),
        "hidden_dropout": dropout,
    }


@dataclass(frozen=True)
class _Class:
    """Layers of a class, and names, defaults and further keys of its config.json."""

    write: Callable[[ModelSpec], dict[str, Any]]
    """Function that returns the values of config.json that only some classes have."""
    read: Callable[[HfConfig], dict[str, Any]]
    """Function that translates these to values of `ModelConfig`."""
    positions: int
    """Default of `max_position_embeddings`."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys that occur in published files, with the only value that models here have."""
    layer_entries: LayerEntries | None = None
    """Entries of a layer; None stands for Llama's."""
    rope: RopeKeys = field(default=RopeKeys())
    groups: int | None = None
    """Default of `num_key_value_heads`; None stands for the number of heads."""
    head_dim: int | None = None
    """Default of `head_dim`; None stands for the width of a head."""
    derives_head_dim: bool = False
    """True if the class has no `head_dim`."""
    nullable: bool = True
    """True if `num_key_value_heads` and `head_dim` may be null."""
    activation_key: str = "hidden_act"
    activation: str = "silu"
    gated: bool = True
    epsilon_key: str = "rms_norm_eps"
    epsilon: float = 1e-6
    init_std: float = 0.02
    """Default of `initializer_range`."""
    tied: bool = False
    """Default of `tie_word_embeddings`."""


CLASSES: Mapping[str, _Class] = {
    "llama": _Class(
        _write_llama, _read_llama, 2048, {"pretraining_tp": 1, "rope_interleaved": False}
    ),
    "mistral": _Class(_write_mistral, _read_mistral, 131072, groups=8),
    "qwen2": _Class(_write_qwen2, _read_qwen2, 32768, {"use_mrope": False}, groups=32),
    "qwen3": _Class(
        _write_qwen3, _read_qwen3, 32768, {"attention_bias": False}, groups=32, head_dim=128
    ),
    "phi3": _Class(
        _write_phi3,
        _read_phi3,
        4096,
        {
            "resid_pdrop": 0.0,  # ours would drop the embedding too
            "attention_bias": False,
            "mlp_bias": False,
            "lm_head_bias": False,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
        },
        partial(fused_layer, attention="self_attn"),
        rope=RopeKeys(share=("partial_rotary_factor", 1.0), extended_from=4096),
        epsilon=1e-5,
    ),
    "gemma2": _Class(
        _write_gemma2,
        _read_gemma2,
        8192,
        {"attention_bias": False, "use_bidirectional_attention": False},
        _gemma2,
        groups=4,
        head_dim=256,
        nullable=False,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        tied=True,
    ),
    "olmo2": _Class(
        _write_olmo2,
        _read_olmo2,
        2048,
        {"attention_bias": False},
        _olmo2,
        derives_head_dim=True,
        epsilon=1e-5,
    ),
    "starcoder2": _Class(
        _write_starcoder2,
        _read_starcoder2,
        4096,
        {"mlp_type": "default", "norm_type": "layer_norm"},
        _starcoder2,
        groups=2,
        derives_head_dim=True,
        nullable=False,
        activation="gelu_pytorch_tanh",
        gated=False,
        epsilon_key="norm_epsilon",
        epsilon=1e-5,
        init_std=0.018042,
        tied=True,
    ),
}
"""Classes by `model_type`. A further one is a row here, and one in `counterparts.COUNTERPARTS`."""
