"""Tests of sentinels, the roles of special tokens, and tokens that continue a word."""

import io
import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from megacore.config.data import HfTokenizer, SentencePieceTokenizer, TrainBpeTokenizer
from megacore.corpus.documents import CorpusWriter
from megacore.errors import DataFormatError
from megacore.tokenizer import load_tokenizer
from megacore.tokenizer.build import build_tokenizer, open_tokenizer
from megacore.tokenizer.load import JsonTokenizer, read_backend
from megacore.tokenizer.sentencepiece_model import SentencePieceModel
from megacore.tokenizer.vocabulary import continues_word, role_names, special_tokens
from tests.data._corpus import byte_tokenizer

EXTRA = ["<extra_id_0>", "<extra_id_1>", "<extra_id_2>"]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def train_sentencepiece(folder: Path, **options: object) -> str:
    """Train a SentencePiece model and return its path."""
    model = io.BytesIO()
    lines = (f"hello world number {number} größe\n" for number in range(50))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        vocab_size=34,
        minloglevel=2,
        pad_id=3,
        **options,
    )
    (folder / "m.model").write_bytes(model.getvalue())
    return str(folder / "m.model")


def word_level(folder: Path, tokens: list[str], special: list[str]) -> HfTokenizer:
    """Write a word-level tokenizer and return its configuration with three sentinels."""
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=tokens[0]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(special)
    backend.save(str(folder / "t.json"))
    return HfTokenizer(kind="hf", name=str(folder / "t.json"), eod_token="</s>", vocab_extra_ids=3)


def test_sentinels_are_added_to_a_trained_bpe(tmp_path: Path, out: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "corpus").mkdir()
    with CorpusWriter(tmp_path / "corpus") as writer:
        writer.add("def function(value): return value + 1\n" * 50, "test")
    choice = TrainBpeTokenizer(
        kind="train-bpe", vocab_size=270, special_tokens=("<pad>",), vocab_extra_ids=3
    )
    counts = build_tokenizer(choice, tmp_path / "corpus", out)
    assert counts["vocab_size"] == 273
    special = counts["special_tokens"]
    assert (special["eod"], special["pad"], special["sentinels"], special["cls"]) == (
        0,
        1,
        [270, 271, 272],
        None,
    )
    tokenizer, hf_tokenizer = load_tokenizer(out), transformers.AutoTokenizer.from_pretrained(out)
    text = "return <extra_id_1> + <extra_id_2>"
    ids = tokenizer.encode(text).tolist()
    assert ids.count(271) == ids.count(272) == 1
    assert tokenizer.decode(ids) == text
    assert hf_tokenizer(text)["input_ids"] == ids
    assert (len(hf_tokenizer), hf_tokenizer.pad_token) == (273, "<pad>")
    assert set(EXTRA) <= set(hf_tokenizer.all_special_tokens)
    assert "extra" not in hf_tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_sentinels_are_added_to_a_sentencepiece_model(
    tmp_path: Path, out: Path, model_type: str
) -> None:
    transformers = pytest.importorskip("transformers")
    file = train_sentencepiece(tmp_path, model_type=model_type)
    plain = open_tokenizer(SentencePieceTokenizer(kind="sentencepiece", model_file=file), tmp_path)
    choice = SentencePieceTokenizer(kind="sentencepiece", model_file=file, vocab_extra_ids=200)
    counts = build_tokenizer(choice, [], out)
    assert counts["vocab_size"] == plain.vocab_size + 200 == 234
    assert counts["special_tokens"]["sentinels"] == list(range(34, 234))
    assert counts["special_tokens"]["pad"] == 3
    tokenizer = load_tokenizer(out)
    assert tokenizer.encode("hello world").tolist() == plain.encode("hello world").tolist()
    assert tokenizer.tokens()[36] == "<extra_id_2>"
    assert {0, 1, 2, 3, 34, 233} <= tokenizer.special_ids()
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert hf_tokenizer.convert_tokens_to_ids("<extra_id_199>") == 233
    assert "<extra_id_7>" in hf_tokenizer.all_special_tokens
    assert len(hf_tokenizer) == 234
    text = "hello <extra_id_1>"
    assert 35 in hf_tokenizer(text, add_special_tokens=False)["input_ids"]


def test_sentinels_that_exist_or_leave_a_gap_are_refused(tmp_path: Path, out: Path) -> None:
    choice = word_level(tmp_path, ["[UNK]", "a", "</s>", "<extra_id_0>"], ["</s>"])
    with pytest.raises(DataFormatError, match="the vocabulary has <extra_id_0> already: leave"):
        build_tokenizer(choice, [], out)
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "a": 9, "</s>": 3}, unk_token="[UNK]")
    )
    with pytest.raises(
        DataFormatError, match="the 3 tokens from <extra_id_0> on cannot stand at the end"
    ):
        JsonTokenizer(backend, "</s>").add_special_tokens(EXTRA)
    assert list(out.iterdir()) == []


def test_roles_of_special_tokens_are_written_for_transformers(tmp_path: Path, out: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "<pad>", "<mask>", "a"]
    build_tokenizer(word_level(tmp_path, tokens, tokens[:5]), [], out)
    saved = json.loads((out / "tokenizer_config.json").read_text())
    assert {name: saved[name] for name in saved if name.endswith("_token")} == {
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
        "cls_token": "<s>",
        "sep_token": "</s>",
    }
    assert saved["additional_special_tokens"] == EXTRA
    without = open_tokenizer(word_level(tmp_path, tokens[:4], tokens[:4]), tmp_path)
    assert set(role_names(without)) == {"unk_token", "pad_token", "additional_special_tokens"}
    assert special_tokens(without).sentinels == (4, 5, 6)


def test_wordpieces_with_the_prefix_continue_a_word() -> None:
    vocab = {token: number for number, token in enumerate(["[UNK]", "##ing", "walk", "#", "##"])}
    tokenizer = JsonTokenizer(
        tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]")), "[UNK]"
    )
    assert continues_word(tokenizer).tolist() == [False, True, False, False, True]


def test_letters_and_digits_of_byte_level_bpe_continue_a_word() -> None:
    tokenizer = byte_tokenizer()
    continues = continues_word(tokenizer)
    assert continues.shape == (257,)
    for text, expected in {
        "a": True,
        "Z": True,
        "7": True,
        " ": False,
        "\n": False,
        "(": False,
        "_": False,
    }.items():
        assert continues[tokenizer.encode(text)].tolist() == [expected], text
    assert continues[tokenizer.encode("é日💡\xad\xa0")].all()  # bytes beyond ASCII
    assert not continues[tokenizer.eod_id]


def test_sentencepieces_without_the_space_mark_continue_a_word(tmp_path: Path) -> None:
    choice = SentencePieceTokenizer(
        kind="sentencepiece", model_file=train_sentencepiece(tmp_path), vocab_extra_ids=2
    )
    tokenizer = open_tokenizer(choice, tmp_path)
    continues = dict(zip(tokenizer.tokens(), continues_word(tokenizer).tolist(), strict=True))
    assert not continues["▁"]
    assert continues["o"]
    assert not continues["<s>"]
    assert not continues["<extra_id_0>"]


def test_half_of_a_surrogate_pair_is_no_token(tmp_path: Path) -> None:
    assert byte_tokenizer().token_id("\ud800") is None
    model = SentencePieceModel.read(Path(train_sentencepiece(tmp_path)))
    assert model.token_id("\ud800") is None


def test_a_refused_file_is_named_in_one_line(tmp_path: Path) -> None:
    values = json.loads(byte_tokenizer().backend.to_str())
    values["model"]["merges"] = [["a\nb", "a"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(DataFormatError) as caught:
        read_backend(tmp_path / "tokenizer.json")
    assert "reads: Token `a b` out of vocabulary" in str(caught.value)
    assert "\n" not in str(caught.value)
