"""Every field of a config.json is read, known to be without effect, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.convert import load_model, open_export
from megacore.convert.hf.config import WITHOUT_EFFECT, WITHOUT_EFFECT_IN, HfConfig
from megacore.convert.hf.directory import open_hf
from megacore.convert.hf.forms import FORMS, model_config, read_spec
from megacore.convert.imported import import_model
from megacore.convert.outputs import meaningful, our_outputs, their_outputs
from megacore.convert.parity import load_exported
from megacore.convert.ungated_export import export_hf, open_source
from megacore.errors import ConversionError
from tests.convert._models import MODELS, samples, their_model, tiny_spec

ONE_OF_EACH = {
    model_config(tiny_spec(name), "float32")["model_type"]: name for name in reversed(MODELS)
}
"""Name of a model of each class, by `model_type`."""


def read(name: str, **values: Any) -> Any:
    written = model_config(tiny_spec(name), "float32")
    return read_spec(HfConfig({**written, **values}, "config.json"))[1]


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_an_unknown_field_is_refused_by_name_and_value(name: str) -> None:
    for key, value in (("logit_scale", 0.5), ("use_magic", False), ("per_layer_config", {"0": {}})):
        with pytest.raises(ConversionError, match=rf"config\.json has {key} .*nothing here reads"):
            read(name, **{key: value})
    assert read(name, logit_scale=None) == read(name)


@pytest.mark.parametrize("model_type", FORMS)
def test_fields_without_effect_are_accepted(model_type: str) -> None:
    name = ONE_OF_EACH[model_type]
    written = model_config(tiny_spec(name), "float32")
    known = {**WITHOUT_EFFECT, **WITHOUT_EFFECT_IN.get(model_type, {})}
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")  # read for generation
    extra = {key: "any" for key in known if key not in (*written, *tokens)}
    assert read(name, **extra) == read(name)
    assert all(reason.strip() for reason in known.values())


@pytest.mark.parametrize("model_type", FORMS)
def test_the_defaults_of_transformers_are_accepted(model_type: str) -> None:
    """Check that every field of the class's own configuration is known."""
    transformers = pytest.importorskip("transformers")
    written = model_config(tiny_spec(ONE_OF_EACH[model_type]), "float32")
    layers = {key: written[key] for key in written if key == "num_hidden_layers"}
    values = transformers.AutoConfig.for_model(model_type, **layers).to_dict()
    read_spec(HfConfig({**values, **written}, "config.json"))


HUGE = (10**9, 10**12, 10**15, 10**40)
SIZES = (
    "hidden_size",
    "n_embd",
    "d_model",
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "num_decoder_layers",
    "num_attention_heads",
    "n_head",
    "num_heads",
    "intermediate_size",
    "n_inner",
    "d_ff",
    "d_kv",
    "head_dim",
    "max_position_embeddings",
    "n_positions",
    "vocab_size",
    "relative_attention_num_buckets",
)


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_hostile_sizes_are_refused_before_anything_is_built(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = model_config(tiny_spec(name), "float32")
    keys = [key for key in SIZES if key in written]
    assert len(keys) >= 6
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("something is built"))
    for key in keys:
        for size in (*HUGE[1:], 0, -1) if "position" in key else (*HUGE[2:], 0, -1):
            with pytest.raises(ConversionError) as caught:
                read(name, **{key: size})
            assert "\n" not in str(caught.value)
    for key in ("num_attention_heads", "n_head", "num_heads"):
        if key in written:
            with pytest.raises(ConversionError, match="heads"):
                read(name, **{key: 10**6})
    for key in ("num_hidden_layers", "n_layer", "num_layers"):
        if key in written:
            with pytest.raises(ConversionError, match="num_layers is 1000000000"):
                read(name, **{key: 10**9})


STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 10**12, 10**400, -(10**400), 1.5, 1e308, float("nan"), "x", ""),
    *([], [1], {}, {"a": 1}, {"rope_type": None}, {"type": "linear", "factor": 1e308}),
    {"type": "dynamic", "factor": 1e308},
    {"type": "yarn", "factor": None},
    {"type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": "a"},
    {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [10**400] * 4},
)


@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_strange_values_are_read_or_refused_in_one_sentence(name: str) -> None:
    written = model_config(tiny_spec(name), "float32")
    sentences = []
    for key in (*written, "rope_scaling", "layer_types", "head_dim", "n_inner", "pruned_heads"):
        for value in STRANGE:
            try:
                read_spec(HfConfig({**written, key: value}, "config.json"))
            except ConversionError as error:
                sentences.append(str(error))
    assert len(sentences) > 200
    assert max(map(len, sentences)) < 700
    assert not any("\n" in sentence for sentence in sentences)


def t5(directory: Path, *, tied: bool, scaled: bool) -> Any:
    """Save a T5 of transformers 5 with a tied or separate head, with or without scaling."""
    import transformers

    theirs = their_model(tiny_spec("t5" if tied else "t5-v1.1"))
    theirs.config.scale_decoder_outputs = scaled
    theirs.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    assert (config["tie_word_embeddings"], config["scale_decoder_outputs"]) == (True, scaled)
    again = transformers.T5ForConditionalGeneration.from_pretrained(directory).eval()
    assert (again.lm_head.weight is again.shared.weight) == tied
    return again


@pytest.mark.parametrize(("tied", "scaled"), [(True, True), (True, False), (False, False)])
def test_tie_and_scale_of_a_t5_are_separate(tied: bool, scaled: bool, tmp_path: Path) -> None:
    theirs = t5(tmp_path / "hf", tied=tied, scaled=scaled)
    checkpoint = import_model(open_hf(tmp_path / "hf"), tmp_path / "hf", tmp_path / "imported")
    export_hf(open_source(checkpoint), tmp_path / "again")
    again = load_exported(tmp_path / "again")
    assert (again.lm_head.weight is again.shared.weight) == tied
    batch = samples(tiny_spec("t5"))
    with torch.inference_mode():
        expected = their_outputs(theirs, batch).logits
        for directory in (tmp_path / "hf", tmp_path / "again"):
            spec, tensors = open_export(directory)
            assert spec.model.untie_embeddings_and_output_weights is not tied
            assert spec.model.scales_decoder_outputs is scaled
            ours = our_outputs("t5", load_model(spec, tensors, "cpu"), batch).logits[..., :100]
            assert (ours - expected)[meaningful(batch)].abs().max() <= 2e-5
        assert (their_outputs(again, batch).logits - expected)[
            meaningful(batch)
        ].abs().max() <= 2e-5


def test_the_directory_of_an_export_may_be_given_as_text(tmp_path: Path) -> None:
    their_model(tiny_spec("gpt2")).save_pretrained(tmp_path)
    spec, tensors = open_export(str(tmp_path))
    assert spec.family == "gpt"
    assert "encoder.final_layernorm.weight" in tensors


def test_a_separate_head_with_scaling_is_refused(tmp_path: Path) -> None:
    t5(tmp_path / "hf", tied=False, scaled=True)
    with pytest.raises(ConversionError, match="with different values"):
        import_model(open_hf(tmp_path / "hf"), tmp_path / "hf", tmp_path / "imported")


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("gpt2", {"embd_pdrop": 0.3}, "embd_pdrop 0.3"),
        ("gpt2", {"hidden_size": 64}, "hidden_size 64"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention True"),
        ("llama", {"sliding_window": 5}, "sliding_window 5"),
        (
            "llama",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config of 'fp8': its weights are quantized",
        ),
        ("llama", {"quantization": {"bits": 4}}, "a quantization: its weights are quantized"),
        ("qwen2", {"attention_bias": True}, "attention_bias True"),
        ("qwen2", {"use_mrope": True}, "use_mrope True"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop 0.1"),
        ("bert", {"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ("t5", {"dense_act_fn": "silu"}, "dense_act_fn 'silu'"),
        ("t5", {"is_gated_act": True}, "is_gated_act True"),
        ("t5", {"is_decoder": True}, "is_decoder True"),
    ],
)
def test_fields_with_another_effect_are_refused(
    name: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConversionError, match=message):
        read(name, **values)


@pytest.mark.parametrize(
    ("values", "window"),
    [
        ({"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0}, None),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, 9),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}, None),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 28}, None),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 3,
                "layer_types": ["sliding_attention"] * 3,
            },
            9,
        ),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 0,
                "layer_types": ["full_attention"] * 3,
            },
            None,
        ),
    ],
)
def test_the_window_of_qwen2_is_that_of_transformers(
    values: dict[str, Any], window: int | None
) -> None:
    transformers = pytest.importorskip("transformers")
    written = {**model_config(tiny_spec("qwen2"), "float32"), **values}
    config = transformers.Qwen2Config(**written)
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    assert sliding == [window is not None] * 3
    assert read("qwen2", **values).model.sliding_window == window


def test_a_window_of_some_layers_is_refused() -> None:
    mixed = {"use_sliding_window": True, "sliding_window": 9}
    with pytest.raises(ConversionError, match="max_window_layers 1"):
        read("qwen2", **mixed, max_window_layers=1)
    types = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(ConversionError, match="layer_types"):
        read("qwen2", **mixed, layer_types=types)


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("count", [2, 4])
def test_a_type_per_layer_is_required(kind: str, count: int) -> None:
    window = {"use_sliding_window": True, "sliding_window": 9}
    with pytest.raises(ConversionError, match="has layer_types "):
        read("qwen2", **window, layer_types=[kind] * count)


def test_another_start_of_the_decoder_than_padding_is_refused() -> None:
    read("t5", pad_token_id=3, decoder_start_token_id=3)
    read("t5", pad_token_id=None, decoder_start_token_id=0)
    read("t5", pad_token_id=3, decoder_start_token_id=None)
    with pytest.raises(ConversionError, match=r"has decoder_start_token_id 1, .* only 3 can be"):
        read("t5", pad_token_id=3, decoder_start_token_id=1)
