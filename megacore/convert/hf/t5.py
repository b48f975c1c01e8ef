"""T5 (Raffel et al. 2019) in the format of `transformers.T5ForConditionalGeneration`.

Version 1.0 has a tied head and ReLU, version 1.1 an untied head and a gated MLP.
"""

from typing import Any

from megacore.config.model import ModelConfig
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.convert.hf.config import THEIR_ACTIVATION, HfConfig
from megacore.convert.key_map import (
    Entry,
    KeyMap,
    embedding,
    interleaved,
    linear,
    norm,
    output_layer,
    queries_keys_values,
)

_POSITIONS = 512
"""Default of `n_positions`: the sequence length of the original T5. Relative positions have no
limit."""


def key_map(spec: ModelSpec) -> KeyMap:
    """Build the table of an encoder and a decoder that share the token embedding."""
    model = spec.model
    entries = [embedding(spec, "shared.weight")]
    for stack, layers in (("encoder", model.num_layers), ("decoder", model.decoder_layers)):
        entries.append(
            Entry(
                f"{stack}.relative_attention_bias.weight",
                (model.relative_attention_num_buckets, model.num_attention_heads),
                (f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",),
            )
        )
        for layer in range(layers):
            entries += _layer_entries(
                spec,
                f"{stack}.layers.{layer}",
                f"{stack}.block.{layer}.layer",
                cross_attention=stack == "decoder",
            )
        entries += norm(spec, f"{stack}.final_layernorm", f"{stack}.final_layer_norm")
    entries += output_layer(spec, "lm_head.weight")
    return KeyMap(tuple(entries))


def _layer_entries(
    spec: ModelSpec, ours: str, theirs: str, *, cross_attention: bool
) -> list[Entry]:
    model = spec.model
    hidden, inner, size = model.hidden_size, model.ffn_size, model.attention_size
    attention = f"{theirs}.0.SelfAttention"
    entries = [
        *norm(spec, f"{ours}.input_layernorm", f"{theirs}.0.layer_norm"),
        *queries_keys_values(
            spec, f"{ours}.self_attention", *(f"{attention}.{part}" for part in "qkv")
        ),
        *linear(f"{ours}.self_attention.dense", f"{attention}.o", (hidden, size), bias=False),
        *norm(spec, f"{ours}.post_attention_layernorm", f"{theirs}.1.layer_norm"),
    ]
    if cross_attention:
        entries += _cross_entries(spec, f"{ours}.inter_attention", f"{theirs}.1.EncDecAttention")
        entries += norm(spec, f"{ours}.post_inter_attention_layernorm", f"{theirs}.2.layer_norm")
    mlp = f"{theirs}.{2 if cross_attention else 1}.DenseReluDense"
    if model.gated:
        entries += linear(
            f"{ours}.mlp.dense_h_to_4h_gate", f"{mlp}.wi_0", (inner, hidden), bias=False
        )
    entries += linear(
        f"{ours}.mlp.dense_h_to_4h",
        f"{mlp}.{'wi_1' if model.gated else 'wi'}",
        (inner, hidden),
        bias=False,
    )
    entries += linear(f"{ours}.mlp.dense_4h_to_h", f"{mlp}.wo", (hidden, inner), bias=False)
    return entries


def _cross_entries(spec: ModelSpec, ours: str, theirs: str) -> list[Entry]:
    model = spec.model
    hidden, size = model.hidden_size, model.attention_size
    key_value = interleaved(
        f"{ours}.key_value",
        (f"{theirs}.k", f"{theirs}.v"),
        (2 * size, hidden),
        model.num_attention_heads,
        model.head_dim,
        bias=False,
    )
    return [
        *linear(f"{ours}.query", f"{theirs}.q", (size, hidden), bias=False),
        *key_value,
        *linear(f"{ours}.dense", f"{theirs}.o", (hidden, size), bias=False),
    ]


def write_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the class-specific values of config.json.

    `tie_word_embeddings` only tells whether the head's input is scaled. Whether the head is tied
    follows from the files: see `spec_of_directory`.
    """
    model, special = spec.model, spec.special_tokens
    activation = "gelu" if model.activation == "geglu_tanh" else THEIR_ACTIVATION[model.activation]
    start = special.pad or 0
    return {
        "d_model": model.hidden_size,
        "d_kv": model.head_dim,
        "d_ff": model.ffn_size,
        "num_layers": model.num_layers,
        "num_decoder_layers": model.decoder_layers,
        "num_heads": model.num_attention_heads,
        "n_positions": spec.max_position_embeddings,
        "relative_attention_num_buckets": model.relative_attention_num_buckets,
        "relative_attention_max_distance": model.relative_attention_max_distance,
        "dropout_rate": model.hidden_dropout,
        "layer_norm_epsilon": model.layernorm_epsilon,
        "initializer_factor": 1.0,
        "feed_forward_proj": f"gated-{activation}" if model.gated else activation,
        "is_encoder_decoder": True,
        "use_cache": caches_decoder(model),
        "pad_token_id": start,
        "eos_token_id": end_token(special),
        "decoder_start_token_id": start,
        "tie_word_embeddings": model.scales_decoder_outputs,
    }


def caches_decoder(model: ModelConfig) -> bool:
    """Return True if the cache of transformers, which has the encoder's layers, fits the decoder's.

    Its `generate` ends with an IndexError if there are more layers in the decoder.
    """
    return model.decoder_layers <= model.num_layers


def end_token(special: SpecialTokens) -> int | None:
    """Return the token that ends a sequence."""
    return special.eod if special.sep is None else special.sep


def read_config(config: HfConfig) -> dict[str, Any]:
    """Translate config.json to values of `ModelConfig`.

    Raises:
        ConversionError: if our models do not support a value.
    """
    config.refuse_unless("decoder_start_token_id", config.token("pad_token_id") or 0)
    dropout = config.get("dropout_rate", float, 0.1)
    layers = config.get("num_layers", int)
    decoder_layers = config.optional("num_decoder_layers", int)
    # transformers 5 marks the head of every T5 as tied; only version 1.1 does not scale its input.
    # A head without scaling is read as untied, until the files show that they have none.
    scaled = config.get(
        "scale_decoder_outputs", bool, config.get("tie_word_embeddings", bool, True)
    )
    gate, dash, function = config.get("feed_forward_proj", str, "relu").rpartition("-")
    if (gate, dash) not in {("", ""), ("gated", "-")}:
        config.refuse_unless("feed_forward_proj", "relu", "gated-gelu", "gated-silu")
    names = {"gelu": "gelu_new"} if gate else {}
    function = names.get(function, function)
    config.refuse_unless("dense_act_fn", function)
    config.refuse_unless("is_gated_act", bool(gate))
    return {
        "num_layers": layers,
        "num_decoder_layers": layers if decoder_layers is None else decoder_layers,
        "hidden_size": config.get("d_model", int),
        "num_attention_heads": config.get("num_heads", int),
        "kv_channels": config.get("d_kv", int, 64),
        "ffn_hidden_size": config.get("d_ff", int),
        "activation": config.activation_named(function, "feed_forward_proj", gated=bool(gate)),
        "normalization": "rmsnorm",
        "position_embedding_type": "relative",
        "relative_attention_num_buckets": config.get("relative_attention_num_buckets", int, 32),
        "relative_attention_max_distance": config.get("relative_attention_max_distance", int, 128),
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not scaled,
        "max_position_embeddings": config.get("n_positions", int, _POSITIONS),
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        "layernorm_epsilon": config.get("layer_norm_epsilon", float, 1e-6),
    }


def module_pairs(spec: ModelSpec) -> list[tuple[str, str]]:
    """Return corresponding modules (ours, theirs) with equal outputs, in execution order."""
    model = spec.model
    pairs = []
    for stack, layers in (("encoder", model.num_layers), ("decoder", model.decoder_layers)):
        for layer in range(layers):
            pairs += _layer_pairs(
                f"{stack}.layers.{layer}", f"{stack}.block.{layer}", stack == "decoder"
            )
        pairs.append((f"{stack}.final_layernorm", f"{stack}.final_layer_norm"))
    return pairs


def _layer_pairs(ours: str, theirs: str, cross_attention: bool) -> list[tuple[str, str]]:
    pairs = [
        (f"{ours}.input_layernorm", f"{theirs}.layer.0.layer_norm"),
        (f"{ours}.self_attention", f"{theirs}.layer.0.SelfAttention"),
        (f"{ours}.post_attention_layernorm", f"{theirs}.layer.1.layer_norm"),
    ]
    if cross_attention:
        pairs += [
            (f"{ours}.inter_attention", f"{theirs}.layer.1.EncDecAttention"),
            (f"{ours}.post_inter_attention_layernorm", f"{theirs}.layer.2.layer_norm"),
        ]
    last = 2 if cross_attention else 1
    return [*pairs, (f"{ours}.mlp", f"{theirs}.layer.{last}.DenseReluDense"), (ours, theirs)]
