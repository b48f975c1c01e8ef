"""The examples of docs/data.md, run in the order of the page."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from megacore.cli import app
from megacore.config.data import DataConfig
from megacore.errors import MegacoreError

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[list[str], str]]:
    """Return the arguments and the displayed output of each command."""
    matches = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", "".join(blocks("console")), re.MULTILINE)
    return [(shlex.split(command), shown) for command, shown in matches]


def run(arguments: list[str]) -> str:
    """Return what a command prints; an error is printed like `main` does."""
    result = CliRunner().invoke(app, arguments)
    if isinstance(result.exception, MegacoreError):
        return f"error: {result.exception}\n"
    assert result.exit_code == 0, result.output
    return result.output


def normalized(text: str) -> str:
    """Remove the page's line breaks and what differs in each run."""
    text = re.sub(r"in [\d.]+ s \(\d+ MB/s\)|[\d,]+ bytes, sha256", "…", text)
    return " ".join(text.split()) if text.startswith("error: ") else text


def test_examples_print_what_the_page_shows(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("vocab.json", "merges.txt"):
        Path(name).symlink_to(shared_data / "data" / f"gpt2-{name}")
    programs_run = []
    for (program, *arguments), shown in commands():
        if program == "cat":
            Path(arguments[0]).write_text(shown)
            continue
        assert program == "megacore"
        # what Megatron-DeepSpeed would have written for the first example
        if "books_text_document" in arguments:
            Path("books_text_document.idx").write_bytes(
                Path("notes_text_document.idx").read_bytes()
            )
            Path("books_text_document.bin").write_bytes(
                Path("notes_text_document.bin").read_bytes() + bytes(6)
            )
        programs_run.append(arguments[0])
        assert normalized(run(arguments)).replace(f"{tmp_path}/", "/data/") == normalized(shown), (
            arguments
        )
    assert programs_run == ["tokenize", "index", "inspect", "inspect", "verify", "verify", "verify"]


@pytest.mark.parametrize("block", blocks("yaml"))
def test_configurations_of_the_page_are_valid(block: str) -> None:
    values = yaml.safe_load(block)["data"]
    config = {"tokenizer": {"kind": "train-bpe"}, "seq_length": 8, **values}
    DataConfig.model_validate(
        config if "blend" in values else {"source": {"kind": "source_tree"}, **config}
    )


def test_keys_of_the_page_are_those_of_the_configuration() -> None:
    named = set(re.findall(r"`data\.(\w+)", PAGE))
    assert named <= set(DataConfig.model_fields)
    assert {
        "blend",
        "split_blends",
        "packing",
        "fim",
        "shard_mb",
        "dask_address",
        "on_bad_line",
    } <= (named | set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)))
