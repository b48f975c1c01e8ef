"""Rotary positions in config.json: what transformers computes is what megacore reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.convert.hf.config import HfConfig
from megacore.convert.hf.forms import FORMS, model_config, read_spec
from megacore.convert.outputs import their_outputs
from megacore.errors import ConversionError
from megacore.models.build import build_bare
from megacore.parallel.mesh import ProcessMesh
from tests.convert._models import randomize, samples, tiny_spec

LONG = [1.0, 1.5, 2.0, 4.0]
LLAMA3 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.5},
    "yarn": {"factor": 4.0},
    "yarn of a length": {"factor": 4.0, "original_max_position_embeddings": 8},
    "yarn without rounding": {"factor": 4.0, "beta_fast": 4, "beta_slow": 2, "truncate": False},
    "yarn attention": {"factor": 4.0, "attention_factor": 0.7},
    "yarn mscale": {"factor": 4.0, "mscale": 0.5, "mscale_all_dim": 1.2},
    "yarn half of mscale": {"factor": 4.0, "mscale": 0.5},
    "yarn ratio": {"factor": None, "original_max_position_embeddings": 8},
    "llama3": LLAMA3,
    "longrope": {"factor": 4.0, "short_factor": LONG, "long_factor": LONG[::-1]},
    "longrope long": {
        "short_factor": LONG,
        "long_factor": LONG[::-1],
        "original_max_position_embeddings": 8,
    },
}
"""Values of the mapping by name; the first word is the kind."""


def config_of(name: str, values: dict[str, Any], directory: Path) -> Path:
    """Write the config.json of a tiny model without rotary positions, and with `values`."""
    written = model_config(tiny_spec(name), "float32")
    for key in ("rope_theta", "rope_parameters", "rope_scaling", "rotary_emb_base", "rotary_pct"):
        written.pop(key, None)
    (directory / "config.json").write_text(json.dumps({**written, **values}), encoding="utf-8")
    return directory


def logits(directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of transformers and of megacore for a config.json, with equal weights."""
    import transformers

    hf_class, spec = read_spec(HfConfig.read(directory))
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    theirs = randomize(transformers.AutoModelForCausalLM.from_config(config))
    ours = build_bare(spec, ProcessMesh.serial(), device="cpu").eval()
    form, state = FORMS[hf_class.model_type], theirs.state_dict()
    table = form.key_map(spec)
    on_disk = {name: state[form.name_when_loaded(name)] for name in table.their_shapes}
    ours.load_state_dict(dict(table.ours(on_disk)))
    batch = samples(spec)
    with torch.inference_mode():
        return their_outputs(theirs, batch).logits, ours(batch.tokens)[..., : spec.vocab_size]


def assert_same(name: str, values: dict[str, Any], directory: Path) -> torch.Tensor:
    theirs, ours = logits(config_of(name, values, directory))
    assert float((theirs - ours).abs().max()) <= 2e-5
    return ours


@pytest.mark.parametrize("class_name", ["llama", "neox", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("case", SCALINGS)
def test_scaled_positions_equal_transformers(case: str, class_name: str, tmp_path: Path) -> None:
    kind, values = case.split()[0], dict(SCALINGS[case])
    directory = {"max_position_embeddings": 16 if kind == "dynamic" else 32}
    if class_name == "neox":
        directory["rotary_pct"] = 1.0
    if kind == "longrope" and class_name == "qwen3":  # its heads are wider
        values |= {"short_factor": LONG * 2, "long_factor": LONG[::-1] * 2}
    scaled = directory | {"rope_scaling": {"type": kind, **values}}
    ours = assert_same(class_name, scaled, tmp_path)
    assert float((ours - assert_same(class_name, directory, tmp_path)).abs().max()) > 1e-3


@pytest.mark.parametrize("case", SCALINGS)
def test_a_scaling_is_written_for_both_versions_of_transformers(case: str, tmp_path: Path) -> None:
    values = {
        "rope_parameters": {"rope_type": case.split()[0], "rope_theta": 5e3, **SCALINGS[case]}
    }
    _, spec = read_spec(HfConfig.read(config_of("llama", values, tmp_path)))
    written = model_config(spec, "float32")
    assert read_spec(HfConfig(written, "config.json"))[1] == spec
    for left_out in ("rope_parameters", "rope_scaling"):
        only_one = {key: value for key, value in written.items() if key != left_out}
        assert read_spec(HfConfig(only_one, "config.json"))[1] == spec
    theirs, ours = logits(config_of("llama", values, tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(written), encoding="utf-8")
    again, ours_again = logits(tmp_path)
    assert float((theirs - ours).abs().max()) <= 2e-5
    assert float((again - ours_again).abs().max()) <= 2e-5
    if written["model_type"] == "llama":  # LongRoPE is written as Phi-3, which draws other weights
        assert float((theirs - again).abs().max()) <= 2e-5


COMBINATIONS: dict[str, dict[str, Any]] = {
    "default and scaling": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "default with base and scaling": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_theta": 300.0,
    },
    "scaling and default": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0},
        "rope_scaling": {"rope_type": "default", "rope_theta": 70.0},
    },
    "empty scaling": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0},
        "rope_scaling": {},
        "rope_theta": 300.0,
    },
    "two bases": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "rope_theta": 300.0,
    },
    "two bases and scaling": {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        "rope_theta": 300.0,
    },
    "two names of the kind": {
        "rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}
    },
    "no kind": {"rope_scaling": {"factor": 2.0}},
    "length outside": {
        "rope_scaling": {"type": "llama3", **LLAMA3},
        "original_max_position_embeddings": 8,
    },
    "length outside of yarn": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        "original_max_position_embeddings": 8,
    },
    "length without effect": {
        "rope_scaling": {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 16},
        "original_max_position_embeddings": 8,
    },
    "nothing": {},
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_of_several_mappings_the_one_of_transformers_is_taken(name: str, tmp_path: Path) -> None:
    values = COMBINATIONS[name]
    ours = assert_same("llama", values, tmp_path)
    changed = values and name not in ("no kind",)
    plain = assert_same("llama", {}, tmp_path)
    assert (float((ours - plain).abs().max()) > 1e-3) == bool(changed)


@pytest.mark.parametrize(
    ("class_name", "values", "message"),
    [
        ("llama", {"rope_scaling": {"type": "mrope"}}, "rope_scaling is of type 'mrope'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling has no factor"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}},
            r"rope_scaling has mrope_section \[1\], which nothing here reads",
        ),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling 'linear' where a value of type dict"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": float("inf")}}, "finite number"),
        ("llama", {"rope_theta": None}, "rope_theta None"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            "llama",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters has full_attention",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "longrope", "short_factor": LONG, "long_factor": [1.0]}},
            r"long_factor has 1 numbers, and 8 rotated elements of a head have 4 frequencies",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1, "beta_slow": 2}},
            "beta_fast 1.0 is less than beta_slow 2.0",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
            "low_freq_factor 4.0 is not less than high_freq_factor 4.0",
        ),
        ("neox", {"rope_theta": 500.0}, "rope_theta 500.0"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "Phi3ForCausalLM"),
    ],
)
def test_other_positions_are_refused(
    class_name: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConversionError, match=message) as caught:
        read_spec(HfConfig.read(config_of(class_name, values, tmp_path)))
    assert "\n" not in str(caught.value)
