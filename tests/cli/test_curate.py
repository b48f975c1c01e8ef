"""`megacore curate` writes documents that `megacore tokenize` reads, or refuses in one sentence."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datatrove", reason="the extra curate is not installed")

from typer.testing import CliRunner

from megacore.cli import app
from megacore.errors import ConfigError
from tests.corpus.test_curate import write


def test_the_command_writes_documents_that_tokenize_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", ["one document", "another", "one document"])
    Path("steps.yaml").write_text("- step: exact_dedup\n", encoding="utf-8")
    arguments = ["curate", "--input", "a.jsonl", "--steps", "steps.yaml", "--output", "out"]
    result = CliRunner().invoke(app, [*arguments, "--workers", "1"])
    assert result.exit_code == 0, result.output
    assert "| 1 exact_dedup | 1 | 0 | 1 clusters, the largest of 2 |" in result.output
    assert "out: 2 of 3 documents kept, 0.0 MB in " in result.output
    assert sorted(os.listdir()) == ["a.jsonl", "out", "steps.yaml"]
    assert [
        json.loads(line) for line in Path("out/documents-00000.jsonl").read_text().splitlines()
    ] == [
        {"text": "one document", "source": f"{tmp_path}/a.jsonl:1"},
        {"text": "another", "source": f"{tmp_path}/a.jsonl:2"},
    ]
    again = CliRunner().invoke(app, arguments)
    assert isinstance(again.exception, ConfigError)
    assert "out is not empty: give another --output" in str(again.exception)
    Path("steps.yaml").write_text(
        "data: {curate: [{step: pii, remove_ip: true}]}", encoding="utf-8"
    )
    wrong = CliRunner().invoke(app, [*arguments[:-1], "other"])
    message = r"steps\.yaml: unknown key curate.0.?\.remove_ip \(did you mean remove_ips\?\)"
    assert re.search(message, str(wrong.exception))
    Path("steps.yaml").write_text("data: {}", encoding="utf-8")
    wrong = CliRunner().invoke(app, [*arguments[:-1], "other"])
    assert "steps.yaml has no list of steps" in str(wrong.exception)
    assert sorted(os.listdir()) == ["a.jsonl", "out", "steps.yaml"]


def test_sources_are_compared_with_those_that_were_curated_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", ["one document", "another"])
    write(tmp_path / "b.jsonl", ["a third", "another"])
    Path("first.yaml").write_text("- step: exact_dedup\n", encoding="utf-8")
    Path("steps.yaml").write_text("- {step: exact_dedup, across_sources: true}\n", encoding="utf-8")

    def run(source: str, steps: str, output: str, *options: str) -> Any:
        words = ["curate", "--input", source, "--steps", steps, "--output", output, *options]
        return CliRunner().invoke(app, [*words, "--workers", "1"])

    assert run("a.jsonl", "first.yaml", "a").exit_code == 0
    result = run("b.jsonl", "steps.yaml", "b", "--earlier", "a", "--executor", "{kind: local}")
    assert result.exit_code == 0, result.output
    assert "the largest of 2, 1 duplicate of source 1 |" in result.output
    assert len(Path("b/documents-00000.jsonl").read_text().splitlines()) == 1
    for options, message in (
        ((), "but --earlier names no curated source"),
        (("--earlier", "nowhere"), "--earlier is nowhere, which is no output of megacore curate"),
        (("--earlier", "a", "--executor", "{kind: slur}"), "'slur': give local"),
        (("--earlier", "a", "--executor", "{"), "no YAML"),
    ):
        assert message in str(run("b.jsonl", "steps.yaml", "c", *options).exception)
    wrong = run("b.jsonl", "first.yaml", "c", "--earlier", "a")
    assert "no step compares sources" in str(wrong.exception)
