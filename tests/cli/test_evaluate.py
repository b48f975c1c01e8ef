"""`megacore evaluate`: equal scores for every layout and form of the weights, and refusals."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from megacore.cli._options import check_output_file
from megacore.cli.models import _print_scores
from megacore.errors import ConfigError, DataFormatError, MegacoreError
from tests.cli._model import Files, output, run, write_files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("evaluate"))


def scores(files: Files, model: Path, target: Path, *arguments: object) -> dict[str, Any]:
    texts = ("--wikitext", files.wikitext, "--lambada", files.lambada, "--overlapping-eval", 40)
    table = output("evaluate", "--checkpoint", model, *texts, "--output", target, *arguments)
    results: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    assert f"{results['wikitext']['token_ppl']:,.4f}" in table
    assert f"{results['lambada']['accuracy']:.4f}" in table
    assert results.pop("model") == str(model)
    return results


def test_a_perplexity_that_overflows_is_null_in_the_file(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = {"wikitext": {"loss": math.nan, "word_ppl": math.inf, "words": 1}}
    monkeypatch.setattr("megacore.ranks.stages.run_job", lambda *_: scored)
    target = tmp_path / "scores.json"
    model = ("--checkpoint", files.checkpoint, "--output", target)
    assert "inf" in output("evaluate", *model, "--wikitext", files.wikitext)
    values = json.loads(target.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert values["wikitext"] == {"loss": None, "word_ppl": None, "words": 1}


@pytest.mark.slow
def test_every_layout_and_form_gives_the_same_scores(files: Files, tmp_path: Path) -> None:
    expected = scores(files, files.checkpoint, tmp_path / "alone.json")
    assert expected["wikitext"]["overlapping_eval"] == 40
    assert expected["lambada"]["passages"] == 30
    exported = scores(files, files.export, tmp_path / "export.json", "--batch-size", 3)
    two = scores(files, files.checkpoint, tmp_path / "two.json", "--data-parallel-size", 2)
    for other in (exported, two):
        assert other["wikitext"] == pytest.approx(expected["wikitext"], rel=1e-5)
        assert other["lambada"] == pytest.approx(expected["lambada"], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {},
            ConfigError,
            "there is nothing to score the model on: give --wikitext, --lambada or --passkey",
        ),
        ({"--wikitext": "nowhere"}, DataFormatError, "nowhere is no file: check the path"),
        (
            {"--lambada": "LAMBADA", "--overlapping-eval": 8},
            ConfigError,
            "--overlapping-eval is 8 without --wikitext",
        ),
        (
            {"--wikitext": "WIKITEXT", "--overlapping-eval": 65},
            ConfigError,
            "overlapping_eval is 65, but windows of 64",
        ),
        (
            {"--wikitext": "WIKITEXT", "--seq-length": 65},
            ConfigError,
            "seq_length is 65 and the model has 64 positions",
        ),
        (
            {"--wikitext": "WIKITEXT", "--output": "nowhere/x"},
            ConfigError,
            "nowhere is no directory: make it first",
        ),
        (
            {"--wikitext": "WIKITEXT", "--output": "/"},
            ConfigError,
            "--output is /, which is a directory: give a file",
        ),
        (
            {"--passkey": 65},
            ConfigError,
            "the passkey test has the length 65 and the model has 64 positions",
        ),
        (
            {"--passkey": 64},
            ConfigError,
            "has the length 64, but a prompt without filler has",
        ),
        (
            {"--passkey": 60, "--passkey-depth": 1.5},
            ConfigError,
            "the passkey test: depths",
        ),
        (
            {"--lambada": "LAMBADA", "--passkey-prompts": 3},
            ConfigError,
            "the prompts of the passkey test are given without --passkey",
        ),
        (
            {"--lambada": "WIKITEXT"},
            DataFormatError,
            "wiki.txt:2 is no JSON object with a text under the key text",
        ),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    files: Files, arguments: dict[str, object], error: type[MegacoreError], message: str
) -> None:
    paths = {"WIKITEXT": files.wikitext, "LAMBADA": files.lambada}
    options = [
        part for name, value in arguments.items() for part in (name, paths.get(str(value), value))
    ]
    result = run("evaluate", "--checkpoint", files.checkpoint, *options)
    assert isinstance(result.exception, error), result.output
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_models_and_tokenizers_of_another_kind_are_refused(files: Files) -> None:
    result = run("evaluate", "--checkpoint", files.bert, "--lambada", files.lambada)
    assert isinstance(result.exception, ConfigError)
    assert "holds a model of family bert" in str(result.exception)
    wrong = ("--tokenizer", files.other_tokenizer)
    result = run("evaluate", "--checkpoint", files.checkpoint, "--lambada", files.lambada, *wrong)
    assert isinstance(result.exception, ConfigError)
    assert "a vocabulary of 310 entries and the model in" in str(result.exception)


def test_a_long_path_of_the_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/data/" + "a" * 200
    _print_scores(path, {"wikitext": {"loss": 1.0}})
    assert capsys.readouterr().out.splitlines()[0] == path


def test_passkey_cells_are_rows_after_the_totals(capsys: pytest.CaptureFixture[str]) -> None:
    cell = {"length": 1024, "depth": 0.5, "prompts": 4, "accuracy": 0.25, "ranked_accuracy": 0.75}
    totals = {"accuracy": 0.125, "ranked_accuracy": 0.5, "chance": 0.1, "prompts": 8}
    _print_scores("model", {"passkey": totals | {"cells": [cell]}})
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "passkey" in line]
    assert [(row[2].strip(), row[3].strip()) for row in rows] == [
        ("accuracy", "0.1250"),
        ("ranked accuracy", "0.5000"),
        ("accuracy, 1,024 tokens, depth 0.5", "0.2500"),
        ("chance", "0.1000"),
        ("prompts", "8"),
        ("ranked accuracy, 1,024 tokens, depth 0.5", "0.7500"),
    ]


def test_an_output_that_would_replace_a_device_or_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("file")
    for path in (Path("/dev/null"), Path("/dev/stdout"), tmp_path / "pipe"):
        with pytest.raises(ConfigError, match=f"--output is {path}, which is no regular file"):
            check_output_file(path, "--output")
    check_output_file(tmp_path / "new", "--output")
    check_output_file(tmp_path / "link", "--output")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]
