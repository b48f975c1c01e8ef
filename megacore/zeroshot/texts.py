"""The texts of zero-shot evaluation: WikiText in windows, and LAMBADA's last words.

WikiText (Merity et al. 2016, arXiv:1609.07843) is one text, joined again as it was before its words
were divided: GPT-2 was measured on such text (Radford et al. 2019, section 3.1). The rules are
those of NVIDIA/Megatron-LM's zero-shot evaluation, in their order, so that perplexities can be
compared. LAMBADA (Paperno et al. 2016, arXiv:1606.06031) has passages whose last word only the
whole passage gives away.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.errors import ConfigError, DataFormatError
from megacore.tokenizer import Tokenizer

_INSIDE = r"{open}\s*([^{close}]*?)\s*{close}"
_PAIRS = (
    (r"\(", r"\)", "()"),
    (r"\[", r"\]", "[]"),
    ("{", "}", "{}"),
    ('"', '"', '""'),
    ("'", "'", "''"),
)
_BEFORE_PAIRS = (
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *((f" {sign} ", f"{sign} ") for sign in ":;.!?,"),
)
_AFTER_PAIRS = (
    *(("= " * (count - 1) + "=", "=" * count) for count in (4, 3, 2)),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


@dataclass(frozen=True)
class Window:
    """A stretch of tokens that is read at once; the last of the tokens after them are scored."""

    start: int
    """Of its first token."""
    stop: int
    """Behind its last token; the token at `stop` is the last one that it predicts."""
    scored: int
    """How many of its predictions count, the last ones."""


def check_windows(length: int, stride: int | None, positions: int | None = None) -> None:
    """Refuse windows that leave tokens out or are longer than the model's `positions`.

    Raises ConfigError.
    """
    if positions is not None and length > positions:
        raise ConfigError(
            f"seq_length is {length} and the model has {positions} positions: lower it to at most "
            f"{positions}"
        )
    if stride is not None and not 1 <= stride <= length:
        raise ConfigError(
            f"overlapping_eval is {stride}, but windows of {length} tokens begin 1 to {length} "
            "tokens apart: give one of these, or leave it out"
        )


def windows(tokens: int, length: int, stride: int | None = None) -> list[Window]:
    """Windows in which every token but the first is predicted once.

    It has as many tokens before it as there can be.

    All but the first window count their last `stride` predictions alone: each then has at least
    `length` - `stride` tokens before it, or all there are. They begin where those of
    NVIDIA/Megatron-LM's `--overlapping-eval` do.

    Args:
        tokens: of the text.
        length: of a window.
        stride: tokens between the starts of windows; None means `length`: they do not overlap.

    Raises:
        ConfigError: `stride` does not lie between 1 and `length`.
    """
    check_windows(length, stride)
    step = length if stride is None else stride
    found: list[Window] = []
    predicted = 0  # the token at this place is the last that a window so far predicts
    while predicted < tokens - 1:
        start = len(found) * step
        stop = min(start + length, tokens - 1)
        found.append(Window(start, stop, stop - predicted))
        predicted = stop
    return found


def detokenize_wikitext(text: str) -> str:
    """Join what WikiText has divided.

    Numbers, hyphens, punctuation, what is in brackets or quotes, headings.
    """
    for divided, joined in _BEFORE_PAIRS:
        text = text.replace(divided, joined)
    for opening, closing, signs in _PAIRS:
        inside = _INSIDE.format(open=opening, close=closing)
        text = re.sub(inside, rf"{signs[0]}\1{signs[1]}", text)
    for divided, joined in _AFTER_PAIRS:
        text = text.replace(divided, joined)
    return text


def count_words(text: str) -> int:
    """Words of WikiText as it comes: whatever spaces divide, the end of a line too."""
    return len(text.strip().split(" "))


@dataclass(frozen=True)
class WikiText:
    """The text as a model reads it."""

    tokens: npt.NDArray[np.integer[Any]]
    """[tokens] ids of the text whose words are joined again."""
    words: int
    """Of the text as it came."""


def read_wikitext(path: Path, tokenizer: Tokenizer) -> WikiText:
    """Read a split of WikiText, words divided by spaces. Raises DataFormatError."""
    text = read_text(path)
    tokens = tokenizer.encode(detokenize_wikitext(text))
    if len(tokens) < 2:
        raise DataFormatError(f"{path} has {len(tokens)} tokens: a perplexity needs at least 2")
    return WikiText(tokens, count_words(text))


def read_text(path: Path) -> str:
    """The content of a UTF-8 file, its line ends as they are. Raises DataFormatError."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataFormatError(f"{path} cannot be read: {error.strerror}: check the path") from error
    except UnicodeDecodeError as error:
        raise DataFormatError(
            f"{path} is not UTF-8 ({error.reason} at byte {error.start}): convert it"
        ) from error


@dataclass(frozen=True)
class Passage:
    """One passage as a model reads it."""

    context: npt.NDArray[np.integer[Any]]
    """Ids of all words but the last."""
    target: npt.NDArray[np.integer[Any]]
    """Ids of the last word, with the space before it."""


def read_lambada(path: Path, tokenizer: Tokenizer) -> list[Passage]:
    """Read passages as JSON Lines, their text under `text`. Raises DataFormatError."""
    pairs = [
        _divided(line, f"{path}:{number}")
        for number, line in enumerate(read_text(path).split("\n"), 1)
        if line.strip()
    ]
    if not pairs:
        raise DataFormatError(
            f"{path} holds no passage: give one JSON object with the key text per line"
        )
    contexts = tokenizer.encode_batch([context for context, _ in pairs])
    targets = tokenizer.encode_batch([f" {word}" for _, word in pairs])
    return [Passage(context, target) for context, target in zip(contexts, targets, strict=True)]


def _divided(line: str, place: str) -> tuple[str, str]:
    """The passage of a line without its last word, and that word."""
    try:
        text = json.loads(line)["text"]
        words = text.split()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataFormatError(
            f"{place} is no JSON object with a text under the key text: {line[:80]!r}"
        ) from error
    if len(words) < 2:
        raise DataFormatError(
            f"{place} has {len(words)} words: a passage needs at least 2, of which the last is "
            "asked"
        )
    return text[: text.rindex(words[-1])].strip(), words[-1]
