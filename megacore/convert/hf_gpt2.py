"""GPT-2 (Radford et al. 2019) as `transformers.GPT2LMHeadModel` knows it: names, layouts, configuration."""

from typing import Any

from torch import Tensor

from megacore.config.run import RunConfig
from megacore.convert.key_map import SAME, TRANSPOSED, Entry, KeyMap, Layout, padded_rows, qkv_blocks

SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 40}
"""How the exported model writes when nothing else is asked: decoded greedily, small models repeat themselves."""


def key_map(config: RunConfig, vocab_size: int, padded_vocab_size: int) -> KeyMap:
    """The table of a GPT-2 of this configuration; its tied output head has no tensor of its own on either side."""
    model = config.model
    hidden = model.hidden_size
    entries = [
        Entry(
            "embedding.word_embeddings.weight",
            (padded_vocab_size, hidden),
            ("transformer.wte.weight",),
            padded_rows(vocab_size, padded_vocab_size),
        ),
        Entry(
            "embedding.position_embeddings.weight",
            (config.max_position_embeddings, hidden),
            ("transformer.wpe.weight",),
        ),
    ]
    for layer in range(model.num_layers):
        entries += _layer_entries(config, layer)
    entries += _affine("encoder.final_layernorm", "transformer.ln_f", (hidden,))
    return KeyMap(tuple(entries))


def _layer_entries(config: RunConfig, layer: int) -> list[Entry]:
    model = config.model
    hidden, inner = model.hidden_size, model.ffn_size
    ours, theirs = f"encoder.layers.{layer}", f"transformer.h.{layer}"
    blocks = qkv_blocks(model.num_attention_heads, model.head_dim)
    blocks_transposed = blocks.then(Tensor.t, Tensor.t)
    return [
        *_affine(f"{ours}.input_layernorm", f"{theirs}.ln_1", (hidden,)),
        *_affine(
            f"{ours}.self_attention.query_key_value",
            f"{theirs}.attn.c_attn",
            (3 * hidden, hidden),
            blocks_transposed,
            blocks,
        ),
        *_affine(f"{ours}.self_attention.dense", f"{theirs}.attn.c_proj", (hidden, hidden), TRANSPOSED),
        *_affine(f"{ours}.post_attention_layernorm", f"{theirs}.ln_2", (hidden,)),
        *_affine(f"{ours}.mlp.dense_h_to_4h", f"{theirs}.mlp.c_fc", (inner, hidden), TRANSPOSED),
        *_affine(f"{ours}.mlp.dense_4h_to_h", f"{theirs}.mlp.c_proj", (hidden, inner), TRANSPOSED),
    ]


def _affine(
    ours: str, theirs: str, shape: tuple[int, ...], weight: Layout = SAME, bias: Layout = SAME
) -> tuple[Entry, Entry]:
    """A weight of `shape` and the bias of its rows."""
    return (
        Entry(f"{ours}.weight", shape, (f"{theirs}.weight",), weight),
        Entry(f"{ours}.bias", shape[:1], (f"{theirs}.bias",), bias),
    )


def model_config(config: RunConfig, vocab_size: int, eod_id: int) -> dict[str, Any]:
    """`config.json` of the export."""
    model = config.model
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": config.max_position_embeddings,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_size,
        "activation_function": "gelu_new",
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "layer_norm_epsilon": model.layernorm_epsilon,
        "initializer_range": model.init_method_std,
        "bos_token_id": eod_id,
        "eos_token_id": eod_id,
        "tie_word_embeddings": True,
        "use_cache": True,
        "dtype": "float32",
    }


def generation_config(eod_id: int) -> dict[str, Any]:
    """`generation_config.json` of the export."""
    return {"bos_token_id": eod_id, "eos_token_id": eod_id, "pad_token_id": eod_id, **SAMPLING}


def module_pairs(num_layers: int) -> list[tuple[str, str]]:
    """Modules of ours and of transformers whose outputs must agree, in the order in which they run."""
    pairs = [("embedding", "transformer.drop")]
    for layer in range(num_layers):
        ours, theirs = f"encoder.layers.{layer}", f"transformer.h.{layer}"
        pairs += [
            (f"{ours}.input_layernorm", f"{theirs}.ln_1"),
            (f"{ours}.self_attention", f"{theirs}.attn"),
            (f"{ours}.post_attention_layernorm", f"{theirs}.ln_2"),
            (f"{ours}.mlp", f"{theirs}.mlp"),
            (ours, theirs),
        ]
    return [*pairs, ("encoder.final_layernorm", "transformer.ln_f")]
