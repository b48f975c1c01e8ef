"""GPT-NeoX (Black et al. 2022) in the format of `transformers.GPTNeoXForCausalLM`.

Its fused projections have our layout.
"""

from typing import Any

from megacore.config.spec import ModelSpec
from megacore.convert.hf.config import THEIR_ACTIVATION, HfConfig
from megacore.convert.hf.rope import RopeKeys, read_rope, write_rope
from megacore.convert.key_map import (
    Entry,
    KeyMap,
    decoder_pairs,
    embedding,
    linear,
    norm,
    output_layer,
)

_ROPE = RopeKeys("rotary_emb_base", ("rotary_pct", 0.25))


def key_map(spec: ModelSpec) -> KeyMap:
    """Build the table of a model with rotary positions, LayerNorm and biases."""
    entries = [embedding(spec, "gpt_neox.embed_in.weight")]
    for layer in range(spec.model.num_layers):
        entries += _layer_entries(spec, f"encoder.layers.{layer}", f"gpt_neox.layers.{layer}")
    entries += norm(spec, "encoder.final_layernorm", "gpt_neox.final_layer_norm")
    entries += output_layer(spec, "embed_out.weight")
    return KeyMap(tuple(entries))


def _layer_entries(spec: ModelSpec, ours: str, theirs: str) -> list[Entry]:
    hidden, inner = spec.model.hidden_size, spec.model.ffn_size
    attention, their_attention = f"{ours}.self_attention", f"{theirs}.attention"
    # Both have rows [head][q, k, v][d].
    fused = linear(
        f"{attention}.query_key_value",
        f"{their_attention}.query_key_value",
        (3 * hidden, hidden),
        bias=True,
    )
    return [
        *norm(spec, f"{ours}.input_layernorm", f"{theirs}.input_layernorm"),
        *fused,
        *linear(f"{attention}.dense", f"{their_attention}.dense", (hidden, hidden), bias=True),
        *norm(spec, f"{ours}.post_attention_layernorm", f"{theirs}.post_attention_layernorm"),
        *linear(
            f"{ours}.mlp.dense_h_to_4h", f"{theirs}.mlp.dense_h_to_4h", (inner, hidden), bias=True
        ),
        *linear(
            f"{ours}.mlp.dense_4h_to_h", f"{theirs}.mlp.dense_4h_to_h", (hidden, inner), bias=True
        ),
    ]


def write_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the class-specific values of config.json.

    The values of rotary positions are those of both transformers 4 and 5.
    """
    model, special = spec.model, spec.special_tokens
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "hidden_act": THEIR_ACTIVATION[model.activation],
        **{key: value for key, value in write_rope(spec).items() if key != "rope_theta"},
        "initializer_range": model.init_method_std,
        "layer_norm_eps": model.layernorm_epsilon,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "attention_bias": True,
        "use_parallel_residual": model.parallel_residual,
        "rotary_pct": model.rotary_percent,
        "rotary_emb_base": model.rotary_base,
        "bos_token_id": special.begin,
        "eos_token_id": special.all_ends(special.eod),
        **({} if special.pad is None else {"pad_token_id": special.pad}),
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "use_cache": True,
    }


def read_config(config: HfConfig) -> dict[str, Any]:
    """Translate config.json to values of `ModelConfig`.

    Raises:
        ConversionError: if our models do not support a value.
    """
    config.refuse_unless("attention_bias", True)
    return {
        "num_layers": config.get("num_hidden_layers", int),
        "hidden_size": config.get("hidden_size", int),
        "num_attention_heads": config.get("num_attention_heads", int),
        "ffn_hidden_size": config.get("intermediate_size", int),
        "activation": config.activation("hidden_act", "gelu", gated=False),
        "parallel_residual": config.get("use_parallel_residual", bool, True),
        **read_rope(config, 2048, _ROPE),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", bool, False),
        "hidden_dropout": config.get("hidden_dropout", float, 0.0),
        "attention_dropout": config.get("attention_dropout", float, 0.0),
        "init_method_std": config.get("initializer_range", float, 0.02),
        "layernorm_epsilon": config.get("layer_norm_eps", float, 1e-5),
    }


def module_pairs(spec: ModelSpec) -> list[tuple[str, str]]:
    """Return corresponding modules (ours, theirs) with equal outputs, in execution order."""
    modules = {
        "input_layernorm": "input_layernorm",
        "self_attention": "attention",
        "post_attention_layernorm": "post_attention_layernorm",
        "mlp": "mlp",
    }
    final = "gpt_neox.final_layer_norm"
    return decoder_pairs(spec, "gpt_neox.embed_in", "gpt_neox.layers", modules, final)
