"""What samples of sentences need to know of a vocabulary: its special tokens, and which tokens continue a word."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from megacore.config.data import DataConfig
from megacore.config.model import Family
from megacore.config.sentences import most_spans
from megacore.config.spec import SpecialTokens
from megacore.errors import ConfigError
from megacore.tokenizer import load_tokenizer
from megacore.tokenizer.roles import SPELLINGS, special_tokens
from megacore.tokenizer.words import continues_word

_NEEDED: dict[Family, tuple[str, ...]] = {"gpt": (), "bert": ("cls", "sep", "mask", "pad"), "t5": ("pad",)}


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary that sentences were tokenized with."""

    special: SpecialTokens
    """Ids of the tokens that have a role."""
    continues: npt.NDArray[np.uint8]
    """[v] whether a token is not the first of its word."""

    @classmethod
    def load(cls, tokenizer_directory: str | Path, family: Family, data: DataConfig) -> Self:
        """That of a tokenizer's directory. Raises DataFormatError, and ConfigError where the family's tokens lack."""
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
            f"family {family} needs the tokens {names}, which the vocabulary lacks: give data.tokenizer one that has "
            "them, or name them in data.tokenizer.special_tokens of train-bpe"
        )
    if family == "t5":
        needed = most_spans(data)
        if len(special.sentinels) < needed:
            raise ConfigError(
                f"family t5 needs {needed} sentinels <extra_id_0> … for data.seq_length {data.seq_length}, but the "
                f"vocabulary has {len(special.sentinels)}: set data.tokenizer.vocab_extra_ids to at least {needed}"
            )
