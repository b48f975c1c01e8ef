"""`megacore curate` writes documents that `megacore tokenize` reads, or refuses in one sentence."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datatrove", reason="the extra curate is not installed")

from typer.testing import CliRunner

from megacore.cli import app
from megacore.corpus.curate import curate_segments
from megacore.errors import ConfigError, DataFormatError
from tests._limits import HANG
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
    assert "| 1 exact_dedup | 1 | 0 | 1 cluster, the largest of 2 |" in result.output
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
    assert "steps.yaml has no list of steps: give one such as" in str(wrong.exception)
    assert "or a configuration whose section data has the list" in str(wrong.exception)
    assert sorted(os.listdir()) == ["a.jsonl", "out", "steps.yaml"]


def prepare(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write two documents and a step to the current directory; return the command's words."""
    monkeypatch.chdir(directory)
    write(directory / "a.jsonl", ["one document", "another"])
    Path("steps.yaml").write_text("- step: exact_dedup\n", encoding="utf-8")
    words = ["curate", "--input", "a.jsonl", "--steps", "steps.yaml", "--output", "out"]
    return [*words, "--workers", "1"]


def test_input_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = prepare(tmp_path, monkeypatch)

    def curate_and_overwrite(*arguments: Any, **options: Any) -> Any:
        counts = curate_segments(*arguments, **options)
        write(tmp_path / "a.jsonl", ["another", "one document"])
        os.utime("a.jsonl", (1, 1))
        return counts

    monkeypatch.setattr("megacore.corpus.curate.curate_segments", curate_and_overwrite)
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, DataFormatError)
    assert f"{tmp_path}/a.jsonl changed while it was read" in str(result.exception)
    assert not Path("out").exists()
    assert not Path(".out.curate/job.json").exists()


def test_a_second_command_waits_for_the_first_and_refuses_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = prepare(tmp_path, monkeypatch)
    second: list[subprocess.Popen[str]] = []

    def curate_while_another_waits(*arguments: Any, **options: Any) -> Any:
        command = [sys.executable, "-c", "from megacore.cli import main; main()", *words]
        second.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        assert second[0].stderr is not None
        assert "waits for" in second[0].stderr.readline()
        return curate_segments(*arguments, **options)

    monkeypatch.setattr("megacore.corpus.curate.curate_segments", curate_while_another_waits)
    result = CliRunner().invoke(app, words)
    _, errors = second[0].communicate(timeout=HANG)
    assert result.exit_code == 0, result.output
    assert "out is not empty: give another --output" in errors
    assert second[0].returncode == ConfigError.exit_code
    assert sorted(os.listdir()) == ["a.jsonl", "out", "steps.yaml"]


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("killed_in", ["rename", "rmtree"])
def test_work_that_a_killed_command_left_next_to_its_output_is_removed(
    killed_in: str, links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = prepare(tmp_path, monkeypatch)
    # The work directory has another name, out.tmp-PID, while it is removed.
    program = (
        "import errno, os, shutil, sys; from megacore.cli import main\n"
        "def link(source, target):\n"
        "    raise OSError(errno.EPERM, 'no hard links', source, None, target)\n"
        f"{'' if links else 'os.link = link'}\n"
        "def rename(source, target, rename=os.rename):\n"
        "    os._exit(9) if '.out.curate' in str(source) else rename(source, target)\n"
        "def rmtree(path, rmtree=shutil.rmtree, **options):\n"
        "    os._exit(9) if 'out.tmp-' in str(path) else rmtree(path, **options)\n"
        f"{'os.rename = rename' if killed_in == 'rename' else 'shutil.rmtree = rmtree'}\n"
        "main()"
    )
    killed = subprocess.run([sys.executable, "-c", program, *words], check=False)
    assert killed.returncode == 9
    assert len(os.listdir()) > 3
    again = CliRunner().invoke(app, words)
    assert "out is not empty" in str(again.exception)
    assert sorted(os.listdir()) == ["a.jsonl", "out", "steps.yaml"]


def test_work_of_another_curation_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = prepare(tmp_path, monkeypatch)
    assert CliRunner().invoke(app, words).exit_code == 0
    shutil.move("out", "other")
    write(tmp_path / "a.jsonl", ["one document", "another", "another"])
    command = sys.modules["megacore.cli.curate"]
    monkeypatch.setattr(command, "_remove", lambda work, output: None)
    assert CliRunner().invoke(app, words).exit_code == 0
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    shutil.rmtree("out")
    # It has the same documents, but not the same report.
    shutil.move("other", "out")
    assert "out is not empty" in str(CliRunner().invoke(app, words).exception)
    assert Path(".out.curate/documents/documents-00000.jsonl").exists()


def test_work_next_to_another_output_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = prepare(tmp_path, monkeypatch)
    for name in ("out", ".out.curate/documents"):
        Path(name).mkdir(parents=True)
        (Path(name) / "documents-00000.jsonl").touch()
    assert "out is not empty" in str(CliRunner().invoke(app, words).exception)
    assert Path(".out.curate/documents/documents-00000.jsonl").exists()


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
