"""Tests of training WordPiece vocabularies."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megacore.config.data import TrainWordPieceTokenizer
from megacore.corpus.documents import CorpusWriter
from megacore.errors import DataFormatError
from megacore.tokenizer import load_tokenizer
from megacore.tokenizer import wordpiece as module
from megacore.tokenizer.build import build_tokenizer, fingerprint
from megacore.tokenizer.wordpiece import SPECIAL, train_wordpiece

TEXTS = [
    f"The quick größe fox_{number} jumps over (the) lazy 他 dog number {number}!"
    for number in range(60)
]


def choice(**values: object) -> TrainWordPieceTokenizer:
    return TrainWordPieceTokenizer.model_validate(
        {"kind": "train-wordpiece", "vocab_size": 257, **values}
    )


def train(vocab_size: int = 90, *, lower_case: bool = True) -> dict[str, int]:
    return train_wordpiece(lambda: iter(TEXTS), vocab_size, lower_case=lower_case).get_vocab()


def test_vocabulary_has_the_configured_size_and_begins_with_special_tokens() -> None:
    vocab = train()
    assert sorted(vocab.values()) == list(range(90))
    assert [vocab[token] for token in SPECIAL] == [0, 1, 2, 3, 4]


def test_case_is_kept_only_without_lower_case() -> None:
    vocab = train()
    assert "the" in vocab
    assert "The" not in vocab
    assert "T" in train(lower_case=False)
    assert "T" not in vocab


def test_punctuation_and_cjk_characters_are_separate_words() -> None:
    vocab = train()
    assert "##o" in vocab
    assert not {"##(", "##_", "##他"} & set(vocab)  # each of these is a separate word


def test_trained_tokenizer_encodes_its_text_without_unknown_tokens() -> None:
    backend = train_wordpiece(lambda: iter(TEXTS), 90, lower_case=True)
    assert backend.encode("the (fox) 他", add_special_tokens=False).tokens[0] == "the"
    assert "[UNK]" not in backend.encode("Größe 他 (dog)").tokens
    assert backend.encode("Ω").tokens == ["[CLS]", "[UNK]", "[SEP]"]


def test_another_process_trains_an_identical_vocabulary() -> None:
    # The library's hash tables have another order in each process.
    code = (
        "import json; from tests.tokenizer.test_train_wordpiece import train; "
        "print(json.dumps(train()))"
    )
    root = Path(__file__).resolve().parents[2]
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(output) == train()


def test_the_rarest_characters_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "他" in train()
    monkeypatch.setattr(module, "ALPHABET", 20)
    vocab = train(55)
    letters = {token for token in vocab if len(token) == 1}
    assert len(letters) == 20
    assert {"e", "o", "u"} <= letters
    assert not {"z", "他"} & letters


@pytest.mark.parametrize(
    ("vocab_size", "message"),
    [
        (
            50,
            (
                r"vocab_size 50 has no room for 5 special tokens and the \d+ pieces of one "
                r"character .* raise it to"
            ),
        ),
        (5000, r"yields a vocabulary of \d+ entries, not the 5000 of .* lower it to at most"),
    ],
)
def test_impossible_vocabulary_sizes_are_refused(vocab_size: int, message: str) -> None:
    with pytest.raises(DataFormatError, match=message):
        train(vocab_size)


@pytest.mark.parametrize("lower_case", [True, False])
def test_transformers_encodes_a_trained_vocabulary_equally(
    tmp_path: Path, lower_case: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    for name in ("corpus", "out"):
        (tmp_path / name).mkdir()
    with CorpusWriter(tmp_path / "corpus") as writer:
        for number in range(400):
            writer.add(f"Text {number} of a corpus with größe and WORDS{number}", "test")
    wordpiece = choice(lower_case=lower_case, vocab_extra_ids=3)
    counts = build_tokenizer(wordpiece, tmp_path / "corpus", tmp_path / "out")
    assert (counts["vocab_size"], counts["eod_token"]) == (260, "[SEP]")
    assert counts["special_tokens"]["sentinels"] == [257, 258, 259]
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    text = "Text 7 of WORDS<extra_id_1> [MASK]"
    assert (
        hf_tokenizer(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text).tolist()
    )
    assert hf_tokenizer("text")["input_ids"] == [2, *tokenizer.encode("text").tolist(), 3]
    named = (
        hf_tokenizer.cls_token,
        hf_tokenizer.sep_token,
        hf_tokenizer.mask_token,
        hf_tokenizer.pad_token,
        hf_tokenizer.unk_token,
    )
    assert named == ("[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]")
    assert {"<extra_id_0>", "<extra_id_2>"} <= set(hf_tokenizer.all_special_tokens)


def test_fingerprint_depends_on_size_case_and_extra_ids() -> None:
    assert fingerprint(choice()) == {
        "kind": "train-wordpiece",
        "vocab_size": 257,
        "lower_case": True,
    }
    assert fingerprint(choice(lower_case=False)) != fingerprint(choice())
    assert fingerprint(choice(vocab_extra_ids=2))["vocab_extra_ids"] == 2
