"""Architectures that a family does not support, and values that contradict each other."""

from typing import Any

import pytest

from megacore.config.model import Family, ModelConfig, check_model

T5 = {"position_embedding_type": "relative"}


def refusal(family: Family, **values: Any) -> str:
    model = ModelConfig(**{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4} | values)
    with pytest.raises(ValueError, match=r"model\.") as caught:
        check_model(family, model, 64)
    return str(caught.value)


def test_the_defaults_of_each_family_are_accepted() -> None:
    base = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    check_model("gpt", ModelConfig(**base), 64)
    check_model("bert", ModelConfig(**base, norm_position="post"), 64)
    check_model("t5", ModelConfig(**base, **T5), 64)


@pytest.mark.parametrize(
    ("family", "values", "sentence"),
    [
        (
            "gpt",
            {"norm_position": "post"},
            "norm_position is post but family is gpt: GPT takes pre or sandwich or reordered",
        ),
        (
            "bert",
            {"norm_position": "sandwich"},
            "norm_position is sandwich but family is bert: BERT takes pre or post",
        ),
        (
            "gpt",
            {"norm_position": "reordered", "parallel_residual": True},
            "norm_position is reordered but model.parallel_residual is true",
        ),
        (
            "gpt",
            {"qk_layernorm_scope": "projection", "normalization": "rmsnorm"},
            "qk_layernorm_scope is projection but model.qk_layernorm is false",
        ),
        (
            "gpt",
            {"qk_layernorm_scope": "projection", "qk_layernorm": True},
            "qk_layernorm_scope is projection but model.normalization is layernorm",
        ),
        (
            "gpt",
            {"window_attn_skip_freq": 2},
            "window_attn_skip_freq is 2 but model.sliding_window is null",
        ),
        (
            "t5",
            T5 | {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping is 50.0 but family is t5: it is only for GPT",
        ),
        (
            "gpt",
            {"num_decoder_layers": 3},
            "num_decoder_layers is 3 but family is gpt: it is only for T5",
        ),
        (
            "gpt",
            {"bert_binary_head": False},
            "bert_binary_head is false but family is gpt: it is only for BERT",
        ),
        (
            "gpt",
            T5,
            (
                "position_embedding_type is relative but family is gpt: GPT takes learned_absolute "
                "or rope"
            ),
        ),
        ("bert", {"position_embedding_type": "rope"}, "BERT takes learned_absolute"),
        (
            "bert",
            {"parallel_residual": True},
            "parallel_residual is true but family is bert: it is only for GPT",
        ),
        (
            "bert",
            {"sliding_window": 8},
            "sliding_window is 8 but family is bert: it is only for GPT",
        ),
        (
            "bert",
            {"add_bias_linear": False},
            "add_bias_linear is false but family is bert, whose layers are those",
        ),
        ("bert", {"normalization": "rmsnorm"}, "normalization is rmsnorm but family is bert"),
        (
            "t5",
            {},
            "position_embedding_type is learned_absolute but family is t5: T5 takes relative",
        ),
        (
            "t5",
            T5 | {"num_query_groups": 2},
            "num_query_groups is 2 but family is t5: it is only for GPT",
        ),
        (
            "t5",
            T5 | {"residual_init_std": 0.1},
            "residual_init_std is 0.1 but family is t5, whose initial weights follow",
        ),
        (
            "t5",
            T5 | {"init_method_std": 0.1},
            "init_method_std is 0.1 but family is t5, whose initial weights follow",
        ),
        ("t5", T5 | {"relative_attention_num_buckets": 6}, "relative_attention_num_buckets 6 and"),
        ("t5", T5 | {"relative_attention_max_distance": 16}, "the second more than half of it"),
        (
            "gpt",
            {"rotary_percent": 0.5},
            "rotary_percent is 0.5 but model.position_embedding_type is learned_absolute",
        ),
        (
            "gpt",
            {"position_embedding_type": "rope", "rotary_percent": 0.1},
            "rotary_percent 0.1 of a head of 8 leaves no even number of elements to rotate",
        ),
        (
            "gpt",
            {"rope_scaling": {"kind": "linear", "factor": 2.0}},
            "rope_scaling is {kind: linear} but model.position_embedding_type is learned_absolute",
        ),
        (
            "gpt",
            {
                "position_embedding_type": "rope",
                "rope_scaling": {
                    "kind": "longrope",
                    "factor": 2.0,
                    "original_max_position_embeddings": 8,
                    "short_factor": (1.0,) * 4,
                    "long_factor": (1.0,) * 5,
                },
            },
            "long_factor has 5 numbers, and 8 rotated elements of a head have 4 frequencies",
        ),
        (
            "gpt",
            {
                "position_embedding_type": "rope",
                "rotary_percent": 0.25,
                "rope_scaling": {
                    "kind": "dynamic",
                    "factor": 2.0,
                    "original_max_position_embeddings": 8,
                },
            },
            "kind dynamic, which is not defined for 2 rotated elements",
        ),
        (
            "gpt",
            {"add_qkv_bias": True},
            "add_qkv_bias is true but so is model.add_bias_linear",
        ),
        (
            "t5",
            T5 | {"add_qkv_bias": True},
            "add_qkv_bias is true but family is t5: it is only for GPT",
        ),
        (
            "t5",
            T5 | {"scale_decoder_outputs": True, "untie_embeddings_and_output_weights": True},
            "scale_decoder_outputs is true but so is model.untie_embeddings_and_output_weights",
        ),
        (
            "gpt",
            {"num_attention_heads": 5},
            "hidden_size 32 is not a multiple of model.num_attention_heads 5",
        ),
        (
            "gpt",
            {"num_query_groups": 3},
            "num_attention_heads 4 is not a multiple of model.num_query_groups 3",
        ),
        ("gpt", {"max_position_embeddings": 63}, "raise the latter to at least 64"),
    ],
)
def test_unsupported_architectures_are_refused(
    family: Family, values: dict[str, Any], sentence: str
) -> None:
    assert sentence in refusal(family, **values)


def test_kv_channels_need_not_divide_the_hidden_size() -> None:
    model = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=5, kv_channels=8)
    check_model("gpt", model, 64)
    assert model.attention_size == 40
