"""Commands of preprocess_data.py of Megatron-LM, Megatron-DeepSpeed and GPT-NeoX with our name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from click.testing import Result
from tokenizers import processors

from megacore.cli._preprocess_data import SPELLINGS, TOKENIZER_TYPES, translated
from megacore.errors import ConfigError
from megacore.inspect.provenance import find_origins
from megacore.tokenizer import load_tokenizer
from tests.cli.test_tokenize import documents, encoded, run, write_lines
from tests.tokenizer._corpora import TEXTS, train_tokenizer, write_corpus


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("preprocess")
    return train_tokenizer(root / "tokenizer", write_corpus(root / "corpus", TEXTS))


def files(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def succeeded(result: Result) -> Result:
    assert result.exit_code == 0, result.output
    return result


def test_the_tutorials_command_writes_the_same_files(tmp_path: Path, tokenizer: Path) -> None:
    source = write_lines(tmp_path / "corpus.json", TEXTS)
    vocab, merges = tokenizer / "vocab.json", tokenizer / "merges.txt"
    arguments = (
        *("--input", source, "--output-prefix", tmp_path / "my-gpt2", "--vocab", vocab),
        *("--dataset-impl=mmap", "--tokenizer-type", "GPT2BPETokenizer", "--merge-file", merges),
        *("--append-eod", "--workers", 2, "--chunk-size", 25, "--log-interval", 100),
    )
    result = succeeded(run(*arguments))
    assert [line for line in result.stderr.splitlines() if line.startswith("note: ")] == [
        "note: --dataset-impl mmap has no effect: it is the only format",
        "note: --chunk-size 25 has no effect: threads take blocks of 2 MiB",
        "note: --log-interval 100 has no effect: a bar in the terminal shows the progress",
    ]
    own = ("--input", source, "--output-prefix", tmp_path / "own", "--append-eod")
    succeeded(run(*own, "--vocab-file", vocab, "--merge-file", merges))
    assert files(tmp_path / "my-gpt2_text_document") == files(tmp_path / "own_text_document")


def test_berts_types_choose_the_case(tmp_path: Path) -> None:
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nA\na\n")
    source = write_lines(tmp_path / "a.json", ["A a"])
    for name, ids in (("BertWordPieceLowerCase", [6, 6]), ("bertwordpiececase", [5, 6])):
        prefix = ("--output-prefix", tmp_path / name)
        succeeded(run("--input", source, *prefix, "--tokenizer-type", name, "--vocab-file", vocab))
        assert documents(tmp_path / f"{name}_text_document") == [ids]


def test_each_json_key_has_its_files(tmp_path: Path, tokenizer: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"title": t[:5], "text": t}) + "\n" for t in TEXTS))
    prefix = ("--input", source, "--output-prefix", tmp_path / "out")
    gpt2 = ("--vocab-file", tokenizer / "vocab.json", "--merge-file", tokenizer / "merges.txt")
    succeeded(run(*prefix, "--json-keys", "text", "title", "text", *gpt2))
    coder = load_tokenizer(tokenizer)
    assert documents(tmp_path / "out_text_document") == encoded(coder, TEXTS)
    titles = [text[:5] for text in TEXTS]
    assert documents(tmp_path / "out_title_document") == encoded(coder, titles)
    assert len(list(tmp_path.glob("out_*"))) == 8
    refused = run(*prefix, "--json-keys", "other", "title", *gpt2)
    assert isinstance(refused.exception, ConfigError)
    assert not list(tmp_path.glob("out_other*"))


def test_partitions_order_the_documents_as_megatrons_do(tmp_path: Path, tokenizer: Path) -> None:
    texts = [f"text {number}" for number in range(8)]
    sources = [
        write_lines(tmp_path / "a.jsonl", texts[:5]),
        write_lines(tmp_path / "b.jsonl", texts[5:]),
    ]
    gpt2 = ("--vocab-file", tokenizer / "vocab.json", "--merge-file", tokenizer / "merges.txt")
    given = ("--input", tmp_path / "[ab].jsonl", *gpt2, "--append-eod", "--partitions", 3)
    succeeded(run(*given, "--output-prefix", tmp_path / "out"))
    prefix = tmp_path / "out_text_document"
    order = [0, 3, 6, 1, 4, 7, 2, 5]
    coder = load_tokenizer(tokenizer)
    assert documents(prefix) == encoded(coder, [texts[number] for number in order], end=True)
    origins = find_origins(prefix, 8)
    assert origins is not None
    places = [origins.place(document) for document in range(8)]
    assert [(place.path, place.line) for place in places if place] == [
        (str(sources[number >= 5]), number % 5 + 1) for number in order
    ]
    manifest = json.loads(Path(f"{prefix}.manifest.json").read_text())
    assert manifest["files"]["out_text_document.bin"]["size"] == len(files(prefix)[0])

    succeeded(run(*given, "--output-prefix", tmp_path / "kept", "--keep-sequential-samples"))
    assert documents(tmp_path / "kept_text_document") == encoded(coder, texts, end=True)


def test_partitions_leave_no_map_of_a_removed_file(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped: list[str] = []
    rmtree = shutil.rmtree

    def remove(path: Path, **options: Any) -> None:
        maps = Path("/proc/self/maps").read_text().splitlines()
        mapped.extend(line for line in maps if f"{path}/" in line)
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", remove)
    gpt2 = ("--vocab-file", tokenizer / "vocab.json", "--merge-file", tokenizer / "merges.txt")
    source = ("--input", write_lines(tmp_path / "a.jsonl", TEXTS), "--partitions", 3)
    succeeded(run(*source, *gpt2, "--output-prefix", tmp_path / "out"))
    assert mapped == []


def write_hf(directory: Path, tokenizer: Path, *, start: bool = False) -> Path:
    """Write a tokenizer whose end of text is `<end>`, and which may begin each text with it."""
    directory.mkdir()
    backend = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    backend.add_special_tokens(["<end>"])
    if start:
        pairs = [("<end>", backend.token_to_id("<end>"))]
        backend.post_processor = processors.TemplateProcessing(
            single="<end> $A", special_tokens=pairs
        )
    backend.save(str(directory / "tokenizer.json"))
    config = {"eos_token": {"content": "<end>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_a_tokenizer_of_hugging_face_ends_documents_with_its_eos_token(
    tmp_path: Path, tokenizer: Path
) -> None:
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    directory = write_hf(tmp_path / "hf", tokenizer)
    given = ("--input", source, "--append-eod")
    for name in ("HuggingFaceTokenizer", "HFTokenizer", "PretrainedFromHF"):
        kind = ("--tokenizer-type", name, "--tokenizer-model", directory)
        succeeded(run(*given, "--output-prefix", tmp_path / name, *kind))
    coder = load_tokenizer(tokenizer)
    expected = [
        [*document, coder.vocab_size] if document else [] for document in encoded(coder, TEXTS)
    ]
    assert documents(tmp_path / "HFTokenizer_text_document") == expected
    # GPT-NeoX names the file as the vocabulary, and always takes <|endoftext|>.
    kind = ("--tokenizer-type", "HFTokenizer", "--vocab-file", directory / "tokenizer.json")
    succeeded(run(*given, "--output-prefix", tmp_path / "neox", *kind))
    assert documents(tmp_path / "neox_text_document") == encoded(coder, TEXTS, end=True)
    (directory / "tokenizer_config.json").unlink()
    kind = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", directory)
    result = run(*given, "--output-prefix", tmp_path / "new", *kind)
    assert "does not name the eos_token" in str(result.exception)
    succeeded(run(*given, "--output-prefix", tmp_path / "new", *kind, "--eod-token", "<end>"))
    assert files(tmp_path / "new_text_document") == files(tmp_path / "HFTokenizer_text_document")


def test_special_tokens_of_a_tokenizer_are_refused_or_left_out(
    tmp_path: Path, tokenizer: Path
) -> None:
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    directory = write_hf(tmp_path / "hf", tokenizer, start=True)
    given = ("--input", source, "--output-prefix", tmp_path / "out", "--tokenizer-type")
    kind = ("HuggingFaceTokenizer", "--tokenizer-model", directory)
    result = run(*given, *kind)
    assert "adds <end> to each text, which megacore does not write" in str(result.exception)
    assert not list(tmp_path.glob("out*"))
    succeeded(run(*given, *kind, "--tokenizer-hf-no-include-special-tokens"))
    assert documents(tmp_path / "out_text_document") == encoded(load_tokenizer(tokenizer), TEXTS)


def test_inputs_of_gpt_neox_are_joined_by_commas(tmp_path: Path, tokenizer: Path) -> None:
    sources = [write_lines(tmp_path / f"{name}.jsonl", [name]) for name in ("b", "a")]
    joined = ",".join(map(str, sources))
    gpt2 = ("--vocab-file", tokenizer / "vocab.json", "--merge-file", tokenizer / "merges.txt")
    given = ("--input", joined, "--output-prefix", tmp_path / "out", "--jsonl-keys", "text")
    succeeded(run(*given, *gpt2, "--num-docs", 2))
    expected = encoded(load_tokenizer(tokenizer), ["b", "a"])
    assert documents(tmp_path / "out_text_document") == expected


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_option_is_honoured_without_effect_or_refused(name: str) -> None:
    spelling = SPELLINGS[name]
    value = {"none": [], "one": [spelling.only or "1"], "several": ["1", "2"]}[spelling.values]
    value = ["GPT2BPETokenizer"] if name == "--tokenizer-type" else value
    if spelling.refused and not spelling.only:
        with pytest.raises(ConfigError, match=f"^{name}.* is not supported: {spelling.refused}"):
            translated([name, *value])
        return
    arguments, notes = translated([name, *value])
    assert bool(arguments) != bool(notes)
    given = " ".join([name, *value])
    assert all(note == f"{given} has no effect: {spelling.unused}" for note in notes)
    assert arguments[: 1 if arguments else 0] == ([spelling.ours] if spelling.ours else [])


@pytest.mark.parametrize("name", TOKENIZER_TYPES)
def test_every_type_of_tokenizer_is_honoured_or_refused(name: str) -> None:
    treatment = TOKENIZER_TYPES[name]
    if isinstance(treatment, str):
        with pytest.raises(ConfigError, match=f"--tokenizer-type {name} is not supported: "):
            translated(["--tokenizer-type", name])
    else:
        assert translated(["--tokenizer-type", name])[0][: len(treatment)] == list(treatment)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tokenizer hf --tokenizer-type HFTokenizer", "--tokenizer and --tokenizer-type are one"),
        ("--json-keys a --json-key b", "--json-keys and --json-key are one option"),
        ("--vocab a --vocab-file b", "--vocab and --vocab-file are one option"),
        ("--tokenizer-type BertWordPieceCase --lower-case", "--tokenizer-type and --lower-case"),
        ("--dataset-impl lazy", "--dataset-impl lazy is not supported: give mmap"),
        ("--tokenizer-type Gpt3", "--tokenizer-type Gpt3 is not known: give GPT2BPETokenizer"),
        ("--json-keys", "--json-keys takes at least one value, and nothing is given"),
        ("--log-interval 1 2", "--log-interval takes one value, and 1 2 is given"),
        ("--ftfy yes", "--ftfy takes no value, and yes is given"),
    ],
)
def test_contradictions_are_refused(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translated(arguments.split())


def test_other_arguments_are_passed_on() -> None:
    own = ["--input", "a", "b", "--workers=2", "--append-eod", "--json-key", "x", "-h"]
    assert translated(own) == (["--input", "a", "b", "--workers", "2", *own[4:]], [])
    assert translated([]) == ([], [])
    assert translated(["-h"]) == (["-h"], [])
    assert translated(["word", "--input", "a"]) == (["word", "--input", "a"], [])
