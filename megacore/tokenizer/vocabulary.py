"""Properties of a vocabulary that sentence samples need: special tokens and continuing tokens.

Tokens that continue a word are needed to mask whole words.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import tokenizers

from megacore.config.checks import NEEDED_ROLES, most_spans
from megacore.config.data import SPELLINGS, DataConfig
from megacore.config.model import Family
from megacore.config.spec import SpecialTokens
from megacore.errors import ConfigError
from megacore.tokenizer import load_tokenizer
from megacore.tokenizer.load import SPACE, JsonTokenizer, Tokenizer
from megacore.tokenizer.wordpiece import CONTINUING

SENTINEL = "<extra_id_{}>"
"""Format of T5's sentinels (Raffel et al. 2019), numbered from 0."""


@dataclass(frozen=True)
class Vocabulary:
    """Special tokens and continuing tokens of the vocabulary that sentences are tokenized with."""

    special: SpecialTokens
    """Ids of the special tokens."""
    continues: npt.NDArray[np.uint8]
    """[v]: 1 for each token that continues a word, else 0."""

    @classmethod
    def load(cls, tokenizer_directory: str | Path, family: Family, data: DataConfig) -> Self:
        """Load the vocabulary of a tokenizer's directory.

        Raises DataFormatError, or ConfigError if tokens that the family needs are missing.
        """
        tokenizer = load_tokenizer(tokenizer_directory)
        special = special_tokens(tokenizer)
        check_roles(special, family, data)
        return cls(special, continues_word(tokenizer).astype(np.uint8))


def check_roles(special: SpecialTokens, family: Family, data: DataConfig) -> None:
    """Raise ConfigError if the vocabulary lacks a token that the family's samples need."""
    missing = [role for role in NEEDED_ROLES[family] if getattr(special, role) is None]
    if missing:
        names = ", ".join(SPELLINGS[role][0] for role in missing)
        raise ConfigError(
            f"family {family} needs the tokens {names}, which the vocabulary lacks: give "
            "data.tokenizer one that has them, or name them in data.tokenizer.special_tokens of "
            "train-bpe"
        )
    if family == "t5":
        needed = most_spans(data)
        if len(special.sentinels) < needed:
            raise ConfigError(
                f"family t5 needs {needed} sentinels <extra_id_0> … for data.seq_length "
                f"{data.seq_length}, but the vocabulary has {len(special.sentinels)}: set "
                f"data.tokenizer.vocab_extra_ids to at least {needed}"
            )


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """Return the ids of a vocabulary's special tokens."""
    ids: dict[str, Any] = {
        role: None if token is None else tokenizer.token_id(token)
        for role, token in _tokens(tokenizer).items()
    }
    return SpecialTokens(eod=tokenizer.eod_id, sentinels=tuple(_sentinels(tokenizer)), **ids)


def _sentinels(tokenizer: Tokenizer) -> Iterator[int]:
    for number in count():
        token = tokenizer.token_id(SENTINEL.format(number))
        if token is None:
            return
        yield token


def _tokens(tokenizer: Tokenizer) -> dict[str, str | None]:
    """Return the token of each role, None if the vocabulary lacks it."""
    return {
        role: next((text for text in spellings if tokenizer.token_id(text) is not None), None)
        for role, spellings in SPELLINGS.items()
    }


def role_names(tokenizer: Tokenizer) -> dict[str, str | list[str]]:
    """Return the special tokens by role, for tokenizer_config.json.

    The sentinels are additional special tokens. In a vocabulary without a mask token, <s> and </s>
    do not count as [CLS] and [SEP].
    """
    tokens = _tokens(tokenizer)
    if tokens["mask"] is None:
        tokens |= {"cls": None, "sep": None}
    names: dict[str, str | list[str]] = {
        f"{role}_token": text for role, text in tokens.items() if text is not None
    }
    sentinels = [
        SENTINEL.format(number) for number in range(len(special_tokens(tokenizer).sentinels))
    ]
    return names | ({"additional_special_tokens": sentinels} if sentinels else {})


def continues_word(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """Return a mask [v] that is True for each token that continues a word.

    Special tokens and gaps in the ids are False.

    WordPiece marks continuing pieces with ##. Byte-level BPE and SentencePiece mark the space
    before a word instead: a token without it continues a word if it begins with a letter or digit.
    """
    tokens = tokenizer.tokens()
    special = tokenizer.special_ids()
    if isinstance(tokenizer, JsonTokenizer) and isinstance(
        tokenizer.backend.model, tokenizers.models.WordPiece
    ):
        continues = [token.startswith(CONTINUING) for token in tokens]
    elif any(token.startswith(SPACE) for token in tokens):
        continues = [token[:1].isalnum() for token in tokens]
    else:
        word = _word_bytes()
        continues = [token[:1] in word for token in tokens]
    return np.array(
        [flag and number not in special for number, flag in enumerate(continues)], np.bool_
    )


def _word_bytes() -> frozenset[str]:
    """Return the characters that byte-level BPE writes for ASCII letters, digits and bytes >= 0x80.

    In GPT-2's alphabet printable bytes represent themselves, and the others are mapped, in order,
    to the code points from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    written = {
        byte: chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)
    }
    return frozenset(
        letter for byte, letter in written.items() if byte >= 0x80 or chr(byte).isalnum()
    )
