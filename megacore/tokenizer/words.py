"""Which tokens of a vocabulary continue a word, so that words can be masked whole."""

import numpy as np
import numpy.typing as npt
import tokenizers

from megacore.tokenizer.load import JsonTokenizer, Tokenizer

_SPACE = "▁"
"""What SentencePiece writes for the space before a word."""
_CONTINUING = "##"
"""What WordPiece writes before a piece that begins no word."""


def continues_word(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """Of each token whether it is not the first of its word, [v]; special tokens and gaps in the ids are none.

    WordPiece marks such pieces with ##. Byte-level BPE and SentencePiece mark the space before a word instead: a token
    without it continues one, unless it begins with neither letter nor digit.
    """
    tokens = tokenizer.tokens()
    special = tokenizer.special_ids()
    if isinstance(tokenizer, JsonTokenizer) and isinstance(tokenizer.backend.model, tokenizers.models.WordPiece):
        continues = [token.startswith(_CONTINUING) for token in tokens]
    elif any(token.startswith(_SPACE) for token in tokens):
        continues = [token[:1].isalnum() for token in tokens]
    else:
        word = _word_bytes()
        continues = [token[:1] in word for token in tokens]
    return np.array([found and number not in special for number, found in enumerate(continues)], np.bool_)


def _word_bytes() -> frozenset[str]:
    """What byte-level BPE writes for ASCII letters and digits, and for the bytes of all other characters.

    GPT-2's alphabet: printable bytes stand for themselves, the others in their order for the code points from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    written = {byte: chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)}
    return frozenset(letter for byte, letter in written.items() if byte >= 0x80 or chr(byte).isalnum())
