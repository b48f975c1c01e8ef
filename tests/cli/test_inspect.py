"""Output and refusals of `megacore inspect` and `megacore verify`."""

import errno
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from megacore.artifact.manifest import Manifest, list_files
from megacore.cli import app
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import IndexOptions, Member, Mixture
from megacore.errors import ArtifactError, ConfigError, DataFormatError
from megacore.inspect.report import describe_samples
from megacore.token_files.indexed_dataset import write_members
from tests.data._corpus import Corpus, write_corpus
from tests.data._files import write_tokens

TEXTS = ["", *(f"This is document {number}: {'word ' * number}ends." for number in range(1, 40))]
SEQ_LENGTH = 64


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def output(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def values(*arguments: object) -> Any:
    return json.loads(output(*arguments, "--json"))


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return write_corpus(tmp_path / "corpus", TEXTS, seed=11)


@pytest.fixture
def index(corpus: Corpus, tmp_path: Path) -> Path:
    directory = tmp_path / "index"
    directory.mkdir()
    options = IndexOptions(split="8,2", seq_length=SEQ_LENGTH, seed=5)
    build_index_maps(Mixture.single(corpus.prefix), directory, options, (None, None, 0))
    return directory


def test_counts_and_lengths_are_shown(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a_text_document", [5, 0, 3, 9, 9, 20])
    shown = output("inspect", prefix, "--documents", 0)
    assert shown.splitlines()[1:] == [
        "documents  6, 1 of them empty; 5 sequences",
        "tokens     46 of uint16",
        "files      .bin 92 bytes, .idx 150 bytes",
        "token ids  0 to 45",
        "lengths    min 3, median 9, mean 9.2, 95 % 20, max 20 tokens",
        "",
        "    2-3  1 ████████████████████",
        "    4-7  1 ████████████████████",
        "   8-15  2 ████████████████████████████████████████",
        "  16-31  1 ████████████████████",
    ]
    assert output("inspect", f"{prefix}.idx", "--documents", 0) == shown


def test_ids_are_shown_without_a_tokenizer(tmp_path: Path) -> None:
    shown = output("inspect", write_tokens(tmp_path / "a", [3, 40]))
    assert "document 0: 3 tokens\n  | 0 1 2\n" in shown
    assert "document 1: 40 tokens\n  | 3 4 5 " in shown
    assert "26 …" in shown
    assert "give --tokenizer" in shown
    assert values("inspect", tmp_path / "a")["files"][0]["first_documents"][1]["ids"] == list(
        range(3, 43)
    )


def test_documents_are_shown_with_text_and_source(corpus: Corpus) -> None:
    report = values("inspect", corpus.prefix, "--documents", 40)["files"][0]
    assert (report["documents"], report["empty_documents"]) == (40, 1)
    for entry in report["first_documents"]:
        text = TEXTS[corpus.order[entry["document"]]]
        assert entry["text"] == (f"{text}<|endoftext|>" if text else "")
        half = len(TEXTS) // 2
        read = corpus.order[entry["document"]]
        name, line = ("a.jsonl", read + 1) if read < half else ("b.jsonl.gz", read - half + 1)
        assert (Path(entry["source"]["path"]).name, entry["source"]["line"]) == (name, line)
    shown = output("inspect", corpus.prefix, "--documents", 1)
    assert f"  | {TEXTS[corpus.order[0]]}"[:100] in shown
    with_tokenizer = output(
        "inspect",
        corpus.prefix,
        "--documents",
        1,
        "--tokenizer",
        corpus.tokenizer / "tokenizer.json",
    )
    assert with_tokenizer == shown


def test_long_documents_are_cut_without_full(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, ["x" * 1000])
    assert "x" * 120 + " …" in output("inspect", corpus.prefix)
    assert "x" * 121 not in output("inspect", corpus.prefix)
    assert "x" * 1000 + "<|endoftext|>" in output("inspect", corpus.prefix, "--full")


def test_every_member_of_a_directory_is_shown(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_tokens(tmp_path / name / "tokens_text_document", [5, 3])
    write_members(tmp_path, [tmp_path / "one", tmp_path / "two"])
    prefixes = [report["prefix"] for report in values("inspect", tmp_path)["files"]]
    assert prefixes == [str(tmp_path / name / "tokens_text_document") for name in ("one", "two")]
    assert output("inspect", tmp_path).count("documents  2, 0 of them empty; 2 sequences\n") == 2
    result = run("inspect", tmp_path, "--histogram", tmp_path / "a.png")
    assert isinstance(result.exception, ConfigError)
    assert "names 2: give one" in str(result.exception)


def test_control_characters_of_text_are_replaced(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, ["[bold]a\x1b[2Jb\nc"])
    assert "  | [bold]a\ufffd[2Jb\n  | c<|endoftext|>\n" in output("inspect", corpus.prefix)


def test_windows_line_ends_of_text_are_shown_as_line_ends(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, ["a\r\nb\rc"])
    assert "  | a\n  | b\ufffdc<|endoftext|>\n" in output("inspect", corpus.prefix)


def test_the_histogram_is_written(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [5, 0, 3])
    shown = output("inspect", prefix, "--histogram", tmp_path / "a.svg")
    assert f"wrote {tmp_path / 'a.svg'}" in shown
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")
    for refused in (tmp_path / "a.gif", "/proc/a.svg"):
        result = run("inspect", prefix, "--histogram", refused)
        assert isinstance(result.exception, ConfigError)
        assert not result.output


def test_a_sample_is_traced_to_its_source_lines(corpus: Corpus, index: Path) -> None:
    report = values("inspect", index, "--sample", 3)
    assert sum(len(part["ids"]) for part in report["parts"]) == report["tokens"] == SEQ_LENGTH + 1
    assert report["padding"] == 0
    for part in report["parts"]:
        text = TEXTS[corpus.order[part["document"]]]
        source = part["source"]
        assert source["text"] == text
        first, last = source["characters"]
        assert source["text"][first:last] == part["text"].removesuffix("<|endoftext|>")
        assert first == part["start"]
        line = source["line"] - 1 + (0 if source["path"].endswith("a.jsonl") else len(TEXTS) // 2)
        assert TEXTS[line] == text


def test_a_sample_is_printed_with_its_source(corpus: Corpus, index: Path) -> None:
    report = values("inspect", index, "--sample", 3)
    shown = output("inspect", index, "--sample", 3)
    part = report["parts"][0]
    assert f"train sample 3 of {index}" in shown
    assert f"65 tokens from {len(report['parts'])} sequence" in shown
    assert f"tokens {part['start']:,} to {part['stop'] - 1:,} of {part['length']:,}" in shown
    assert f"  from {part['source']['path']}:{part['source']['line']} (text)" in shown
    assert f"these tokens are the characters {part['source']['characters'][0]} to" in shown
    assert f"  | {part['source']['text']}"[:200] in shown
    valid = output("inspect", index, "--sample", 0, "--split", "valid")
    assert "valid sample 0 of" in valid


def test_a_sample_of_many_documents_is_cut_without_full(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path, [f"{number}" for number in range(60)])
    options = IndexOptions(split="1", seq_length=SEQ_LENGTH, seed=5)
    build_index_maps(Mixture.single(corpus.prefix), tmp_path, options, (None, 0, 0))
    shown = output("inspect", tmp_path, "--sample", 0)
    assert "… " in shown
    assert "--full shows all" in shown
    assert "\n9. document" not in shown
    assert "\n9. document" in output("inspect", tmp_path, "--sample", 0, "--full")


def test_a_lost_source_is_reported_and_the_rest_shown(corpus: Corpus, index: Path) -> None:
    for path in Path(corpus.prefix).parent.glob("*.jsonl*"):
        path.unlink()
    shown = output("inspect", index, "--sample", 3)
    assert "which cannot be shown: " in shown
    assert "word word" in shown


def test_a_sample_of_unknown_origin_is_shown_without_source(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [90, 50, 40])
    options = IndexOptions(split="1", seq_length=SEQ_LENGTH, seed=5)
    build_index_maps(Mixture.single(prefix), tmp_path, options, (None, 0, 0))
    shown = output("inspect", tmp_path, "--sample", 0)
    assert "there is no documents.json next to the token files" in shown
    assert "give --tokenizer" in shown


def test_an_index_directory_is_described(corpus: Corpus, tmp_path: Path) -> None:
    other = write_tokens(tmp_path / "other", [500, 700])
    (tmp_path / "blend").mkdir()
    mixture = Mixture.blend([Member(corpus.prefix, 3.0), Member(other, 1.0)])
    options = IndexOptions(split="1", seq_length=SEQ_LENGTH, seed=5)
    build_index_maps(mixture, tmp_path / "blend", options, (20, 0, 0))
    shown = output("inspect", tmp_path / "blend")
    assert (
        "split 1, seq_length 64, seed 5, style megatron, packing packed, add_extra_token true"
        in shown
    )
    assert f"data set 1: {other}: train (weight 1)" in shown
    assert "train: 20 samples" in shown
    assert values("inspect", tmp_path / "blend")["samples"]["train"] == 20
    members = {
        values("inspect", tmp_path / "blend", "--sample", number)["member"] for number in range(20)
    }
    assert members == {0, 1}


@pytest.mark.parametrize(
    ("path", "error", "sentence"),
    [
        ("mixture", ConfigError, "mixture is given without a blend: name a configuration or a dir"),
        (".", DataFormatError, ". holds no token files of the tokenize stage: give the path of "),
    ],
)
def test_a_path_without_anything_to_show_is_refused_with_advice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    error: type[Exception],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("inspect", path)
    assert isinstance(result.exception, error)
    assert str(result.exception).startswith(sentence)


def test_mismatched_paths_and_options_are_refused(
    corpus: Corpus, index: Path, tmp_path: Path
) -> None:
    cases: list[tuple[type[Exception], tuple[object, ...]]] = [
        (ConfigError, ("inspect", "mixture", "mixture-tiny", "--histogram", tmp_path / "a.png")),
        (ConfigError, ("inspect", "mixture", "mixture-tiny", "--full")),
        (ConfigError, ("inspect", corpus.prefix, "--sample", 1)),
        (ConfigError, ("inspect", index, "--histogram", tmp_path / "a.png")),
        (DataFormatError, ("inspect", index, "--sample", 10**6)),
        (DataFormatError, ("inspect", index, "--sample", 0, "--split", "test")),
        (DataFormatError, ("inspect", index, "--sample", 0, "--split", "all")),
        (DataFormatError, ("inspect", tmp_path / "none")),
        (DataFormatError, ("inspect", tmp_path)),
        (DataFormatError, ("inspect", corpus.prefix, "--tokenizer", tmp_path / "none")),
        (DataFormatError, ("verify", tmp_path / "none")),
    ]
    for kind, arguments in cases:
        result = run(*arguments)
        assert isinstance(result.exception, kind), (arguments, result.exception)
        assert not result.output


def test_verify_prints_each_check(corpus: Corpus, index: Path) -> None:
    shown = output("verify", corpus.prefix)
    assert [line.split(":")[0] for line in shown.splitlines()] == [
        "ok  corpus_text_document.idx",
        "ok  pointers",
        "ok  corpus_text_document.bin",
        "ok  document index",
        "ok  corpus_text_document.documents.json",
        "ok  manifest",
    ]
    assert "ok  train maps 0: " in output("verify", index)


def test_an_artifact_is_found_by_the_beginning_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    named = tmp_path / "tokenized" / "0123456789abcdef"
    named.mkdir(parents=True)
    write_tokens(named / "tokens_text_document", [5, 3])
    for command in ("inspect", "verify"):
        assert output(command, "0123") == output(command, named)


def test_verify_ends_with_the_error_of_the_first_check_that_fails(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "a", [5, 3])
    Manifest("tokenize", 1, "", {}, {}, list_files(tmp_path), {}, 0.0).write(tmp_path)
    (tmp_path / "manifest.json").rename(f"{prefix}.manifest.json")
    content = bytearray(Path(f"{prefix}.bin").read_bytes())
    content[3] ^= 1
    Path(f"{prefix}.bin").write_bytes(content)
    result = run("verify", prefix)
    assert isinstance(result.exception, ArtifactError)
    assert result.exception.exit_code == 4
    assert "ok  pointers" in result.output
    Path(f"{prefix}.bin").write_bytes(bytes(content) + b"\0\0")
    result = run("verify", prefix)
    assert isinstance(result.exception, DataFormatError)
    assert result.exception.exit_code == 3


def test_verify_of_a_workspace_lists_all_damage_and_fails(tmp_path: Path) -> None:
    for name in ("0123", "4567"):
        directory = tmp_path / "tokenized" / name
        directory.mkdir(parents=True)
        (directory / "a.txt").write_text("alpha")
        Manifest("tokenize", 1, "", {}, {}, list_files(directory), {}, 0.0).write(directory)
    assert "ok  tokenized/0123: 1 file, 5 bytes" in output("verify", tmp_path)
    (directory / "a.txt").write_text("alphA")
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    assert [line.split(": ")[0].strip() for line in result.output.splitlines()] == [
        "ok  tokenized/0123",
        "damaged  tokenized/4567",
        "delete it",
        "then the same `make pretrain` command builds it again (stage tokenize)",
        "damaged",
    ]
    assert f"delete it: rm -r -- {directory}\n" in result.output


def test_verify_fails_without_advice_to_delete_what_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "tokenized" / "0123"
    directory.mkdir(parents=True)
    (directory / "a.txt").write_text("alpha")
    Manifest("tokenize", 1, "", {}, {}, list_files(directory), {}, 0.0).write(directory)

    def fail(path: Path, on_read: object) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr("megacore.artifact.manifest.file_digest", fail)
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    assert "not readable  tokenized/0123: " in result.output
    assert "raise the limit" in result.output
    assert "rm " not in result.output


def test_the_command_of_a_bad_loss_shows_the_documents_that_it_names(index: Path) -> None:
    clause = describe_samples(index, [3, 4])
    documents, command = re.fullmatch(
        r"they are from (document .*); `megacore (.*)` shows sample 3, and so on to --sample 4",
        clause,
    ).groups()  # type: ignore[union-attr]
    shown = output(*shlex.split(command)) + output("inspect", index, "--sample", 4)
    places = re.findall(r"document (\d+) \((\S+)\)", documents)
    assert len(places) > 1
    for document, place in places:
        assert f"document {document}, sequence" in shown
        assert f"from {place} (text)" in shown
    (index / "index.json").write_text("{")
    assert re.match(r"their documents are unknown \(.*\); `megacore", describe_samples(index, [3]))
