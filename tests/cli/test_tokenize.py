"""Output and refusals of `megacore tokenize`, and failures that leave nothing."""

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from megacore.cli import app
from megacore.cli._options import repeat_options
from megacore.errors import ConfigError, DataFormatError, MegacoreError
from megacore.token_files.indexed_dataset import IndexedDataset
from megacore.tokenizer import Tokenizer, load_tokenizer
from megacore.tokenizer.tokenize import write_tokens
from tests._limits import HANG
from tests.tokenizer._corpora import TEXTS, train_punkt, train_tokenizer, write_corpus

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cli")
    return train_tokenizer(root / "tokenizer", write_corpus(root / "corpus", TEXTS))


@pytest.fixture
def gpt2(tokenizer: Path) -> list[str]:
    return [
        "--vocab-file",
        str(tokenizer / "vocab.json"),
        "--merge-file",
        str(tokenizer / "merges.txt"),
    ]


def write_lines(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["tokenize", *map(str, arguments)])


def documents(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [
        dataset.token_range(a, b).tolist() for a, b in pairwise(dataset.document_indices.tolist())
    ]


def encoded(tokenizer: Tokenizer, texts: list[str], end: bool = False) -> list[list[int]]:
    return [
        [*tokenizer.encode(text).tolist(), *([tokenizer.eod_id] * end)] if text else []
        for text in texts
    ]


@pytest.mark.parametrize("append_eod", [False, True])
def test_token_files_and_their_manifest_are_written(
    tmp_path: Path, tokenizer: Path, gpt2: list[str], append_eod: bool
) -> None:
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    flags = ["--append-eod"] if append_eod else []
    result = run("--input", source, "--output-prefix", tmp_path / "new" / "out", *gpt2, *flags)
    assert result.exit_code == 0, result.output
    prefix = tmp_path / "new" / "out_text_document"
    assert documents(prefix) == encoded(load_tokenizer(tokenizer), TEXTS, append_eod)
    names = {
        f"out_text_document{suffix}"
        for suffix in (".bin", ".idx", ".documents.json", ".manifest.json")
    }
    assert {path.name for path in prefix.parent.iterdir()} == names
    manifest = json.loads(Path(f"{prefix}.manifest.json").read_text())
    assert manifest["stage"] == "tokenize"
    assert set(manifest["files"]) == names - {"out_text_document.manifest.json"}
    for name, entry in manifest["files"].items():
        content = (prefix.parent / name).read_bytes()
        assert (entry["size"], entry["sha256"]) == (
            len(content),
            hashlib.sha256(content).hexdigest(),
        )
        assert entry["mtime_ns"] == (prefix.parent / name).stat().st_mtime_ns
    files = json.loads(Path(f"{prefix}.documents.json").read_text())["files"]
    assert files == [
        {
            "path": str(source),
            "key": "text",
            "documents": len(TEXTS),
            "skipped_lines": [],
            "first_line": 1,
            "size": source.stat().st_size,
        }
    ]
    tokens = manifest["counts"]["tokens"]
    assert f"{prefix}: {len(TEXTS)} documents, {tokens:,} tokens, 0.0 MB in " in result.output


def test_several_inputs_keep_their_order(tmp_path: Path, tokenizer: Path, gpt2: list[str]) -> None:
    for name, text in (("b", "two"), ("a", "one"), ("c", "three")):
        write_lines(tmp_path / f"{name}.jsonl", [text], "content")
    with gzip.open(tmp_path / "z.jsonl.gz", "wt") as file:
        file.write('{"content": "four"}\n')
    inputs = [tmp_path / "b.jsonl", tmp_path / "[ac].jsonl", "--input", tmp_path / "z.jsonl.gz"]
    result = run(
        "--json-key", "content", "--input", *inputs, "--output-prefix", tmp_path / "out", *gpt2
    )
    assert result.exit_code == 0, result.output
    expected = encoded(load_tokenizer(tokenizer), ["two", "one", "three", "four"])
    assert documents(tmp_path / "out_content_document") == expected


def test_repeat_options_lets_one_flag_take_several_values() -> None:
    assert repeat_options(["--input", "a", "b", "--workers", "2", "--input", "c"], ["--input"]) == [
        *("--input", "a", "--input", "b", "--workers", "2", "--input", "c")
    ]
    assert repeat_options(["--input=a", "--input", "b", "c"], ["--input"]) == [
        *("--input=a", "--input", "b", "--input", "c")
    ]


def test_tokenizer_json_and_vocabulary_files_give_the_same_bytes(
    tmp_path: Path, tokenizer: Path, gpt2: list[str]
) -> None:
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    file = tokenizer / "tokenizer.json"
    for name, arguments in (
        ("hf", ["--tokenizer", "hf", "--tokenizer-file", file]),
        ("gpt2", gpt2),
    ):
        result = run(
            "--input", source, "--output-prefix", tmp_path / name, "--append-eod", *arguments
        )
        assert result.exit_code == 0, result.output
    for suffix in (".bin", ".idx"):
        one, other = (
            Path(f"{tmp_path / name}_text_document{suffix}").read_bytes() for name in ("hf", "gpt2")
        )
        assert one == other
    record = json.loads((tmp_path / "hf_text_document.documents.json").read_text())
    assert record["tokenizer"]["directory"] == str(file)


@pytest.mark.parametrize("splitter", ["rules", "punkt"])
def test_documents_are_split_into_sentences(tmp_path: Path, gpt2: list[str], splitter: str) -> None:
    source = write_lines(
        tmp_path / "a.jsonl", ["Mr. Smith left. He was late.", "", "One. Two! Three?"]
    )
    flags = ["--split-sentences", "--sentence-splitter", splitter, "--workers", 1]
    if splitter == "punkt":
        flags += ["--sentence-data", train_punkt(tmp_path / "punkt")]
    result = run("--input", source, "--output-prefix", tmp_path / "out", *gpt2, *flags)
    assert result.exit_code == 0, result.output
    dataset = IndexedDataset(tmp_path / "out_text_sentence")
    assert dataset.document_indices.tolist() == [0, 2, 2, 5]


def test_existing_files_are_replaced_only_with_overwrite(tmp_path: Path, gpt2: list[str]) -> None:
    source = write_lines(tmp_path / "a.jsonl", ["one"])
    arguments = ["--input", source, "--output-prefix", tmp_path / "out", *gpt2]
    assert run(*arguments).exit_code == 0
    before = (tmp_path / "out_text_document.idx").read_bytes()
    write_lines(source, ["one", "two"])
    result = run(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert "exist already: give another --output-prefix, or --overwrite" in str(result.exception)
    assert (tmp_path / "out_text_document.idx").read_bytes() == before
    assert run(*arguments, "--overwrite").exit_code == 0
    assert IndexedDataset(tmp_path / "out_text_document").documents == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vocab-file", "v"], "gpt2-bpe needs --merge-file"),
        ([], "gpt2-bpe needs --vocab-file and --merge-file"),
        (["--tokenizer", "hf"], "hf needs --tokenizer-file"),
        (
            ["--tokenizer", "sentencepiece", "--vocab-file", "v"],
            "sentencepiece needs --tokenizer-file",
        ),
        (["--tokenizer", "bert-wordpiece"], "bert-wordpiece needs --vocab-file"),
        (
            ["--tokenizer", "hf", "--tokenizer-file", "x", "--merge-file", "m"],
            "hf does not use --merge-file",
        ),
        (
            ["--vocab-file", "v", "--merge-file", "m", "--eod-token", "x"],
            "gpt2-bpe does not use --eod-token",
        ),
        (
            ["--vocab-file", "v", "--merge-file", "m", "--lower-case"],
            "gpt2-bpe does not use --lower-case",
        ),
        (
            ["--vocab-file", "v", "--merge-file", "m", "--keep-newlines"],
            "--keep-newlines without --split-sentences",
        ),
        (
            ["--vocab-file", "v", "--merge-file", "m", "--lang", "german"],
            "--language without --split-sentences",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = run("--input", tmp_path / "none", "--output-prefix", tmp_path / "out", *arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"a.jsonl cannot be read: No such file"),
        ("", "holds no document"),
        ('{"text": ""}\n', "the 1 documents of"),
        ('{"text": "x"}\n\n', "a.jsonl:2 is blank"),
        ('{"text": "x"}\n{"text": "y"', "a.jsonl:2 is not JSON"),
        ('{"text": "x"}\n{"t": "y"}\n', "a.jsonl:2 has no key 'text', only t"),
        ('{"text": "x"}\n{"text": "\\ud800"}\n', "a.jsonl:2 is not JSON"),
    ],
)
def test_bad_input_leaves_nothing(
    tmp_path: Path, gpt2: list[str], content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "a.jsonl").write_text(content)
    out = tmp_path / "out"
    out.mkdir()
    result = run("--input", tmp_path / "a.jsonl", "--output-prefix", out / "x", *gpt2)
    assert isinstance(result.exception, DataFormatError)
    assert message in str(result.exception)
    assert list(out.iterdir()) == []


def test_input_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, gpt2: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "a.jsonl", ["one"])

    def write_and_overwrite(*arguments: Any, **options: Any) -> Any:
        result = write_tokens(*arguments, **options)
        write_lines(source, ["two"])
        os.utime(source, (1, 1))
        return result

    monkeypatch.setattr("megacore.tokenizer.files.write_tokens", write_and_overwrite)
    result = run("--input", source, "--output-prefix", tmp_path / "out", *gpt2)
    assert isinstance(result.exception, DataFormatError)
    assert f"{source} changed while it was read: start again" in str(result.exception)
    assert not list(tmp_path.glob("out*"))


def test_skipped_lines_are_counted(tmp_path: Path, gpt2: list[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n\n{\n{"text": "y"}\n')
    result = run(
        "--input",
        tmp_path / "a.jsonl",
        "--output-prefix",
        tmp_path / "x",
        "--on-bad-line",
        "skip",
        *gpt2,
    )
    assert result.exit_code == 0, result.output
    assert ": 2 documents, 2 tokens, 2 lines skipped, " in result.output


def test_a_failed_overwrite_leaves_existing_files_unchanged(
    tmp_path: Path, gpt2: list[str]
) -> None:
    source = write_lines(tmp_path / "a.jsonl", ["one"])
    arguments = ["--input", source, "--output-prefix", tmp_path / "out", *gpt2]
    assert run(*arguments).exit_code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.glob("out*")}
    source.write_text("{")
    assert isinstance(run(*arguments, "--overwrite").exception, MegacoreError)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out*")} == before


def test_a_killed_command_leaves_only_temporary_files(
    tmp_path: Path, tokenizer: Path, gpt2: list[str]
) -> None:
    source = write_lines(tmp_path / "a.jsonl", ["some words here"] * 1000)
    program = (
        "import os, signal; from megacore.cli import main\n"
        "from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter as Writer\n"
        "add = Writer.add_batch\n"
        "def add_and_die(*batch):\n    add(*batch); os.kill(os.getpid(), signal.SIGKILL)\n"
        "Writer.add_batch = add_and_die; main()"
    )
    arguments = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), *gpt2]
    command = [sys.executable, "-c", program, "tokenize", *arguments]
    killed = subprocess.run(command, cwd=ROOT, check=False, timeout=HANG)
    assert killed.returncode == -signal.SIGKILL
    assert list(tmp_path.glob("out_text_document.tmp-*/tokens.bin.tmp-*"))
    assert not [path for path in tmp_path.glob("out*") if ".tmp-" not in path.name]


def test_heavy_packages_are_not_imported_and_errors_set_the_exit_code(
    tmp_path: Path, gpt2: list[str]
) -> None:
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    script = (
        "import os, sys; os._exit = sys.exit; from megacore.cli import main\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'transformers', 'datasets', 'nltk', 'pyarrow.parquet'} & "
        "set(sys.modules)))"
    )
    command = [sys.executable, "-c", script, "tokenize", "--input", str(source), *gpt2]
    good = subprocess.run(
        [*command, "--output-prefix", str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.endswith("[]\n")
    source.write_text("[]\n")
    bad = subprocess.run(
        [*command, "--output-prefix", str(tmp_path / "bad")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert bad.returncode == DataFormatError.exit_code
    assert bad.stderr == f"error: {source}:1 holds a JSON list, not an object with the key 'text'\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json-key", "a/b"], "--json-key is 'a/b'"),
        (["--output-prefix", ""], "--output-prefix is empty"),
        (["--output-prefix", "/"], "--output-prefix is '/'"),
        (
            ["--split-sentences", "--sentence-splitter", "rules", "--language", "german"],
            "--language with",
        ),
    ],
)
def test_impossible_values_are_refused(
    tmp_path: Path, gpt2: list[str], arguments: list[str], message: str
) -> None:
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    command = [
        "tokenize",
        "--input",
        str(source),
        *gpt2,
        "--output-prefix",
        str(tmp_path / "out"),
        *arguments,
    ]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert list(tmp_path.glob("out*")) == []


def test_an_obstructing_path_is_refused_by_name(tmp_path: Path, gpt2: list[str]) -> None:
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "out_text_document.bin").mkdir()
    command = ["tokenize", "--input", str(source), *gpt2, "--overwrite", "--output-prefix"]
    result = CliRunner().invoke(app, [*command, str(tmp_path / "out")])
    assert "out_text_document.bin is a directory: give another --output-prefix" in str(
        result.exception
    )
    result = CliRunner().invoke(app, [*command, str(source / "out")])
    assert f"{source} is a file: give another --output-prefix" in str(result.exception)


def test_the_remains_of_a_killed_command_are_removed(tmp_path: Path, gpt2: list[str]) -> None:
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    dead = tmp_path / "out_text_document.tmp-999999999"
    dead.mkdir()
    command = ["tokenize", "--input", str(source), *gpt2, "--output-prefix", str(tmp_path / "out")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert not dead.exists()
