"""docs/data.md shows what the commands print: its examples are run, in the order of the page."""

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
    """(arguments, what the page shows) of each command."""
    found = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", "".join(blocks("console")), re.MULTILINE)
    return [(shlex.split(command), shown) for command, shown in found]


def run(arguments: list[str]) -> str:
    """What a command prints, an error as `main` does."""
    result = CliRunner().invoke(app, arguments)
    if isinstance(result.exception, MegacoreError):
        return f"error: {result.exception}\n"
    assert result.exit_code == 0, result.output
    return result.output


def plain(text: str) -> str:
    """Without line breaks of the page and without what differs each time."""
    text = re.sub(r"in [\d.]+ s \(\d+ MB/s\)|[\d,]+ bytes, sha256", "…", text)
    return " ".join(text.split()) if text.startswith("error: ") else text


def test_examples_print_what_the_page_shows(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("vocab.json", "merges.txt"):
        Path(name).symlink_to(shared_data / "data" / f"gpt2-{name}")
    ran = []
    for (program, *arguments), shown in commands():
        if program == "cat":
            Path(arguments[0]).write_text(shown)
            continue
        assert program == "megacore"
        # as Megatron-DeepSpeed would have written the first example
        if "books_text_document" in arguments:
            Path("books_text_document.idx").write_bytes(
                Path("notes_text_document.idx").read_bytes()
            )
            Path("books_text_document.bin").write_bytes(
                Path("notes_text_document.bin").read_bytes() + bytes(6)
            )
        ran.append(arguments[0])
        assert plain(run(arguments)).replace(f"{tmp_path}/", "/data/") == plain(shown), arguments
    assert ran == ["tokenize", "index", "inspect", "inspect", "verify", "verify", "verify"]


@pytest.mark.parametrize("block", blocks("yaml"))
def test_configurations_are_taken(block: str) -> None:
    values = yaml.safe_load(block)["data"]
    given = {"tokenizer": {"kind": "train-bpe"}, "seq_length": 8, **values}
    DataConfig.model_validate(
        given if "blend" in values else {"source": {"kind": "source_tree"}, **given}
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
