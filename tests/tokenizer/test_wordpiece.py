"""Tests of tokenizers with BERT's WordPiece vocabularies."""

import json
from pathlib import Path

import pytest

from megacore.config.data import BertWordPieceTokenizer
from megacore.config.spec import SpecialTokens
from megacore.errors import DataFormatError
from megacore.tokenizer import load_tokenizer
from megacore.tokenizer.build import build_tokenizer, fingerprint

VOCABULARY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "hello",
    "world",
    "gro",
    "##ße",
    "##s",
    "E",
    "e",
    "!",
    "他",
]
TEXT = "Hello WORLDs! [SEP] Größe é 他x他"


def write_vocab(folder: Path, tokens: list[str]) -> BertWordPieceTokenizer:
    path = folder / "vocab.txt"
    path.write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    return BertWordPieceTokenizer(kind="bert-wordpiece", vocab_file=str(path))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_ids_are_the_line_numbers_of_the_vocabulary(tmp_path: Path, out: Path) -> None:
    counts = build_tokenizer(write_vocab(tmp_path, VOCABULARY), [], out)
    special = SpecialTokens(eod=3, pad=0, cls=2, sep=3, mask=4, unk=1).model_dump(mode="json")
    assert counts == {
        "vocab_size": 14,
        "eod_id": 3,
        "eod_token": "[SEP]",
        "special_tokens": special,
    }
    tokenizer = load_tokenizer(out)
    assert tokenizer.encode(TEXT).tolist() == [5, 6, 9, 12, 3, 7, 8, 11, 13, 1, 13]
    assert tokenizer.decode([5, 6, 9, 12]) == "hello worlds!"
    assert tokenizer.token_id("[MASK]") == 4
    assert tokenizer.token_id("[mask]") is None


def test_a_cased_vocabulary_keeps_case_and_accents(tmp_path: Path, out: Path) -> None:
    choice = write_vocab(tmp_path, VOCABULARY).model_copy(update={"lower_case": False})
    build_tokenizer(choice, [], out)
    assert load_tokenizer(out).encode("Hello E é").tolist() == [1, 10, 1]


@pytest.mark.parametrize("lower_case", [True, False])
def test_transformers_and_its_bert_tokenizer_encode_equally(
    tmp_path: Path, out: Path, lower_case: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    choice = write_vocab(tmp_path, VOCABULARY).model_copy(update={"lower_case": lower_case})
    build_tokenizer(choice, [], out)
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    facts = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower_case}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(facts))
    bert = transformers.BertTokenizer.from_pretrained(tmp_path)
    ids = load_tokenizer(out).encode(TEXT).tolist()
    assert bert(TEXT)["input_ids"] == hf_tokenizer(TEXT)["input_ids"] == [2, *ids, 3]
    assert (
        hf_tokenizer.sep_token_id,
        hf_tokenizer.cls_token_id,
        hf_tokenizer.mask_token_id,
        hf_tokenizer.pad_token_id,
    ) == (3, 2, 4, 0)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            ["a", "b"],
            r"vocab\.txt has no \[UNK\], \[SEP\], \[PAD\], \[CLS\], \[MASK\] among its 2 lines",
        ),
        ([*VOCABULARY, "hello"], r"vocab\.txt:15 repeats the token 'hello' of line 6"),
    ],
)
def test_incomplete_and_repeated_vocabularies_are_refused(
    tmp_path: Path, out: Path, tokens: list[str], message: str
) -> None:
    with pytest.raises(DataFormatError, match=message):
        build_tokenizer(write_vocab(tmp_path, tokens), [], out)
    assert list(out.iterdir()) == []


def test_a_missing_file_is_refused_with_its_name(tmp_path: Path, out: Path) -> None:
    choice = BertWordPieceTokenizer(kind="bert-wordpiece", vocab_file=str(tmp_path / "none.txt"))
    with pytest.raises(DataFormatError, match=r"none\.txt cannot be read"):
        build_tokenizer(choice, [], out)
    with pytest.raises(DataFormatError, match=r"none\.txt cannot be read"):
        fingerprint(choice)


def test_fingerprint_depends_on_content_and_case(tmp_path: Path) -> None:
    choice = write_vocab(tmp_path, VOCABULARY)
    other = choice.model_copy(update={"lower_case": False})
    assert fingerprint(choice) != fingerprint(other)
    before = fingerprint(choice)
    write_vocab(tmp_path, [*VOCABULARY, "new"])
    assert fingerprint(choice) != before


def test_google_berts_vocabulary_gives_its_known_ids(shared_data: Path, out: Path) -> None:
    choice = BertWordPieceTokenizer(
        kind="bert-wordpiece", vocab_file=str(shared_data / "data" / "bert-vocab.txt")
    )
    counts = build_tokenizer(choice, [], out)
    assert (counts["vocab_size"], counts["eod_id"], counts["eod_token"]) == (30522, 102, "[SEP]")
    assert counts["special_tokens"]["mask"] == 103
    assert load_tokenizer(out).encode("Hello world, embeddings!").tolist() == [
        7592,
        2088,
        1010,
        7861,
        8270,
        4667,
        2015,
        999,
    ]
