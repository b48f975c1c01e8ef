"""Which tokens of a vocabulary have a role."""

from collections.abc import Iterator
from itertools import count

from megacore.config.spec import SpecialTokens
from megacore.tokenizer.load import Tokenizer

SPELLINGS = {
    "pad": ("[PAD]", "<pad>"),
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "mask": ("[MASK]", "<mask>"),
    "unk": ("[UNK]", "<unk>"),
}
"""How a token with a role is written, in BERT's or in SentencePiece's way; the first that there is counts."""
SENTINEL = "<extra_id_{}>"
"""T5's sentinels (Raffel et al. 2019), counted from 0."""


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
    return next((token for text in spellings if (token := tokenizer.token_id(text)) is not None), None)


def role_names(tokenizer: Tokenizer) -> dict[str, str | list[str]]:
    """The same for tokenizer_config.json: roles of the tokens, and the sentinels as additional special tokens.

    Without a token for masks, <s> and </s> are no [CLS] and [SEP].
    """
    found = {role: _first_text(tokenizer, spellings) for role, spellings in SPELLINGS.items()}
    if found["mask"] is None:
        found |= {"cls": None, "sep": None}
    names: dict[str, str | list[str]] = {f"{role}_token": text for role, text in found.items() if text is not None}
    sentinels = [SENTINEL.format(number) for number in range(len(special_tokens(tokenizer).sentinels))]
    return names | ({"additional_special_tokens": sentinels} if sentinels else {})


def _first_text(tokenizer: Tokenizer, spellings: tuple[str, ...]) -> str | None:
    return next((text for text in spellings if tokenizer.token_id(text) is not None), None)
