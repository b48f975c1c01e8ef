"""Every class of transformers: its table, its configuration, and what both models compute."""

from typing import Any

import pytest
import torch

from megacore.convert.hf.config import HfConfig
from megacore.convert.hf.forms import hf_form_of, model_config, read_spec
from megacore.convert.outputs import meaningful, our_outputs, their_outputs
from megacore.convert.parity import recorded_outputs
from megacore.models.inputs import ModelInput
from tests.convert._models import MODELS, on_disk, our_model, samples, their_model, tiny_spec


@pytest.fixture(params=list(MODELS), scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(name: str) -> tuple[Any, Any]:
    """Our model, and one of transformers with other weights; not to be changed."""
    spec = tiny_spec(name)
    return our_model(spec), their_model(spec)


def difference(name: str, ours: Any, theirs: Any) -> float:
    spec = tiny_spec(name)
    given = samples(spec)
    with torch.inference_mode():
        own, other = our_outputs(spec.family, ours, given), their_outputs(theirs, given)
    places = meaningful(given)
    assert other.logits[places].std() > 0.1
    largest = float((own.logits[..., : spec.vocab_size] - other.logits)[places].abs().max())
    assert (own.answers is None) == (other.answers is None)
    if own.answers is not None and other.answers is not None:
        largest = max(largest, float((own.answers - other.answers).abs().max()))
    return largest


def test_class(name: str) -> None:
    spec = tiny_spec(name)
    found, _ = hf_form_of(spec)
    assert found.architecture == MODELS[name][1]
    assert model_config(spec, "float32")["architectures"] == [MODELS[name][1]]


def test_ours_in_transformers(name: str, pair: tuple[Any, Any]) -> None:
    spec = tiny_spec(name)
    ours, theirs = pair[0], their_model(spec)
    assert difference(name, *pair) > 0.01
    _, form = hf_form_of(spec)
    state = {
        form.name_when_loaded(key): value
        for key, value in form.key_map(spec).forward(dict(ours.named_parameters()))
    }
    _, unexpected = theirs.load_state_dict(state, strict=False)
    assert unexpected == []
    assert difference(name, ours, theirs) <= 2e-5


def test_theirs_in_our_model(name: str, pair: tuple[Any, Any]) -> None:
    spec = tiny_spec(name)
    theirs, ours = pair[1], our_model(spec)
    _, form = hf_form_of(spec)
    ours.load_state_dict(dict(form.key_map(spec).ours(on_disk(spec, theirs))), strict=True)
    assert difference(name, ours, theirs) <= 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trips_are_bitwise(name: str, pair: tuple[Any, Any], dtype: torch.dtype) -> None:
    spec = tiny_spec(name)
    table = hf_form_of(spec)[1].key_map(spec)
    theirs = {key: value.to(dtype) for key, value in on_disk(spec, pair[1]).items()}
    again = dict(table.forward(dict(table.ours(theirs))))
    assert again.keys() == theirs.keys()
    assert all(torch.equal(again[key], value) for key, value in theirs.items())
    ours = {key: value.detach().to(dtype) for key, value in pair[0].named_parameters()}
    back = dict(table.ours(dict(table.forward(ours))))
    assert back.keys() == ours.keys()
    for key, value in ours.items():
        rows = spec.vocab_size if len(value) == spec.padded_vocab_size else len(value)
        assert torch.equal(back[key][:rows], value[:rows]), key
        assert not back[key][rows:].any(), f"{key} has padding that is not zero"


def test_every_parameter_of_both_models_is_in_the_table(name: str, pair: tuple[Any, Any]) -> None:
    spec = tiny_spec(name)
    _, form = hf_form_of(spec)
    table = form.key_map(spec)
    assert {
        key: tuple(value.shape) for key, value in pair[0].named_parameters()
    } == table.our_shapes
    held = {key: tuple(value.shape) for key, value in pair[1].named_parameters()}
    wanted = {form.name_when_loaded(key): shape for key, shape in table.their_shapes.items()}
    assert held == wanted


def test_paired_modules_give_the_same_hidden_states(name: str, pair: tuple[Any, Any]) -> None:
    spec = tiny_spec(name)
    theirs, ours = pair[1], our_model(spec)
    _, form = hf_form_of(spec)
    ours.load_state_dict(dict(form.key_map(spec).ours(on_disk(spec, theirs))))
    pairs = form.module_pairs(spec)
    given = whole(samples(spec))
    with (
        torch.inference_mode(),
        recorded_outputs(ours, [names[0] for names in pairs]) as own,
        recorded_outputs(theirs, [names[1] for names in pairs]) as others,
    ):
        our_outputs(spec.family, ours, given)
        their_outputs(theirs, given)
    layers = spec.model.num_layers + (spec.model.decoder_layers if spec.family == "t5" else 0)
    assert len(pairs) >= 4 * layers + 1
    for our_name, their_name in pairs:
        torch.testing.assert_close(
            own[our_name], others[their_name], atol=2e-5, rtol=1e-5, msg=our_name
        )


def whole(given: ModelInput) -> ModelInput:
    """The first sample, which has no padding."""
    return ModelInput(
        **{field: None if value is None else value[:1] for field, value in vars(given).items()}
    )


def test_configuration_comes_back(name: str) -> None:
    spec = tiny_spec(name, init_method_std=0.03)
    found, again = read_spec(HfConfig(model_config(spec, "float32"), "config.json"))
    assert found.architecture == MODELS[name][1]
    derived = {
        "num_query_groups": "query_groups",
        "kv_channels": "head_dim",
        "ffn_hidden_size": "ffn_size",
        "num_decoder_layers": "decoder_layers",
    }
    # How far the vocabulary is padded is ours alone, and T5's initial weights follow from widths.
    unknown = {"make_vocab_size_divisible_by"} | (
        {"init_method_std"} if spec.family == "t5" else set()
    )
    for field in type(spec.model).model_fields.keys() - unknown:
        name_of_value = derived.get(field, field)
        assert getattr(again.model, name_of_value) == getattr(spec.model, name_of_value), field
    assert again.vocab_size == spec.vocab_size
    assert again.special_tokens.eod == (None if spec.family == "bert" else spec.special_tokens.eod)


def test_configuration_that_transformers_saves_comes_back(name: str, pair: tuple[Any, Any]) -> None:
    values = pair[1].config.to_dict() | {"architectures": [MODELS[name][1]]}
    _, direct = read_spec(HfConfig(model_config(tiny_spec(name), "float32"), "config.json"))
    _, through = read_spec(HfConfig(values, "config.json"))
    assert through.model == direct.model
