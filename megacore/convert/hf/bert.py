"""BERT (Devlin et al. 2018) in the format of transformers.

BertForPreTraining has a norm after each residual sum, MegatronBertForPreTraining before each
branch. BertForMaskedLM and MegatronBertForMaskedLM lack the binary head.
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
    padded_rows,
    queries_keys_values,
)

_SEGMENTS = 2


def key_map(spec: ModelSpec) -> KeyMap:
    """Build the table of an encoder with its heads.

    The decoder of the masked LM's head is tied to the token embedding.
    """
    model = spec.model
    hidden, post = model.hidden_size, model.norm_position == "post"
    entries = [
        embedding(spec, "bert.embeddings.word_embeddings.weight"),
        Entry(
            "embedding.position_embeddings.weight",
            (spec.max_position_embeddings, hidden),
            ("bert.embeddings.position_embeddings.weight",),
        ),
        Entry(
            "embedding.tokentype_embeddings.weight",
            (_SEGMENTS, hidden),
            ("bert.embeddings.token_type_embeddings.weight",),
        ),
    ]
    if post:
        entries += norm(spec, "embedding.layernorm", "bert.embeddings.LayerNorm")
    for layer in range(model.num_layers):
        entries += _layer_entries(spec, f"encoder.layers.{layer}", f"bert.encoder.layer.{layer}")
    if not post:
        entries += norm(spec, "encoder.final_layernorm", "bert.encoder.ln")
    return KeyMap((*entries, *_head_entries(spec)))


def _layer_entries(spec: ModelSpec, ours: str, theirs: str) -> list[Entry]:
    model = spec.model
    hidden, inner, post = model.hidden_size, model.ffn_size, model.norm_position == "post"
    attention, their_attention = f"{ours}.self_attention", f"{theirs}.attention"
    names = (f"{their_attention}.self.{part}" for part in ("query", "key", "value"))
    norms = (
        (
            (f"{ours}.post_attention_layernorm", f"{their_attention}.output.LayerNorm"),
            (f"{ours}.output_layernorm", f"{theirs}.output.LayerNorm"),
        )
        if post
        else (
            (f"{ours}.input_layernorm", f"{their_attention}.ln"),
            (f"{ours}.post_attention_layernorm", f"{theirs}.ln"),
        )
    )
    return [
        *queries_keys_values(spec, attention, *names),
        *linear(
            f"{attention}.dense", f"{their_attention}.output.dense", (hidden, hidden), bias=True
        ),
        *linear(
            f"{ours}.mlp.dense_h_to_4h", f"{theirs}.intermediate.dense", (inner, hidden), bias=True
        ),
        *linear(f"{ours}.mlp.dense_4h_to_h", f"{theirs}.output.dense", (hidden, inner), bias=True),
        *(entry for pair in norms for entry in norm(spec, *pair)),
    ]


def _head_entries(spec: ModelSpec) -> list[Entry]:
    hidden = spec.model.hidden_size
    entries = [
        *linear("lm_head.dense", "cls.predictions.transform.dense", (hidden, hidden), bias=True),
        *norm(spec, "lm_head.layernorm", "cls.predictions.transform.LayerNorm"),
        Entry(
            "lm_head.bias",
            (spec.padded_vocab_size,),
            ("cls.predictions.bias",),
            padded_rows(spec.vocab_size, spec.padded_vocab_size),
        ),
    ]
    if spec.model.bert_binary_head:
        entries += linear("pooler.dense", "bert.pooler.dense", (hidden, hidden), bias=True)
        entries += linear("binary_head", "cls.seq_relationship", (2, hidden), bias=True)
    return entries


def write_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the class-specific values of config.json."""
    model = spec.model
    return {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "intermediate_size": model.ffn_size,
        "hidden_act": THEIR_ACTIVATION[model.activation],
        "hidden_dropout_prob": model.hidden_dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "max_position_embeddings": spec.max_position_embeddings,
        "type_vocab_size": _SEGMENTS,
        "initializer_range": model.init_method_std,
        "layer_norm_eps": model.layernorm_epsilon,
        "pad_token_id": spec.special_tokens.pad,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
    }


def read_config(config: HfConfig) -> dict[str, Any]:
    """Translate config.json to values of `ModelConfig`.

    Raises:
        ConversionError: if our models do not support a value.
    """
    config.refuse_unless("position_embedding_type", "absolute")
    config.refuse_unless("type_vocab_size", _SEGMENTS)
    config.refuse_unless("directionality", "bidi")
    config.refuse_unless("tie_word_embeddings", True)
    post = config.get("model_type", str) == "bert"
    return {
        "num_layers": config.get("num_hidden_layers", int),
        "hidden_size": config.get("hidden_size", int),
        "num_attention_heads": config.get("num_attention_heads", int),
        "ffn_hidden_size": config.get("intermediate_size", int),
        "activation": config.activation("hidden_act", "gelu", gated=False),
        "norm_position": "post" if post else "pre",
        "max_position_embeddings": config.get("max_position_embeddings", int, 512),
        "hidden_dropout": config.get("hidden_dropout_prob", float, 0.1),
        "attention_dropout": config.get("attention_probs_dropout_prob", float, 0.1),
        "init_method_std": config.get("initializer_range", float, 0.02),
        "layernorm_epsilon": config.get("layer_norm_eps", float, 1e-12),
    }


def module_pairs(spec: ModelSpec) -> list[tuple[str, str]]:
    """Return corresponding modules (ours, theirs) with equal outputs, in execution order."""
    post = counterpart(spec.family, spec.model).model_type == "bert"
    pairs = [("embedding", "bert.embeddings")]
    for layer in range(spec.model.num_layers):
        ours, theirs = f"encoder.layers.{layer}", f"bert.encoder.layer.{layer}"
        attention = (f"{ours}.self_attention", f"{theirs}.attention.output.dense")
        mlp = (f"{ours}.mlp", f"{theirs}.output.dense")
        if post:
            pairs += [
                attention,
                (f"{ours}.post_attention_layernorm", f"{theirs}.attention.output.LayerNorm"),
                mlp,
                (f"{ours}.output_layernorm", f"{theirs}.output.LayerNorm"),
            ]
        else:
            pairs += [
                (f"{ours}.input_layernorm", f"{theirs}.attention.ln"),
                attention,
                (f"{ours}.post_attention_layernorm", f"{theirs}.ln"),
                mlp,
                (ours, theirs),
            ]
    if not post:
        pairs.append(("encoder.final_layernorm", "bert.encoder.ln"))
    pairs.append(("lm_head.layernorm", "cls.predictions.transform.LayerNorm"))
    if spec.model.bert_binary_head:
        pairs += [("pooler", "bert.pooler"), ("binary_head", "cls.seq_relationship")]
    return pairs
