"""Form on Prefect's page: schema of its parameters, conversion to overrides, conflicts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.utilities.schema_tools import ValidationError, validate

from megacore.errors import ConfigError
from tasks._form import (
    FINE_TUNING,
    PRETRAINING,
    Form,
    all_overrides,
    merged,
    parameter_of,
    with_form,
)
from tests._limits import HANG

FORMS = {
    "pretrain": PRETRAINING,
    "prepare_data": PRETRAINING,
    "evaluate": PRETRAINING,
    "export": PRETRAINING,
    "finetune": FINE_TUNING,
}


_DUMP = """
import importlib, inspect, json, sys
from prefect.utilities.callables import parameter_schema
dumped = {}
for name in sys.argv[1:]:
    flow = getattr(importlib.import_module(f"flows.{name}"), name)
    parameters = [*inspect.signature(flow.fn).parameters]
    dumped[name] = parameter_schema(flow).model_dump_for_openapi(), parameters
print(json.dumps(dumped))
"""
"""Program that prints what `prefect deploy` deploys, and the parameters with which runs start."""


@pytest.fixture(scope="module")
def flows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return schema and parameters of each flow; its import would change this process."""
    result = subprocess.run(
        [sys.executable, "-c", _DUMP, *FORMS],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "MEGACORE_WORKSPACE": str(tmp_path_factory.mktemp("workspace"))},
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG,
    )
    dumped: dict[str, Any] = json.loads(result.stdout)
    return dumped


@with_form(PRETRAINING)
def received(conf: str, overrides: Any = None, dry_run: bool = False) -> Any:
    return overrides


@pytest.mark.parametrize("name", FORMS)
def test_every_flow_shows_the_form_of_its_configuration(flows: dict[str, Any], name: str) -> None:
    schema, parameters = flows[name]
    properties = schema["properties"]
    shown = sorted(properties, key=lambda each: properties[each]["position"])
    form = [parameter_of(key) for key in FORMS[name].titles]
    assert shown[: len(form) + 1] == ["conf", *form]
    assert shown[-1] == "overrides"
    for key, title in FORMS[name].titles.items():
        assert properties[parameter_of(key)]["title"] == title
        assert properties[parameter_of(key)]["description"].startswith(f"{key}: ")
    assert set(parameters) == set(shown)


def test_types_and_limits_are_those_of_the_fields(flows: dict[str, Any]) -> None:
    pretraining, fine_tuning = (flows[name][0]["properties"] for name in ("pretrain", "finetune"))
    expected = {
        "train_iters": {"type": "integer", "exclusiveMinimum": 0},
        "lr": {"type": "number", "exclusiveMinimum": 0},
        "min_lr": {"type": "number", "minimum": 0},
        "precision": {"type": "string", "enum": ["auto", "fp32", "bf16", "fp16"]},
        "seed": {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**32},
        "nproc_per_node": {"anyOf": [{"type": "integer"}, {"const": "auto", "type": "string"}]},
    }
    texts = ("title", "description", "position")
    for name, kind in expected.items():
        shown = pretraining[name].items()
        assert {key: value for key, value in shown if key not in texts} == kind  # no default
    assert fine_tuning["max_steps"]["type"] == "integer"  # null in the field
    assert fine_tuning["conf"]["description"].startswith("Name of a file in conf/finetune/")


def test_server_refuses_values_outside_the_limits_and_accepts_older_parameters(
    flows: dict[str, Any],
) -> None:
    schema, _ = flows["pretrain"]
    for parameters in ({"train_iters": "many"}, {"lr": -1}, {"precision": "fp8"}):
        with pytest.raises(ValidationError, match=next(iter(parameters))):
            validate(parameters, schema, raise_on_error=True)
    for accepted in ({"conf": "gpt2-tiny", "overrides": {}}, {"train_iters": 400, "lr": 1e-3}):
        validate(accepted, schema, raise_on_error=True)


def test_form_without_a_field_is_refused() -> None:
    renamed = Form(PRETRAINING.schema, "conf/", {"train.iterations": "Iterations"})
    with pytest.raises(KeyError, match="iterations"):
        with_form(renamed)(received)


def test_values_become_overrides_and_empty_ones_do_not() -> None:
    assert received("gpt2-tiny", {"data.split": "9,1,0"}, train_iters=20, min_lr=0, lr=None) == {
        "data.split": "9,1,0",
        "train.train_iters": 20,
        "optim.min_lr": 0,
    }
    assert received("gpt2-tiny") == {}
    assert received("gpt2-tiny", "train_iters") == "train_iters"  # load_config refuses it


@pytest.mark.parametrize(
    "overrides",
    [{"train.train_iters": 400}, {"train.train_iters": None}, {"train": {"train_iters": 400}}],
)
def test_another_value_in_overrides_is_refused(overrides: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"train\.train_iters is 20 in the form.*in overrides"):
        received("gpt2-tiny", overrides, train_iters=20)


def test_value_takes_effect_beside_an_override_of_its_section() -> None:
    overrides = {"train.train_iters": 20, "train": {"micro_batch_size": 4}}
    result = merged(overrides, {"train.train_iters": 20})
    assert list(result) == ["train", "train.train_iters"]


def test_resume_command_can_find_each_value() -> None:
    titles = {**PRETRAINING.titles, **FINE_TUNING.titles}
    names = [parameter_of(name) for name in titles]
    assert len(set(names)) == len(names)
    parameters = {"conf": "gpt2-tiny", "overrides": {"seed": 3}, "train_iters": 20, "lr": None}
    assert all_overrides(parameters) == {"seed": 3, "train.train_iters": 20}
