"""Values of config.json of Llama's relatives: used, or refused by name."""

from typing import Any

import pytest

from megacore.config.model import ModelConfig
from megacore.convert.hf.config import HfConfig
from megacore.convert.hf.forms import model_config, read_spec
from megacore.errors import ConversionError
from tests.convert._models import tiny_spec


def read(name: str, left_out: str | None = None, **changes: Any) -> ModelConfig:
    values = model_config(tiny_spec(name, num_layers=4), "float32") | changes
    values.pop(left_out, None)
    return read_spec(HfConfig(values, "config.json"))[1].model


def test_absent_values_are_the_classes_defaults() -> None:
    assert read("gemma2", "layer_types").window_attn_skip_freq == 2
    assert read("gemma2", "sliding_window").sliding_window == 4096
    assert read("gemma2", "attn_logit_softcapping").attn_logit_softcapping == 50
    assert read("gemma2", "final_logit_softcapping").final_logit_softcapping == 30
    assert read("gemma2", attn_logit_softcapping=None).attn_logit_softcapping is None
    assert read("gemma2", "query_pre_attn_scalar").query_pre_attn_scalar == 256
    assert not read("gemma2", "tie_word_embeddings").untie_embeddings_and_output_weights
    assert read("olmo2", "tie_word_embeddings").untie_embeddings_and_output_weights
    assert read("olmo2", num_key_value_heads=None).query_groups == 4
    assert read("starcoder2", "use_bias").add_bias_linear
    assert read("starcoder2", "sliding_window").sliding_window is None


@pytest.mark.parametrize(
    ("kinds", "window", "skip"),
    [("wfwf", 7, 2), ("wwfw", 7, 3), ("wwww", 7, None), ("ffff", None, None), ("wwwf", 7, 4)],
)
def test_every_regular_pattern_of_windows_is_read(
    kinds: str, window: int | None, skip: int | None
) -> None:
    names = {"w": "sliding_attention", "f": "full_attention"}
    model = read("gemma2", layer_types=[names[kind] for kind in kinds])
    assert (model.sliding_window, model.window_attn_skip_freq) == (window, skip)
    read_kinds = ["w" if model.has_window(layer) else "f" for layer in range(4)]
    assert "".join(read_kinds) == kinds


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("gemma2", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "layer_types"),
        ("gemma2", {"layer_types": ["full_attention"] * 3}, "layer_types .* only 4 layers"),
        ("gemma2", {"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ("gemma2", {"sliding_window": None}, "'sliding_attention' and no sliding_window"),
        ("gemma2", {"attention_bias": True}, "attention_bias True"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping is -1"),
        ("olmo2", {"attention_bias": True}, "attention_bias True"),
        ("olmo2", {"head_dim": 12}, "head_dim 12"),
        ("starcoder2", {"embedding_dropout": 0.1}, "embedding_dropout 0.1"),
        ("starcoder2", {"hidden_act": "silu"}, "hidden_act 'silu'"),
    ],
)
def test_values_that_models_here_lack_are_refused_by_name(
    name: str, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConversionError, match=sentence):
        read(name, **changes)
