"""Deployments in prefect.yaml: one of every flow for every file in conf/, and no others."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megacore.config import FinetuneConfig, RunConfig, load_config, load_finetune_config
from tests.architecture._source import ROOT, tree

FLOWS = {
    "pretrain": "flows/pretrain.py:pretrain",
    "prepare-data": "flows/prepare_data.py:prepare_data",
    "evaluate": "flows/evaluate.py:evaluate",
    "export": "flows/export.py:export",
}
"""Flows that take the files in conf/."""
FINETUNE = {"finetune": "flows/finetune.py:finetune"}
"""The flow that takes the files in conf/finetune/."""
CONFS = sorted(path.stem for path in (ROOT / "conf").glob("*.yaml"))
FINETUNE_CONFS = sorted(path.stem for path in (ROOT / "conf" / "finetune").glob("*.yaml"))


@pytest.fixture(scope="module")
def prefect_yaml() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))
    return values


def test_every_conf_has_a_deployment_of_every_flow(prefect_yaml: dict[str, Any]) -> None:
    deployed = sorted((item["entrypoint"], item["name"]) for item in prefect_yaml["deployments"])
    assert FINETUNE_CONFS
    assert deployed == sorted(
        (entrypoint, conf)
        for flows, confs in ((FLOWS, CONFS), (FINETUNE, FINETUNE_CONFS))
        for entrypoint in flows.values()
        for conf in confs
    )


def test_deployments_differ_only_in_flow_and_conf(prefect_yaml: dict[str, Any]) -> None:
    base = prefect_yaml["definitions"]["base"]
    for item in prefect_yaml["deployments"]:
        assert item["parameters"] == {"conf": item["name"], "overrides": {}}
        assert {key: value for key, value in item.items() if key in base} == base
        assert set(item) == {
            *base,
            "name",
            "entrypoint",
            "parameters",
            "description",
            "tags",
        }
        assert item["concurrency_limit"]["limit"] == 1
        assert item["work_pool"] == {"name": "local"}


def test_descriptions_state_the_hardware_of_the_conf(prefect_yaml: dict[str, Any]) -> None:
    for item in prefect_yaml["deployments"]:
        conf, text = read_conf(item), item["description"]
        count, device = re.findall(r"\b(\d+) (CPU core|GPU)s?\b", text)[0]
        assert int(count) == conf.launch.nproc_per_node, text
        assert (device == "CPU core") == item["name"].endswith("-tiny"), text


def test_tags_state_flow_family_size_and_devices(prefect_yaml: dict[str, Any]) -> None:
    for item in prefect_yaml["deployments"]:
        project, flow, family, size, device = item["tags"]
        assert project == "megacore"
        assert (FLOWS | FINETUNE)[flow] == item["entrypoint"]
        text, conf = item["description"], read_conf(item)
        assert isinstance(conf, FinetuneConfig) or family == conf.family
        assert size in item["name"] or size in text.lower(), item
        on_cpu = "CPU core" in text or flow == "prepare-data"
        assert device == ("cpu" if on_cpu else "gpu"), item


def read_conf(item: dict[str, Any]) -> RunConfig | FinetuneConfig:
    """Load the configuration of a deployment."""
    if item["entrypoint"] in FINETUNE.values():
        return load_finetune_config(item["name"], conf_dir=ROOT / "conf" / "finetune")
    return load_config(item["name"], conf_dir=ROOT / "conf")


@pytest.mark.parametrize("name", FLOWS | FINETUNE)
def test_entrypoints_are_flows_that_take_conf_and_overrides(name: str) -> None:
    file, function = (FLOWS | FINETUNE)[name].split(":")
    functions = [
        node
        for node in tree(Path(file)).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    assert len(functions) == 1
    assert [argument.arg for argument in functions[0].args.args][:2] == ["conf", "overrides"]
    decorators = [ast.unparse(node) for node in functions[0].decorator_list]
    assert any(text.startswith("flow(") and f"name='{name}'" in text for text in decorators)


def test_runs_work_in_the_clone_that_deployed_them(prefect_yaml: dict[str, Any]) -> None:
    step = prefect_yaml["pull"][0]["prefect.deployments.steps.set_working_directory"]
    assert step == {"directory": "{{ $PWD }}"}


def test_a_conf_is_named_like_its_file() -> None:
    for conf in CONFS:
        assert load_config(conf, conf_dir=ROOT / "conf").name == conf
