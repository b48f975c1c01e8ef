"""Reading of WikiText and LAMBADA, prompts of the passkey test, and refusals."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers.models import BPE, WordLevel
from tokenizers.normalizers import Prepend, Replace, Sequence
from tokenizers.pre_tokenizers import Split

from megacore.config.train import PasskeyConfig
from megacore.errors import ConfigError, DataFormatError
from megacore.tokenizer import Tokenizer
from megacore.tokenizer.load import JsonTokenizer
from megacore.zeroshot.texts import (
    check_passkeys,
    make_passkeys,
    read_lambada,
    read_wikitext,
)
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


def test_a_byte_order_mark_is_skipped(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = read_wikitext(write(tmp_path / "wiki", "\ufeffthe value"), tokenizer)
    assert tokenizer.decode(text.tokens) == "the value"
    lines = f"\ufeff{json.dumps({'text': 'the value'})}\n"
    (passage,) = read_lambada(write(tmp_path / "lambada", lines), tokenizer)
    assert tokenizer.decode(passage.context) == "the"


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


def test_bytes_of_lambada_are_those_of_separate_texts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pairs = [("the value of", "sum"), ("not the", "größe,"), ('"über', "step."), ("a", "b")]
    lines = "\n".join(json.dumps({"text": " ".join(pair)}) for pair in pairs)
    passages = read_lambada(write(tmp_path / "lambada", lines), tokenizer)
    for passage, (context, word) in zip(passages, pairs, strict=True):
        assert passage.context.tolist() == tokenizer.encode(context).tolist()
        assert passage.target.tolist() == tokenizer.encode(f" {word}").tolist()


def test_no_space_is_added_before_the_last_word_of_lambada(tmp_path: Path) -> None:
    tokens = ["<unk>", "▁", "▁cat", "▁sat", "▁mat", "<|endoftext|>"]
    backend = tokenizers.Tokenizer(
        WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>")
    )
    backend.normalizer = Sequence([Prepend("▁"), Replace(" ", "▁")])
    backend.pre_tokenizer = Split("▁", "merged_with_next")
    tokenizer = JsonTokenizer(backend, "<|endoftext|>")
    assert [tokens[index] for index in tokenizer.encode(" sat")] == ["▁", "▁sat"]
    (passage,) = read_lambada(write(tmp_path / "lambada", '{"text": "cat mat sat"}'), tokenizer)
    assert [tokens[index] for index in passage.context] == ["▁cat", "▁mat"]
    assert [tokens[index] for index in passage.target] == ["▁sat"]


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
        ('{"text": "a \\ud800"}', "lambada:1 is no JSON object"),
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


def test_last_words_without_tokens_are_empty_targets_and_not_all_may_be(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(BPE({"a": 0, "b": 1, " ": 2, "<|endoftext|>": 3}, []))
    tokenizer = JsonTokenizer(backend, "<|endoftext|>")
    lines = ['{"text": "a b"}', '{"text": "a x"}', '{"text": "x y"}']
    passages = read_lambada(write(tmp_path / "some", "\n".join(lines)), tokenizer)
    assert [passage.target.tolist() for passage in passages] == [[2, 1], [], []]
    path = write(tmp_path / "none", lines[2])
    with pytest.raises(DataFormatError, match="no token for the last words of the 1 passages in"):
        read_lambada(path, tokenizer)


def test_last_words_of_unknown_tokens_only_are_empty_targets(tmp_path: Path) -> None:
    vocabulary = {"a": 0, "b": 1, "<unk>": 2, "</s>": 3}
    backend = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = JsonTokenizer(backend, "</s>")
    lines = ['{"text": "a b"}', '{"text": "a x"}', '{"text": "a x-b"}', '{"text": "a x-x"}']
    passages = read_lambada(write(tmp_path / "some", "\n".join(lines)), tokenizer)
    assert [passage.target.tolist() for passage in passages] == [[1], [], [2, 2, 1], []]


def test_missing_and_too_short_texts_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match="nowhere cannot be read: No such file or directory"):
        read_wikitext(tmp_path / "nowhere", tokenizer)
    with pytest.raises(DataFormatError, match="wiki has 1 tokens: a perplexity needs at least 2"):
        read_wikitext(write(tmp_path / "wiki", "t"), tokenizer)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_passkey_is_hidden_at_its_depth_and_fills_its_length(
    tokenizer: Tokenizer, depth: float
) -> None:
    config = PasskeyConfig(prompts=3, candidates=4)
    passkeys = make_passkeys(tokenizer, config, 1000, depth)
    assert len(passkeys) == 3
    for passkey in passkeys:
        text, numbers = tokenizer.decode(passkey.prompt), [*map(tokenizer.decode, passkey.numbers)]
        assert len({*numbers}) == 4
        hidden = numbers[0].strip()
        task, *filler, question = text.split("\n")
        key = f"The pass key is {hidden}. Remember it. {hidden} is the pass key."
        assert question + numbers[0] == f"What is the pass key? The pass key is {hidden}"
        before, after = (
            sum(part.count(".") for part in parts)
            for parts in (filler[: filler.index(key)], filler[filler.index(key) + 1 :])
        )
        assert before == round(depth * (before + after))
        sentence = len(tokenizer.encode(" There and back again."))
        assert 1000 - sentence < passkey.tokens <= 1000
        assert task.startswith("There is an important info")


def test_passkeys_depend_on_seed_length_and_depth_only(tokenizer: Tokenizer) -> None:
    def numbers(seed: int, length: int, depth: float, prompts: int = 3) -> list[str]:
        config = PasskeyConfig(seed=seed, prompts=prompts)
        passkeys = make_passkeys(tokenizer, config, length, depth)
        return [tokenizer.decode(passkey.numbers[0]) for passkey in passkeys]

    first = numbers(1, 800, 0.5)
    assert numbers(1, 800, 0.5, prompts=2) == first[:2]
    assert len({*first, *numbers(2, 800, 0.5), *numbers(1, 900, 0.5), *numbers(1, 800, 0.25)}) == 12


def test_impossible_passkeys_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="has the length 900 and the model has 800 positions"):
        check_passkeys(tokenizer, PasskeyConfig(lengths=(800, 900)), 800)
    with pytest.raises(ConfigError, match=r"length 20, but a prompt without filler has \d+ tokens"):
        check_passkeys(tokenizer, PasskeyConfig(lengths=(20,)), 800)
    check_passkeys(tokenizer, PasskeyConfig(lengths=(800,)), 800)
