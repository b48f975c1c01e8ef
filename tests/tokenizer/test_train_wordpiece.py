"""A WordPiece vocabulary is a function of the text alone, and what BERT needs."""

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


def test_it_has_the_asked_size_and_begins_with_the_special_tokens() -> None:
    vocab = train()
    assert sorted(vocab.values()) == list(range(90))
    assert [vocab[token] for token in SPECIAL] == [0, 1, 2, 3, 4]
    assert "the" in vocab
    assert "The" not in vocab
    assert "T" in train(lower_case=False)
    assert "T" not in vocab
    assert "##o" in vocab
    assert not {"##(", "##_", "##他"} & set(vocab)  # these are words by themselves
    backend = train_wordpiece(lambda: iter(TEXTS), 90, lower_case=True)
    assert backend.encode("the (fox) 他", add_special_tokens=False).tokens[0] == "the"
    assert "[UNK]" not in backend.encode("Größe 他 (dog)").tokens
    assert backend.encode("Ω").tokens == ["[CLS]", "[UNK]", "[SEP]"]


def test_another_process_gives_the_same() -> None:
    """What the library keeps in hash tables is in another order in each process."""
    code = (
        "import json; from tests.tokenizer.test_train_wordpiece import train; "
        "print(json.dumps(train()))"
    )
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(found) == train()


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
def test_sizes_that_cannot_be(vocab_size: int, message: str) -> None:
    with pytest.raises(DataFormatError, match=message):
        train(vocab_size)


@pytest.mark.parametrize("lower_case", [True, False])
def test_the_stage_and_transformers(tmp_path: Path, lower_case: bool) -> None:
    transformers = pytest.importorskip("transformers")
    for name in ("corpus", "out"):
        (tmp_path / name).mkdir()
    with CorpusWriter(tmp_path / "corpus") as writer:
        for number in range(400):
            writer.add(f"Text {number} of a corpus with größe and WORDS{number}", "test")
    given = choice(lower_case=lower_case, vocab_extra_ids=3)
    counts = build_tokenizer(given, tmp_path / "corpus", tmp_path / "out")
    assert (counts["vocab_size"], counts["eod_token"]) == (260, "[SEP]")
    assert counts["special_tokens"]["sentinels"] == [257, 258, 259]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = load_tokenizer(tmp_path / "out")
    text = "Text 7 of WORDS<extra_id_1> [MASK]"
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text).tolist()
    assert theirs("text")["input_ids"] == [2, *ours.encode("text").tolist(), 3]
    named = (
        theirs.cls_token,
        theirs.sep_token,
        theirs.mask_token,
        theirs.pad_token,
        theirs.unk_token,
    )
    assert named == ("[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]")
    assert {"<extra_id_0>", "<extra_id_2>"} <= set(theirs.all_special_tokens)


def test_fingerprint() -> None:
    assert fingerprint(choice()) == {
        "kind": "train-wordpiece",
        "vocab_size": 257,
        "lower_case": True,
    }
    assert fingerprint(choice(lower_case=False)) != fingerprint(choice())
    assert fingerprint(choice(vocab_extra_ids=2))["vocab_extra_ids"] == 2
