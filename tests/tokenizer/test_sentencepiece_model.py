"""Tests of SentencePiece tokenizers."""

from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from megacore.config.data import SentencePieceTokenizer
from megacore.config.spec import SpecialTokens
from megacore.errors import DataFormatError
from megacore.tokenizer import load_tokenizer
from megacore.tokenizer.build import build_tokenizer, fingerprint
from megacore.tokenizer.sentencepiece_model import SentencePieceModel
from megacore.tokenizer.tokenize import TokenizeOptions, tokenize_corpus
from tests.tokenizer._corpora import documents, write_corpus

TEXTS = ["", "hello world", "größe 💡 hello", "a</s>b <unk>", "  spaces   \n here "]


def train(folder: Path, **options: object) -> SentencePieceTokenizer:
    lines = [f"hello world number {number} größe\n" for number in range(50)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "m"),
        minloglevel=2,
        **{"vocab_size": 32, **options},
    )
    return SentencePieceTokenizer(kind="sentencepiece", model_file=str(folder / "m.model"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_ids_equal_those_of_the_sentencepiece_library(
    tmp_path: Path, out: Path, model_type: str
) -> None:
    choice = train(tmp_path, model_type=model_type)
    special = SpecialTokens(eod=2, cls=1, sep=2, unk=0).model_dump(mode="json")
    counts = {"vocab_size": 32, "eod_id": 2, "eod_token": "</s>", "special_tokens": special}
    assert build_tokenizer(choice, [], out) == counts
    processor = sentencepiece.SentencePieceProcessor(model_file=choice.model_file)
    tokenizer = load_tokenizer(out)
    assert [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)] == [
        processor.encode(text) for text in TEXTS
    ]
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.decode(np.array(processor.encode("hello world"))) == "hello world"
    assert (tokenizer.token_id("</s>"), tokenizer.token_id("no such piece")) == (2, None)
    assert tokenizer.token_id("<unk>") == 0


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_transformers_encodes_equally(tmp_path: Path, out: Path, model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    build_tokenizer(train(tmp_path, model_type=model_type), [], out)
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    for text in ("hello world", "größe 💡 hello", "  spaces   \n here "):
        assert (
            hf_tokenizer(text, add_special_tokens=False)["input_ids"]
            == load_tokenizer(out).encode(text).tolist()
        )
    assert (hf_tokenizer.eos_token, hf_tokenizer.eos_token_id) == ("</s>", 2)


BYTES = {
    "model_type": "bpe",
    "byte_fallback": True,
    "vocab_size": 300,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}
"""Options such as those of Llama 2's model."""


@pytest.mark.parametrize("options", [{}, {"model_type": "bpe"}, BYTES])
def test_text_of_an_export_is_that_of_transformers(
    tmp_path: Path, out: Path, options: dict[str, object]
) -> None:
    transformers = pytest.importorskip("transformers")
    build_tokenizer(train(tmp_path, **options), [], out)
    tokenizer, theirs = load_tokenizer(out), transformers.AutoTokenizer.from_pretrained(out)
    for text in ("hello world", "  hello \n 💡 world  \n", "größe"):
        ids = tokenizer.encode(text).tolist()
        for part in (ids, ids[:-1], ids[1:]):
            known = [token for token in part if token != tokenizer.token_id("<unk>")]
            assert tokenizer.decode_as_exported(known) == theirs.decode(known)


EQUAL_TEXTS = [
    *TEXTS,
    " ",
    "\n",
    " hello\r\n\tworld\0\n\n",
    "▁▁a ▁",
    "e\N{COMBINING ACUTE ACCENT} ½ ﬁ 中文 👩‍👩‍👧 123456",
    "aaaaaaa" + " " * 40 + "x" * 40,
    "hello<sym>world <sym>",
]


@pytest.mark.parametrize(
    "options",
    [
        BYTES,
        BYTES | {"remove_extra_whitespaces": True},
        BYTES | {"add_dummy_prefix": False, "split_digits": True},
        BYTES | {"user_defined_symbols": ["<sym>", "llo"]},
        BYTES | {"byte_fallback": False, "vocab_size": 40, "remove_extra_whitespaces": True},
    ],
)
def test_exported_tokenizer_equals_the_model(tmp_path: Path, options: dict[str, object]) -> None:
    model = SentencePieceModel.read(Path(train(tmp_path, **options).model_file))
    model.add_special_tokens(["<extra_0>"])
    backend = model.exported()
    assert backend is not None
    for text in [*EQUAL_TEXTS, "\n".join(EQUAL_TEXTS * 5), "a<extra_0>"]:
        ids = model.encode(text).tolist()
        assert backend.encode(text, add_special_tokens=False).ids == ids
        assert backend.decode(ids, skip_special_tokens=False) == model.decode(ids)


@pytest.mark.parametrize(
    "options",
    [
        BYTES | {"model_type": "unigram", "hard_vocab_limit": False},
        BYTES | {"normalization_rule_name": "nmt_nfkc"},
        BYTES | {"treat_whitespace_as_suffix": True},
        BYTES | {"add_dummy_prefix": False, "user_defined_symbols": ["<sym>"]},
    ],
)
def test_other_kinds_have_no_exported_tokenizer(tmp_path: Path, options: dict[str, object]) -> None:
    model = SentencePieceModel.read(Path(train(tmp_path, **options).model_file))
    assert model.exported() is None


def test_documents_end_with_the_end_of_sentence_piece(tmp_path: Path, out: Path) -> None:
    build_tokenizer(train(tmp_path), [], out)
    tokenizer = load_tokenizer(out)
    corpus = write_corpus(tmp_path / "corpus", TEXTS)
    (tmp_path / "tokens").mkdir()
    tokenize_corpus(corpus, out, tmp_path / "tokens", TokenizeOptions(append_eod=True), workers=2)
    expected = [[[*tokenizer.encode(text).tolist(), 2]] if text else [] for text in TEXTS]
    assert documents(tmp_path / "tokens") == expected


def test_a_model_without_an_end_of_sentence_is_refused(tmp_path: Path, out: Path) -> None:
    with pytest.raises(
        DataFormatError, match=r"m\.model has no end of sentence among its 32 pieces"
    ):
        build_tokenizer(train(tmp_path, eos_id=-1), [], out)


@pytest.mark.parametrize("content", [None, b"", b"not a model"])
def test_missing_and_invalid_model_files_are_refused(
    tmp_path: Path, out: Path, content: bytes | None
) -> None:
    path = tmp_path / "x.model"
    if content is not None:
        path.write_bytes(content)
    choice = SentencePieceTokenizer(kind="sentencepiece", model_file=str(path))
    with pytest.raises(
        DataFormatError, match=r"x\.model (is not a SentencePiece model|cannot be read)"
    ):
        build_tokenizer(choice, [], out)
    assert list(out.iterdir()) == []


def test_fingerprint_depends_on_the_content(tmp_path: Path) -> None:
    choice = train(tmp_path)
    moved = choice.model_copy(
        update={"model_file": str(Path(choice.model_file).rename(tmp_path / "other.model"))}
    )
    before = fingerprint(moved)
    assert set(before) == {"kind", "model"}
    (tmp_path / "other.model").write_bytes(b"x")
    assert fingerprint(moved) != before
