"""The command `megacore adopt`: files, exit codes and the start of the flow."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

import megacore
from megacore.adopt.read import PROGRAMS
from megacore.cli import app
from megacore.config import load_config
from megacore.errors import AdoptionError, ConfigError
from tests.adopt._samples import BERT, MEGATRON


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty directory the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["adopt", *arguments], catch_exceptions=True)


def test_a_script_becomes_a_file_and_a_report(here: Path) -> None:
    Path("my_run.sh").write_text(MEGATRON)
    result = run("my_run.sh", "--set", "2=/data/web_text_document")
    assert result.exit_code == 0, result.output
    assert "parameters: 196,109,312 by its formula, 196,109,312 by ours" in result.output
    assert "wrote my-run.yaml" in result.output
    assert "-m flows.pretrain --conf" in result.output
    config = load_config("my-run.yaml")
    assert config.name == "my-run"
    assert config.data.blend is not None
    assert config.data.blend[0].source.prefix == "/data/web_text_document"  # type: ignore[union-attr]
    assert "first answer the questions" not in result.output


def test_the_help_lists_all_programs() -> None:
    (option,) = (
        each for each in get_command(app).commands["adopt"].params if each.name == "program"
    )
    assert option.help is not None
    assert all(program in option.help for program in PROGRAMS)


def test_a_file_with_questions_names_them_before_the_commands(here: Path) -> None:
    Path("a.sh").write_text(MEGATRON)
    result = run("a.sh")
    assert result.exit_code == 0, result.output
    remark = "first answer the questions marked with ? in a.yaml, then\ncheck it: "
    assert remark in result.output
    assert re.search(r": .*  # \? ", Path("a.yaml").read_text())


def test_a_file_is_never_overwritten(here: Path) -> None:
    Path("a.sh").write_text(BERT)
    Path("mine.yaml").write_text("kept")
    result = run("a.sh", "--output", "mine.yaml")
    assert isinstance(result.exception, ConfigError)
    assert "mine.yaml exists and is not overwritten: give another --output" in str(result.exception)
    assert Path("mine.yaml").read_text() == "kept"


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("no/x.yaml", "--output is no/x.yaml, but .*no is no directory: make it first"),
        (".", "exists and is not overwritten: give another --output"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_report(
    here: Path, place: str, sentence: str
) -> None:
    Path("a.sh").write_text(BERT)
    result = run("a.sh", "--output", place)
    assert isinstance(result.exception, ConfigError)
    assert re.search(sentence, str(result.exception))
    assert result.output == ""


def test_refused_features_write_nothing_and_have_an_exit_code_of_their_own(here: Path) -> None:
    Path("a.sh").write_text(BERT.replace("--eval-iters 0", "--num-experts 4"))
    result = run("a.sh")
    assert isinstance(result.exception, AdoptionError)
    assert result.exception.exit_code == 13
    assert "--num-experts 4 (a.sh:4): mixture of experts; nearest: a dense model" in result.output
    assert not Path("a.yaml").exists()
    partial = run("a.sh", "--partial")
    assert isinstance(partial.exception, AdoptionError)
    assert "#   --num-experts 4 (a.sh:4): mixture of experts" in Path("a.yaml").read_text()
    assert load_config("a.yaml").family == "bert"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("python tools/preprocess_data.py --input x\n", "nothing to adopt. a.sh: data preparation"),
        (BERT.replace("layers 4", "layers $N"), "--num-layers $N (a.sh:1) for model.num_layers"),
    ],
)
def test_other_scripts_and_missing_values_are_one_sentence(
    here: Path, text: str, sentence: str
) -> None:
    Path("a.sh").write_text(text)
    result = run("a.sh")
    assert isinstance(result.exception, ConfigError)
    assert sentence in str(result.exception)
    assert not Path("a.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--set", "A"), "--set 'A' is not NAME=VALUE"),
        (("--set", "LAYRES=3"), "a.sh has no variable of this name (did you mean LAYERS?)"),
        (("--program", "fairseq"), "--program is fairseq: give one of megatron"),
    ],
)
def test_wrong_options(here: Path, arguments: tuple[str, ...], sentence: str) -> None:
    Path("a.sh").write_text(f"LAYERS=4\n{BERT}")
    result = run("a.sh", *arguments)
    assert sentence in str(result.exception)


def test_missing_files_are_one_sentence(here: Path) -> None:
    for name in ("none.sh", "none.yaml"):
        result = run(name)
        assert isinstance(result.exception, ConfigError)
        assert f"{name} cannot be read" in str(result.exception)


def test_run_starts_the_flow_of_the_clone(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], Path]] = []

    def started(command: list[str], cwd: Path, check: bool) -> subprocess.CompletedProcess[str]:
        calls.append((command, cwd))
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(subprocess, "run", started)
    Path("a.sh").write_text(BERT)
    result = run("a.sh", "--run")
    assert result.exit_code == 7  # the flow's
    clone = Path(megacore.__file__).resolve().parents[1]
    target = str(here / "a.yaml")
    assert calls == [([sys.executable, "-m", "flows.pretrain", "--conf", target], clone)]


def test_run_is_refused_with_questions_and_without_a_clone(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("a.sh").write_text(MEGATRON)
    result = run("a.sh", "--run")
    assert "is written and not started: it has questions (data.blend)" in str(result.exception)
    monkeypatch.setattr(sys.modules["megacore.cli.init"], "clone_directory", lambda: None)
    Path("b.sh").write_text(BERT)
    result = run("b.sh", "--run")
    assert "--run needs a clone of megacore" in str(result.exception)
    assert Path("b.yaml").is_file()
