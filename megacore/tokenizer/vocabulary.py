"""What samples of sentences need of a vocabulary: special tokens, and what continues a word.

Tokens that continue a word let words be masked whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import tokenizers

from megacore.config.checks import most_spans
from megacore.config.data import DataConfig
from megacore.config.model import Family
from megacore.config.spec import SpecialTokens
from megacore.errors import ConfigError
from megacore.tokenizer import load_tokenizer
from megacore.tokenizer.load import JsonTokenizer, Tokenizer

_NEEDED: dict[Family, tuple[str, ...]] = {
    "gpt": (),
    "bert": ("cls", "sep", "mask", "pad"),
    "t5": ("pad",),
}
SPELLINGS = {
    "pad": ("[PAD]", "<pad>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "unk": ("[UNK]", "<unk>"),
}
"""How a token with a role is written, in BERT's or in SentencePiece's way; the first that there is
counts."""
SENTINEL = "<extra_id_{}>"
"""T5's sentinels (Raffel et al. 2019), counted from 0."""
_SPACE = "▁"
"""What SentencePiece writes for the space before a word."""
_CONTINUING = "##"
"""What WordPiece writes before a piece that begins no word."""


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary that sentences were tokenized with."""

    special: SpecialTokens
    """Ids of the tokens that have a role."""
    continues: npt.NDArray[np.uint8]
    """[v] whether a token is not the first of its word."""

    @classmethod
    def load(cls, tokenizer_directory: str | Path, family: Family, data: DataConfig) -> Self:
        """That of a tokenizer's directory.

        Raises DataFormatError, and ConfigError where the family's tokens lack.
        """
        tokenizer = load_tokenizer(tokenizer_directory)
        special = special_tokens(tokenizer)
        check_roles(special, family, data)
        return cls(special, continues_word(tokenizer).astype(np.uint8))


def check_roles(special: SpecialTokens, family: Family, data: DataConfig) -> None:
    """Raise ConfigError where a vocabulary lacks a token that the family's samples have."""
    missing = [role for role in _NEEDED[family] if getattr(special, role) is None]
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
    """The ids of a vocabulary's tokens with a role."""
    found = {role: _first(tokenizer, spellings) for role, spellings in SPELLINGS.items()}
    return SpecialTokens(eod=tokenizer.eod_id, sentinels=tuple(_sentinels(tokenizer)), **found)


def _sentinels(tokenizer: Tokenizer) -> Iterator[int]:
    for number in count():
        token = tokenizer.token_id(SENTINEL.format(number))
        if token is None:
            return
        yield token


def _first(tokenizer: Tokenizer, spellings: tuple[str, ...]) -> int | None:
    return next(
        (token for text in spellings if (token := tokenizer.token_id(text)) is not None), None
    )


def role_names(tokenizer: Tokenizer) -> dict[str, str | list[str]]:
    """The same for tokenizer_config.json.

    It has the roles of the tokens, and the sentinels as additional special tokens.

    Without a token for masks, <s> and </s> are no [CLS] and [SEP].
    """
    found = {role: _first_text(tokenizer, spellings) for role, spellings in SPELLINGS.items()}
    if found["mask"] is None:
        found |= {"cls": None, "sep": None}
    names: dict[str, str | list[str]] = {
        f"{role}_token": text for role, text in found.items() if text is not None
    }
    sentinels = [
        SENTINEL.format(number) for number in range(len(special_tokens(tokenizer).sentinels))
    ]
    return names | ({"additional_special_tokens": sentinels} if sentinels else {})


def _first_text(tokenizer: Tokenizer, spellings: tuple[str, ...]) -> str | None:
    return next((text for text in spellings if tokenizer.token_id(text) is not None), None)


def continues_word(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """Of each token whether it is not the first of its word, [v].

    Special tokens and gaps in the ids are none.

    WordPiece marks such pieces with ##. Byte-level BPE and SentencePiece mark the space before a
    word instead: a token without it continues one, unless it begins with neither letter nor digit.
    """
    tokens = tokenizer.tokens()
    special = tokenizer.special_ids()
    if isinstance(tokenizer, JsonTokenizer) and isinstance(
        tokenizer.backend.model, tokenizers.models.WordPiece
    ):
        continues = [token.startswith(_CONTINUING) for token in tokens]
    elif any(token.startswith(_SPACE) for token in tokens):
        continues = [token[:1].isalnum() for token in tokens]
    else:
        word = _word_bytes()
        continues = [token[:1] in word for token in tokens]
    return np.array(
        [found and number not in special for number, found in enumerate(continues)], np.bool_
    )


def _word_bytes() -> frozenset[str]:
    """What byte-level BPE writes for ASCII letters and digits, and for all other bytes.

    GPT-2's alphabet: printable bytes stand for themselves, the others in their order for the code
    points from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    written = {
        byte: chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)
    }
    return frozenset(
        letter for byte, letter in written.items() if byte >= 0x80 or chr(byte).isalnum()
    )
