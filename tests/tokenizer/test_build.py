"""Tests of building tokenizers of every kind."""

import builtins
import errno
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megacore.config.data import (
    Gpt2BpeTokenizer,
    HfTokenizer,
    TrainBpeTokenizer,
)
from megacore.config.spec import SpecialTokens
from megacore.corpus.documents import CorpusWriter
from megacore.errors import DataFormatError, DownloadError, FileAccessError
from megacore.tokenizer import build, load_tokenizer, wordpiece
from megacore.tokenizer.build import build_tokenizer, fingerprint
from megacore.tokenizer.load import read_backend
from megacore.tokenizer.sentencepiece_model import SentencePieceModel
from tests.corpus._files import collect_changing_file

TEXT = "def größe(n):\n    return n<|endoftext|>x 💡\n"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    directory = tmp_path / "corpus"
    directory.mkdir()
    with CorpusWriter(directory) as writer:
        for number in range(50):
            writer.add(f"def function_{number}(value):\n    return value + {number}\n", "test")
    (tmp_path / "out").mkdir()
    return directory


def train(vocab_size: int) -> TrainBpeTokenizer:
    return TrainBpeTokenizer(kind="train-bpe", vocab_size=vocab_size)


def gpt2(folder: Path) -> Gpt2BpeTokenizer:
    return Gpt2BpeTokenizer(
        kind="gpt2-bpe",
        vocab_file=str(folder / "vocab.json"),
        merge_file=str(folder / "merges.txt"),
    )


def hf(name: Path | str, **values: str) -> HfTokenizer:
    return HfTokenizer.model_validate({"kind": "hf", "name": str(name), **values})


def test_trained_bpe_has_the_configured_size_and_decodes_losslessly(
    corpus: Path, tmp_path: Path
) -> None:
    counts = build_tokenizer(train(300), corpus, tmp_path / "out")
    special = SpecialTokens(eod=0).model_dump(mode="json")
    assert counts == {
        "vocab_size": 300,
        "eod_id": 0,
        "eod_token": "<|endoftext|>",
        "special_tokens": special,
    }
    tokenizer = load_tokenizer(tmp_path / "out")
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert ids.tolist().count(0) == 1
    assert ids.max() < tokenizer.vocab_size == 300
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "merges.txt",
    }


def test_a_file_that_changes_while_a_tokenizer_is_trained_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overwrite = collect_changing_file(tmp_path)
    (tmp_path / "out").mkdir()
    original = build.train_tokenizer

    def train_and_overwrite(*arguments: Any) -> Any:
        tokenizer = original(*arguments)
        overwrite()
        return tokenizer

    monkeypatch.setattr(build, "train_tokenizer", train_and_overwrite)
    with pytest.raises(DataFormatError, match=r"a\.jsonl has changed since it was collected"):
        build_tokenizer(train(258), tmp_path / "corpus", tmp_path / "out")


def test_special_tokens_have_the_ids_between_end_of_text_and_bytes(
    corpus: Path, tmp_path: Path
) -> None:
    special = ("<fim_prefix>", "<fim_middle>")
    choice = TrainBpeTokenizer(kind="train-bpe", vocab_size=300, special_tokens=special)
    assert build_tokenizer(choice, [corpus], tmp_path / "out")["vocab_size"] == 300
    tokenizer = load_tokenizer(tmp_path / "out")
    assert [tokenizer.token_id(token) for token in ("<|endoftext|>", *special)] == [0, 1, 2]
    assert tokenizer.encode("def<fim_prefix>x<fim_middle>").tolist().count(1) == 1
    assert sorted(tokenizer.encode("!~").tolist())[0] == 3
    assert fingerprint(choice) != fingerprint(train(300))
    assert fingerprint(train(300)) == {"kind": "train-bpe", "vocab_size": 300}


@pytest.mark.parametrize(
    ("special", "vocab_size", "message"),
    [
        (("<a>", "<a>"), 300, "name a token twice"),
        (("<|endoftext|>",), 300, "name a token twice"),
        (("a",), 300, "or a single byte"),
        (("",), 300, "name a token twice"),
        (
            ("<a>", "<b>"),
            258,
            "no room for 3 special tokens and 256 bytes: raise it to at least 259",
        ),
    ],
)
def test_invalid_special_tokens_are_refused(
    corpus: Path, tmp_path: Path, special: tuple[str, ...], vocab_size: int, message: str
) -> None:
    choice = TrainBpeTokenizer(kind="train-bpe", vocab_size=vocab_size, special_tokens=special)
    with pytest.raises(DataFormatError, match=message):
        build_tokenizer(choice, [corpus], tmp_path / "out")


def test_training_uses_all_corpora(corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with CorpusWriter(other) as writer:
        writer.add("zyx " * 100, "test")
    build_tokenizer(train(300), [corpus, other], tmp_path / "out")
    assert len(load_tokenizer(tmp_path / "out").encode(" zyx")) == 1


def test_training_is_deterministic(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    for name in ("out", "again"):
        build_tokenizer(train(320), corpus, tmp_path / name)
    first, second = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("out", "again"))
    assert first == second


def test_a_corpus_too_small_for_the_vocabulary_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataFormatError, match=r"yields a vocabulary of \d+ entries, not the 8192 .* lower it to"
    ):
        build_tokenizer(train(8192), corpus, tmp_path / "out")


@pytest.mark.parametrize("kind", ["trained", "gpt2", "hf"])
def test_transformers_encodes_and_decodes_equally(corpus: Path, tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    build_tokenizer(train(300), corpus, tmp_path / "out")
    directory = tmp_path / "out"
    if kind != "trained":
        directory = tmp_path / "second"
        directory.mkdir()
        choice = gpt2(tmp_path / "out") if kind == "gpt2" else hf(tmp_path / "out")
        assert build_tokenizer(choice, corpus, directory)["vocab_size"] == 300
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert hf_tokenizer(TEXT)["input_ids"] == load_tokenizer(directory).encode(TEXT).tolist()
    assert (hf_tokenizer.eos_token, hf_tokenizer.eos_token_id, len(hf_tokenizer)) == (
        "<|endoftext|>",
        0,
        300,
    )
    assert hf_tokenizer.decode(hf_tokenizer(TEXT)["input_ids"]) == TEXT


def test_gpt2_files_give_the_gpt2_tokenizer(shared_data: Path, tmp_path: Path) -> None:
    data = shared_data / "data"
    choice = Gpt2BpeTokenizer(
        kind="gpt2-bpe",
        vocab_file=str(data / "gpt2-vocab.json"),
        merge_file=str(data / "gpt2-merges.txt"),
    )
    counts = build_tokenizer(choice, tmp_path, tmp_path)
    assert (counts["vocab_size"], counts["eod_id"], counts["eod_token"]) == (
        50257,
        50256,
        "<|endoftext|>",
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("Hello world<|endoftext|>").tolist() == [15496, 995, 50256]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("vocab.json", None, "vocab.json cannot be read: No such file"),
        ("vocab.json", "#version", "is not a vocab.json"),
        ("vocab.json", '{"a": 5}', "does not map its tokens to the ids 0, 1, 2"),
        ("vocab.json", '{"a": [0]}', "does not map its tokens to the ids 0, 1, 2"),
        ("vocab.json", '{"a": 0}', "has no <|endoftext|> among its 1 entries"),
        ("merges.txt", None, "merges.txt cannot be read"),
        ("merges.txt", "a b c", "merges.txt:1 is 'a b c', not two tokens"),
        ("merges.txt", "€ €", "do not belong together"),
        ("merges.txt", "a b\n" * 300, "has 300 merges, which with 256 bytes"),
    ],
)
def test_invalid_vocabulary_and_merge_files_are_refused(
    corpus: Path, tmp_path: Path, name: str, change: str | None, message: str
) -> None:
    build_tokenizer(train(300), corpus, tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    if change is not None:
        (tmp_path / "out" / name).write_text(change, encoding="utf-8")
    (tmp_path / "second").mkdir()
    with pytest.raises(DataFormatError, match=re.escape(message)):
        build_tokenizer(gpt2(tmp_path / "out"), corpus, tmp_path / "second")
    assert list((tmp_path / "second").iterdir()) == []


def test_fingerprint_depends_on_the_content_and_not_on_the_path(
    corpus: Path, tmp_path: Path
) -> None:
    build_tokenizer(train(300), corpus, tmp_path / "out")
    before = [fingerprint(choice(tmp_path / "out")) for choice in (gpt2, hf)]
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    assert [fingerprint(choice(moved)) for choice in (gpt2, hf)] == before
    for name in ("merges.txt", "tokenizer.json"):
        with open(moved / name, "a") as file:
            file.write("\n")
    assert all(
        fingerprint(choice(moved)) != old for choice, old in zip((gpt2, hf), before, strict=True)
    )
    assert fingerprint(hf("owner/name", revision="abc"))["revision"] == "abc"
    with pytest.raises(
        DataFormatError, match=r"cannot be read: No such file .*: check data\.tokenizer"
    ):
        fingerprint(hf(tmp_path / "none.json"))


def test_an_hf_tokenizer_is_used_without_padding_and_post_processing(
    corpus: Path, tmp_path: Path
) -> None:
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "</s>": 2}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        "</s> $A", special_tokens=[("</s>", 2)]
    )
    backend.enable_padding(length=8)
    backend.enable_truncation(2)
    backend.save(str(tmp_path / "foreign.json"))
    counts = build_tokenizer(
        hf(tmp_path / "foreign.json", eod_token="</s>"), corpus, tmp_path / "out"
    )
    special = SpecialTokens(eod=2, sep=2, unk=0).model_dump(mode="json")
    assert counts == {"vocab_size": 3, "eod_id": 2, "eod_token": "</s>", "special_tokens": special}
    assert load_tokenizer(tmp_path / "out").encode("a a</s>b").tolist() == [1, 1, 2, 0]
    saved = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert {name: saved[name] for name in saved if name.endswith("_token")} == {
        "eos_token": "</s>",
        "unk_token": "[UNK]",
    }
    with pytest.raises(
        DataFormatError,
        match=r"foreign\.json: the token '<\|endoftext\|>' .* is not in the vocabulary of 3 .*, or "
        r"name its own token with data\.tokenizer\.eod_token",
    ):
        build_tokenizer(hf(tmp_path / "foreign.json"), corpus, tmp_path / "out")


def test_an_invalid_tokenizer_file_or_repository_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(DataFormatError, match=r"x\.json is not a tokenizer\.json"):
        build_tokenizer(hf(tmp_path / "x.json"), corpus, tmp_path / "out")
    with pytest.raises(DataFormatError, match="neither a local file nor a repository"):
        build_tokenizer(hf("no such/re/pository"), corpus, tmp_path / "out")


def test_an_unreachable_hub_raises_a_download_error(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(repository: str, name: str, *, revision: str | None, cache_dir: str) -> str:
        assert cache_dir == str(tmp_path / ".huggingface")
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(
        DownloadError, match="of owner/name cannot be downloaded: the hub cannot be reached"
    ):
        build_tokenizer(hf("owner/name"), corpus, tmp_path / "out")


def test_a_damaged_tokenizer_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match=r"tokenizer_config\.json is missing or damaged"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("place", ["vocab", "added_tokens"])
def test_token_id_that_no_vocabulary_reaches_is_refused(tmp_path: Path, place: str) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    backend.add_special_tokens(["<|endoftext|>"])
    content = json.loads(backend.to_str())
    if place == "vocab":
        content["model"]["vocab"]["b"] = 2**31
    else:
        content["added_tokens"][0]["id"] = 2**31
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DataFormatError, match=r"the id 2,147,483,648, and ids must be below"):
        build_tokenizer(HfTokenizer(kind="hf", name=str(path)), tmp_path, tmp_path)


@pytest.mark.parametrize(
    "read", [read_backend, SentencePieceModel.read, wordpiece._read_vocab, build._read_merges]
)
def test_failing_disk_is_no_damage_of_a_tokenizer(
    read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: object, *_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error", str(name))

    (tmp_path / "vocab").write_text("whole")
    monkeypatch.setattr(io, "open", fail)
    monkeypatch.setattr(builtins, "open", fail)
    with pytest.raises(FileAccessError, match=r"vocab \(Input/output error\): the disk"):
        read(tmp_path / "vocab")
