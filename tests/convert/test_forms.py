"""Every class of transformers: its table, its configuration, and the outputs of both models."""

from typing import Any

import pytest
import torch

from megacore.convert.hf.config import HfConfig
from megacore.convert.hf.forms import hf_form_of, model_config, read_spec
from megacore.convert.outputs import meaningful, our_outputs, their_outputs
from megacore.convert.parity import recorded_outputs
from megacore.errors import ConversionError
from megacore.models.inputs import ModelInput
from tests.convert._models import MODELS, on_disk, our_model, samples, their_model, tiny_spec


@pytest.fixture(params=list(MODELS), scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pair(name: str) -> tuple[Any, Any]:
    """Return megacore's model and one of transformers with other weights; tests only read them."""
    spec = tiny_spec(name)
    return our_model(spec), their_model(spec)


def difference(name: str, ours: Any, theirs: Any) -> float:
    spec = tiny_spec(name)
    micro_batch = samples(spec)
    with torch.inference_mode():
        our_output, their_output = (
            our_outputs(spec.family, ours, micro_batch),
            their_outputs(theirs, micro_batch),
        )
    places = meaningful(micro_batch)
    assert their_output.logits[places].std() > 0.1
    largest = float(
        (our_output.logits[..., : spec.vocab_size] - their_output.logits)[places].abs().max()
    )
    assert (our_output.answers is None) == (their_output.answers is None)
    if our_output.answers is not None and their_output.answers is not None:
        largest = max(largest, float((our_output.answers - their_output.answers).abs().max()))
    return largest


def test_each_model_has_its_class_of_transformers(name: str) -> None:
    spec = tiny_spec(name)
    form, _ = hf_form_of(spec)
    assert form.architecture == MODELS[name][1]
    assert model_config(spec, "float32")["architectures"] == [MODELS[name][1]]


def test_megacores_weights_give_the_same_outputs_in_transformers(
    name: str, pair: tuple[Any, Any]
) -> None:
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


def test_transformers_weights_give_the_same_outputs_in_megacore(
    name: str, pair: tuple[Any, Any]
) -> None:
    spec = tiny_spec(name)
    theirs, ours = pair[1], our_model(spec)
    _, form = hf_form_of(spec)
    ours.load_state_dict(dict(form.key_map(spec).ours(on_disk(spec, theirs))), strict=True)
    assert difference(name, ours, theirs) <= 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trips_are_bit_identical(
    name: str, pair: tuple[Any, Any], dtype: torch.dtype
) -> None:
    spec = tiny_spec(name)
    table = hf_form_of(spec)[1].key_map(spec)
    theirs = {key: value.to(dtype) for key, value in on_disk(spec, pair[1]).items()}
    theirs_again = dict(table.forward(dict(table.ours(theirs))))
    assert theirs_again.keys() == theirs.keys()
    assert all(torch.equal(theirs_again[key], value) for key, value in theirs.items())
    ours = {key: value.detach().to(dtype) for key, value in pair[0].named_parameters()}
    ours_again = dict(table.ours(dict(table.forward(ours))))
    assert ours_again.keys() == ours.keys()
    for key, value in ours.items():
        rows = spec.vocab_size if len(value) == spec.padded_vocab_size else len(value)
        assert torch.equal(ours_again[key][:rows], value[:rows]), key
        assert not ours_again[key][rows:].any(), f"{key} has padding that is not zero"


def test_every_parameter_of_both_models_is_in_the_table(name: str, pair: tuple[Any, Any]) -> None:
    spec = tiny_spec(name)
    _, form = hf_form_of(spec)
    table = form.key_map(spec)
    assert {
        key: tuple(value.shape) for key, value in pair[0].named_parameters()
    } == table.our_shapes
    shapes = {key: tuple(value.shape) for key, value in pair[1].named_parameters()}
    expected = {form.name_when_loaded(key): shape for key, shape in table.their_shapes.items()}
    assert shapes == expected


def test_paired_modules_give_the_same_hidden_states(name: str, pair: tuple[Any, Any]) -> None:
    spec = tiny_spec(name)
    theirs, ours = pair[1], our_model(spec)
    _, form = hf_form_of(spec)
    ours.load_state_dict(dict(form.key_map(spec).ours(on_disk(spec, theirs))))
    pairs = form.module_pairs(spec)
    micro_batch = first_sample(samples(spec))
    with (
        torch.inference_mode(),
        recorded_outputs(ours, [names[0] for names in pairs]) as our_states,
        recorded_outputs(theirs, [names[1] for names in pairs]) as their_states,
    ):
        our_outputs(spec.family, ours, micro_batch)
        their_outputs(theirs, micro_batch)
    layers = spec.model.num_layers + (spec.model.decoder_layers if spec.family == "t5" else 0)
    assert len(pairs) >= 4 * layers + 1
    for our_name, their_name in pairs:
        torch.testing.assert_close(
            our_states[our_name], their_states[their_name], atol=2e-5, rtol=1e-5, msg=our_name
        )


def first_sample(micro_batch: ModelInput) -> ModelInput:
    """Return only the first sample, which has no padding."""
    return ModelInput(
        **{
            field: None if value is None else value[:1]
            for field, value in vars(micro_batch).items()
        }
    )


def test_a_t5_without_a_number_of_decoder_layers_has_as_many_as_the_encoder() -> None:
    values = model_config(tiny_spec("t5"), "float32") | {"num_decoder_layers": None}
    assert read_spec(HfConfig(values, "config.json"))[1].model.decoder_layers == 3


@pytest.mark.parametrize(
    ("name", "key", "supported"),
    [("neox", "rotary_pct", "0.25"), ("phi3-ungrouped", "partial_rotary_factor", "0.25")],
)
def test_an_odd_number_of_rotated_elements_is_refused_by_name(
    name: str, key: str, supported: str
) -> None:
    values = model_config(tiny_spec(name), "float32") | {key: 0.375}
    values.pop("rope_parameters")
    with pytest.raises(ConversionError) as raised:
        read_spec(HfConfig(values, "DIR/config.json"))
    assert str(raised.value) == (
        "DIR/config.json describes a model with rotary_percent 0.375, which models here lack: only "
        f"{supported} can be read"
    )


def test_a_written_configuration_is_read_back(name: str) -> None:
    spec = tiny_spec(name, init_method_std=0.03)
    form, spec_read = read_spec(HfConfig(model_config(spec, "float32"), "config.json"))
    assert form.architecture == MODELS[name][1]
    derived = {
        "num_query_groups": "query_groups",
        "kv_channels": "head_dim",
        "ffn_hidden_size": "ffn_size",
        "num_decoder_layers": "decoder_layers",
    }
    # Only megacore records the padding of the vocabulary. T5's initial weights follow from widths.
    unknown = {"make_vocab_size_divisible_by"} | (
        {"init_method_std"} if spec.family == "t5" else set()
    )
    for field in type(spec.model).model_fields.keys() - unknown:
        name_of_value = derived.get(field, field)
        assert getattr(spec_read.model, name_of_value) == getattr(spec.model, name_of_value), field
    assert spec_read.vocab_size == spec.vocab_size
    assert spec_read.special_tokens.eod == (
        None if spec.family == "bert" else spec.special_tokens.eod
    )


def test_a_configuration_saved_by_transformers_is_read_back(
    name: str, pair: tuple[Any, Any]
) -> None:
    values = pair[1].config.to_dict() | {"architectures": [MODELS[name][1]]}
    _, direct = read_spec(HfConfig(model_config(tiny_spec(name), "float32"), "config.json"))
    _, through = read_spec(HfConfig(values, "config.json"))
    assert through.model == direct.model
