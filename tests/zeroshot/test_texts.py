"""Reading of WikiText and LAMBADA, and refusals."""

import json
from pathlib import Path

import pytest

from megacore.errors import DataFormatError
from megacore.tokenizer import Tokenizer
from megacore.zeroshot.texts import read_lambada, read_wikitext
from tests.generate import _tiny


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _tiny.write_tokenizer(tmp_path_factory.mktemp("texts") / "tokenizer")


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_wikitext_is_one_detokenized_text_with_its_original_word_count(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    text = read_wikitext(
        write(tmp_path / "wiki", " \n = Value = \n \n The sum , not the value . \n "), tokenizer
    )
    assert tokenizer.decode(text.tokens) == "\n= Value =\n\nThe sum, not the value.\n"
    assert text.words == 12


def test_lambada_is_split_before_its_last_word(tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = ["the value of the value", "not  the\nsum", "über größe sum"]
    lines = "\n".join(json.dumps({"text": text, "other": 1}) for text in texts)
    passages = read_lambada(write(tmp_path / "lambada", lines + "\n\n"), tokenizer)
    pairs = [
        (tokenizer.decode(passage.context), tokenizer.decode(passage.target))
        for passage in passages
    ]
    assert pairs == [("the value of the", " value"), ("not  the", " sum"), ("über größe", " sum")]
    assert passages[0].target.tolist() == tokenizer.encode(" value").tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no passage"),
        (
            '{"text": "a b"}\n{"txt": "a b"}',
            r"lambada:2 is no JSON object with a text under the key text",
        ),
        ('{"text": "a b"}\nnot json', "lambada:2 is no JSON object"),
        ('{"text": 5}', "lambada:1 is no JSON object"),
        ("[1]", "lambada:1 is no JSON object"),
        ('{"text": ' + "[" * 200_000, "lambada:1 is no JSON object"),
        ('{"text": " word "}', "lambada:1 has 1 words: a passage needs at least 2"),
        (b'{"text": "\xff"}', r"is not UTF-8 \(invalid start byte at byte 10\)"),
    ],
)
def test_malformed_passages_are_refused_with_their_line(
    content: str | bytes, message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(DataFormatError, match=message):
        read_lambada(write(tmp_path / "lambada", content), tokenizer)


def test_missing_and_too_short_texts_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match="nowhere cannot be read: No such file or directory"):
        read_wikitext(tmp_path / "nowhere", tokenizer)
    with pytest.raises(DataFormatError, match="wiki has 1 tokens: a perplexity needs at least 2"):
        read_wikitext(write(tmp_path / "wiki", "t"), tokenizer)
