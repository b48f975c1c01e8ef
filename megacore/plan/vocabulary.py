"""Vocabulary sizes that are known before the tokenizer stage has run.

The model's size depends on them.
"""

from pathlib import Path

from megacore.artifact.files import read_json, reason_of, regular
from megacore.config.data import (
    BertWordPieceTokenizer,
    Gpt2BpeTokenizer,
    HfTokenizer,
    SentencePieceTokenizer,
    TokenizerChoice,
    TrainBpeTokenizer,
    TrainWordPieceTokenizer,
)
from megacore.errors import ConfigError
from megacore.paths import is_file

HUB_VOCAB_SIZE = 50_257
"""Assumed number of entries of a tokenizer that is not yet downloaded from the hub: GPT-2's."""


def expected_vocab_size(tokenizer: TokenizerChoice) -> int:
    """Return the number of vocabulary entries that can be known before the tokenizer stage.

    A tokenizer on the hub counts as GPT-2's. Raises ConfigError if a vocabulary file is missing or
    damaged.
    """
    return _own_entries(tokenizer) + tokenizer.vocab_extra_ids


def _own_entries(tokenizer: TokenizerChoice) -> int:
    """Return the number of entries without the added sentinels."""
    match tokenizer:
        case TrainBpeTokenizer() | TrainWordPieceTokenizer():
            return tokenizer.vocab_size
        case HfTokenizer():
            file = tokenizer.local_file
            return HUB_VOCAB_SIZE if file is None else _entries(file, "data.tokenizer.name")
        case Gpt2BpeTokenizer():
            if not is_file(tokenizer.merge_file):
                raise ConfigError(
                    f"data.tokenizer.merge_file: {tokenizer.merge_file} is no file: correct the "
                    "path"
                )
            return _entries(Path(tokenizer.vocab_file), "data.tokenizer.vocab_file")
        case BertWordPieceTokenizer():
            return _lines(Path(tokenizer.vocab_file), "data.tokenizer.vocab_file")
        case SentencePieceTokenizer():
            return _pieces(Path(tokenizer.model_file), "data.tokenizer.model_file")


def is_on_the_hub(choice: TokenizerChoice) -> bool:
    """Return True if the tokenizer must be downloaded."""
    return isinstance(choice, HfTokenizer) and choice.local_file is None


def _lines(file: Path, setting: str) -> int:
    """Return the number of entries of a vocab.txt."""
    try:
        with regular(file).open(encoding="utf-8", newline="\n") as lines:
            return sum(1 for _ in lines)
    except (OSError, ValueError) as error:
        raise _unreadable(setting, f"vocabulary {file}", error) from error


def _pieces(file: Path, setting: str) -> int:
    """Return the number of entries of a SentencePiece model."""
    from sentencepiece import SentencePieceProcessor

    try:
        return int(SentencePieceProcessor(model_proto=regular(file).read_bytes()).get_piece_size())
    except (OSError, RuntimeError) as error:
        raise _unreadable(setting, f"model {file}", error) from error


def _entries(file: Path, setting: str) -> int:
    """Return the number of entries of a vocab.json or a tokenizer.json."""
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise _unreadable(setting, f"vocabulary {file}", error) from error
    if not isinstance(content, dict) or not content:
        raise ConfigError(
            f"{setting}: {file} holds no vocabulary: give a vocab.json or tokenizer.json"
        )
    if "model" in content and isinstance(content["model"], dict):
        added = {token["content"] for token in content.get("added_tokens") or []}
        vocabulary = content["model"].get("vocab") or {}
        names = (
            set(vocabulary) if isinstance(vocabulary, dict) else {entry[0] for entry in vocabulary}
        )
        return len(names | added)
    return len(content)


def _unreadable(setting: str, what: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{setting}: the {what} cannot be read ({reason_of(error)}): correct the path"
    )
