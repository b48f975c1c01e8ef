"""GPT-2 (Radford et al. 2019) in the format of `transformers.GPT2LMHeadModel`."""

from typing import Any

from torch import Tensor

from megacore.config.spec import ModelSpec
from megacore.convert.hf.config import THEIR_ACTIVATION, HfConfig
from megacore.convert.key_map import (
    SAME,
    Entry,
    KeyMap,
    Relayout,
    Shape,
    decoder_pairs,
    embedding,
    norm,
    output_layer,
    qkv_blocks,
)


def key_map(spec: ModelSpec) -> KeyMap:
    """Build the table of a GPT-2; a tied output head has no tensor in either format."""
    model = spec.model
    hidden = model.hidden_size
    entries = [
        embedding(spec, "transformer.wte.weight"),
        Entry(
            "embedding.position_embeddings.weight",
            (spec.max_position_embeddings, hidden),
            ("transformer.wpe.weight",),
        ),
    ]
    for layer in range(model.num_layers):
        entries += _layer_entries(spec, layer)
    entries += norm(spec, "encoder.final_layernorm", "transformer.ln_f")
    entries += output_layer(spec, "lm_head.weight")
    return KeyMap(tuple(entries))


def _layer_entries(spec: ModelSpec, layer: int) -> list[Entry]:
    model = spec.model
    hidden, inner = model.hidden_size, model.ffn_size
    ours, theirs = f"encoder.layers.{layer}", f"transformer.h.{layer}"
    attention, mlp = f"{ours}.self_attention", f"{ours}.mlp"
    blocks = qkv_blocks(model.num_attention_heads, model.head_dim)
    return [
        *norm(spec, f"{ours}.input_layernorm", f"{theirs}.ln_1"),
        *_conv1d(
            f"{attention}.query_key_value", f"{theirs}.attn.c_attn", (3 * hidden, hidden), blocks
        ),
        *_conv1d(f"{attention}.dense", f"{theirs}.attn.c_proj", (hidden, hidden)),
        *norm(spec, f"{ours}.post_attention_layernorm", f"{theirs}.ln_2"),
        *_conv1d(f"{mlp}.dense_h_to_4h", f"{theirs}.mlp.c_fc", (inner, hidden)),
        *_conv1d(f"{mlp}.dense_4h_to_h", f"{theirs}.mlp.c_proj", (hidden, inner)),
    ]


def _conv1d(ours: str, theirs: str, shape: Shape, rows: Relayout = SAME) -> tuple[Entry, Entry]:
    """Return the entries of a linear layer whose weight is [in, out] in transformers.

    `shape` is that of our weight [out, in], and `rows` the relayout of its rows.
    """
    transposed = rows.then(Tensor.t, Tensor.t)
    return (
        Entry(f"{ours}.weight", shape, (f"{theirs}.weight",), transposed),
        Entry(f"{ours}.bias", shape[:1], (f"{theirs}.bias",), rows),
    )


def write_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the class-specific values of config.json."""
    model, special = spec.model, spec.special_tokens
    return {
        "n_positions": spec.max_position_embeddings,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_size,
        "activation_function": THEIR_ACTIVATION[model.activation],
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "layer_norm_epsilon": model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
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
    config.refuse_unless("scale_attn_weights", True)
    config.refuse_unless("scale_attn_by_inverse_layer_idx", False)
    hidden = config.get("n_embd", int)
    inner = config.optional("n_inner", int)
    dropout = config.get("resid_pdrop", float, 0.1)
    if config.get("embd_pdrop", float, 0.1) != dropout:
        config.refuse_unless("embd_pdrop", dropout)
    return {
        "num_layers": config.get("n_layer", int),
        "hidden_size": hidden,
        "num_attention_heads": config.get("n_head", int),
        "ffn_hidden_size": 4 * hidden if inner is None else inner,
        "activation": config.activation("activation_function", "gelu_new", gated=False),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", bool, True),
        "max_position_embeddings": config.get("n_positions", int, 1024),
        "hidden_dropout": dropout,
        "attention_dropout": config.get("attn_pdrop", float, 0.1),
        "init_method_std": config.get("initializer_range", float, 0.02),
        "layernorm_epsilon": config.get("layer_norm_epsilon", float, 1e-5),
    }


def module_pairs(spec: ModelSpec) -> list[tuple[str, str]]:
    """Return corresponding modules (ours, theirs) with equal outputs, in execution order."""
    modules = {
        "input_layernorm": "ln_1",
        "self_attention": "attn",
        "post_attention_layernorm": "ln_2",
        "mlp": "mlp",
    }
    return decoder_pairs(spec, "transformer.drop", "transformer.h", modules, "transformer.ln_f")
