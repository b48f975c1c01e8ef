"""`megacore compare`: exit codes, text and JSON."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megacore.cli import app
from megacore.convert.hf.write import write_model
from tests.compare._faults import theta
from tests.compare._runs import Written, since, write
from tests.convert._models import our_model, tiny_spec


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = tiny_spec("llama", num_layers=1)
    directory = tmp_path_factory.mktemp("model") / "hf"
    write_model(directory, spec, {k: v.detach() for k, v in our_model(spec).named_parameters()})
    return directory


def test_equal_models_exit_with_0(model: Path) -> None:
    result = CliRunner().invoke(app, ["compare", str(model), str(model), "--tokens", "1 2 3 4"])
    assert result.exit_code == 0, result.output
    assert "A and B are equal" in result.output


def test_different_models_exit_with_1_and_a_cause(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "other")
    theta(500000.0)(tmp_path / "other", tiny_spec("llama"))
    report = tmp_path / "report.json"
    arguments = ["compare", str(model), str(tmp_path / "other"), "--json", str(report)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "rope base" in result.output
    assert "explains the difference" in result.output
    values = json.loads(report.read_text(encoding="utf-8"))
    assert values["causes"] == ["rope_base"]
    assert values["facts"]["logits"]["first_differing_layer"].startswith("encoder.layers.0")


def test_only_the_weights_are_compared_on_request(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "other")
    result = CliRunner().invoke(
        app, ["compare", str(model), str(tmp_path / "other"), "--weights-only"]
    )
    assert result.exit_code == 0
    assert "logits" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "nowhere"], "nothing is no directory"),
        (["MODEL", "MODEL", "--as", "runs"], "is no run"),
        (["MODEL", "MODEL", "--as", "cats"], "--as is cats"),
        (["MODEL", "MODEL", "--weights-only", "--tokens", "1"], "out: leave out --tokens"),
        (["MODEL", "MODEL", "--weights-only", "--tolerance", "1"], "leave out --tolerance"),
        (["MODEL", "MODEL", "--tokens", "1 x"], "--tokens is '1 x'"),
        (["MODEL", "MODEL", "--tokens", "99999"], "has the id 99999"),
        (["MODEL", "MODEL", "--text", "words"], "neither model comes with a tokenizer"),
        (["MODEL", "MODEL", "--text", ""], "--text is empty: give a text"),
        (["MODEL", "MODEL", "--text", "caf\udce9"], "--text 'caf\\udce9' has bytes that are not"),
        (["MODEL", "MODEL", "--tokens", "7 " * 5000], "the probe has 5,000 tokens, and the models"),
        (["MODEL", "MODEL", "--seed", str(2**64)], f"--seed is {2**64}: give one of -"),
        (["MODEL", "MODEL", "--json", "no/x.json"], "--output is no/x.json, but"),
        (["MODEL", "MODEL", "--output", "/"], "--output is /, which is a directory: give a file"),
    ],
)
def test_what_cannot_be_compared_exits_with_2(
    arguments: list[str], message: str, model: Path
) -> None:
    given = [str(model) if each == "MODEL" else each for each in arguments]
    result = CliRunner().invoke(app, ["compare", *given])
    assert result.exit_code == 2
    assert message in result.output


def test_runs_are_compared_as_runs(tmp_path: Path) -> None:
    a = write(tmp_path / "a", Written(), tmp_path / "data")
    b = write(tmp_path / "b", Written({"seed": 7}, noise=since(1)), tmp_path / "data")
    result = CliRunner().invoke(app, ["compare", str(a), str(b), "--tolerance", "1"])
    assert result.exit_code == 2
    assert f"--tolerance is for models, and {a} and {b} are runs: leave it out" in result.output
    result = CliRunner().invoke(app, ["compare", str(a), str(b)])
    assert result.exit_code == 1
    assert "A and B differ: seed." in result.output
