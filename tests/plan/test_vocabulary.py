import io
import json
from pathlib import Path

import pytest
import sentencepiece

from megacore.config import load_config
from megacore.errors import ConfigError
from megacore.plan.vocabulary import expected_vocab_size


def test_the_vocabulary_size_is_read_from_files(tmp_path: Path) -> None:
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    choice = {"kind": "gpt2-bpe", "vocab_file": str(vocab), "merge_file": str(merges)}
    config = load_config("gpt2-tiny", {"data.tokenizer": choice})
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.merge_file.*merges\.txt is no file"):
        expected_vocab_size(config.data.tokenizer)
    merges.write_text("#version: 0.2\n")
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer\.vocab_file.*vocab\.json cannot be read"
    ):
        expected_vocab_size(config.data.tokenizer)
    vocab.write_text(json.dumps({"a": 0, "b": 1, "<|endoftext|>": 2}))
    assert expected_vocab_size(config.data.tokenizer) == 3
    tokenizer = {
        "model": {"vocab": {"a": 0, "b": 1}},
        "added_tokens": [{"content": "b"}, {"content": "<|endoftext|>"}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    local = load_config("gpt2-tiny", {"data.tokenizer": {"kind": "hf", "name": str(tmp_path)}})
    assert expected_vocab_size(local.data.tokenizer) == 3
    missing = load_config(
        "gpt2-tiny", {"data.tokenizer": {"kind": "hf", "name": str(tmp_path / "typo.json")}}
    )
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer\.name: the vocabulary .*typo\.json cannot be read"
    ):
        expected_vocab_size(missing.data.tokenizer)


def test_the_vocabulary_size_is_known_without_files() -> None:
    assert expected_vocab_size(load_config("gpt2-tiny").data.tokenizer) == 8192
    assert expected_vocab_size(load_config("gpt2-345m").data.tokenizer) == 50_257


def test_wordpiece_vocabularies_have_an_entry_per_line(tmp_path: Path) -> None:
    vocab = tmp_path / "vocab.txt"
    config = load_config(
        "gpt2-tiny", {"data.tokenizer": {"kind": "bert-wordpiece", "vocab_file": str(vocab)}}
    )
    with pytest.raises(
        ConfigError,
        match=r"data\.tokenizer\.vocab_file: the vocabulary .*vocab\.txt cannot be read",
    ):
        expected_vocab_size(config.data.tokenizer)
    vocab.write_text("[PAD]\n[SEP]\na\u2028b\n", encoding="utf-8")
    assert expected_vocab_size(config.data.tokenizer) == 3


def test_the_size_of_a_sentencepiece_vocabulary_is_read_from_the_model(tmp_path: Path) -> None:
    model = tmp_path / "m.model"
    config = load_config(
        "gpt2-tiny", {"data.tokenizer": {"kind": "sentencepiece", "model_file": str(model)}}
    )
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer\.model_file: the model .*m\.model cannot be read"
    ):
        expected_vocab_size(config.data.tokenizer)
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "a dog ate the cat"] * 20),
        model_writer=written,
        vocab_size=16,
        minloglevel=2,
    )
    model.write_bytes(written.getvalue())
    assert expected_vocab_size(config.data.tokenizer) == 16


def test_extra_ids_are_counted(tmp_path: Path) -> None:
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("[PAD]\n[SEP]\n")
    for choice, entries in (
        ({"kind": "train-bpe", "vocab_size": 300}, 300),
        ({"kind": "train-wordpiece", "vocab_size": 300}, 300),
        ({"kind": "bert-wordpiece", "vocab_file": str(vocab)}, 2),
        ({"kind": "hf", "name": "owner/name"}, 50_257),
    ):
        for extra in (0, 28):
            config = load_config(
                "gpt2-tiny", {"data.tokenizer": {**choice, "vocab_extra_ids": extra}}
            )
            assert expected_vocab_size(config.data.tokenizer) == entries + extra
