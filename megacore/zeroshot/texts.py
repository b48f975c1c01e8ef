"""Texts of zero-shot evaluation: WikiText in windows and LAMBADA's passages.

WikiText (Merity et al. 2016, arXiv:1609.07843) is one tokenized text. It is detokenized first,
because GPT-2 was evaluated on detokenized text (Radford et al. 2019, section 3.1). The rules are
those of NVIDIA/Megatron-LM's zero-shot evaluation, in the same order, so that perplexities can be
compared. LAMBADA (Paperno et al. 2016, arXiv:1606.06031) has passages whose last word can be
guessed only from the complete passage.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.artifact.files import access_errors, regular
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
    """Range of tokens for one forward pass, of which the last predictions are scored."""

    start: int
    """Index of the first token."""
    stop: int
    """Index after the last token; the token at `stop` is the last one predicted."""
    scored: int
    """Number of predictions at the end that count."""


def check_windows(length: int, stride: int | None, positions: int | None = None) -> None:
    """Check that windows skip no tokens and fit the model's `positions`.

    Raises:
        ConfigError: if they do not.
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
    """Return windows that together predict every token but the first exactly once.

    After the first window only the last `stride` predictions of a window count. Each of them then
    has at least `length` - `stride` tokens of context, or all preceding ones. The windows start
    where those of NVIDIA/Megatron-LM's `--overlapping-eval` do.

    Args:
        tokens: number of tokens in the text.
        length: tokens per window.
        stride: tokens between the starts of windows; None means `length`, without overlap.

    Raises:
        ConfigError: if `stride` is not between 1 and `length`.
    """
    check_windows(length, stride)
    step = length if stride is None else stride
    result: list[Window] = []
    predicted = 0  # index of the last token that a window predicts so far
    while predicted < tokens - 1:
        start = len(result) * step
        stop = min(start + length, tokens - 1)
        result.append(Window(start, stop, stop - predicted))
        predicted = stop
    return result


def detokenize_wikitext(text: str) -> str:
    """Undo WikiText's tokenization.

    Joins numbers, hyphens, punctuation, brackets, quotes and headings.
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
    """Count the words of the original WikiText: the parts between spaces, including line ends."""
    return len(text.strip().split(" "))


@dataclass(frozen=True)
class WikiText:
    """WikiText as model input."""

    tokens: npt.NDArray[np.integer[Any]]
    """[tokens] ids of the detokenized text."""
    words: int
    """Number of words of the original text."""


def read_wikitext(path: Path, tokenizer: Tokenizer) -> WikiText:
    """Read a split of WikiText, with words separated by spaces.

    Raises:
        DataFormatError: if the file cannot be read or has fewer than 2 tokens.
    """
    text = read_text(path)
    tokens = tokenizer.encode(detokenize_wikitext(text))
    if len(tokens) < 2:
        raise DataFormatError(f"{path} has {len(tokens)} tokens: a perplexity needs at least 2")
    return WikiText(tokens, count_words(text))


def read_text(path: Path) -> str:
    """Read a UTF-8 file without translating line ends.

    Raises:
        DataFormatError: if the file cannot be read or is not UTF-8.
    """
    try:
        with access_errors(path):
            return regular(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise DataFormatError(f"{path} cannot be read: {error.strerror}: check the path") from error
    except UnicodeDecodeError as error:
        raise DataFormatError(
            f"{path} is not UTF-8 ({error.reason} at byte {error.start}): convert it"
        ) from error


@dataclass(frozen=True)
class Passage:
    """One LAMBADA passage as model input."""

    context: npt.NDArray[np.integer[Any]]
    """Ids of all words but the last."""
    target: npt.NDArray[np.integer[Any]]
    """Ids of the last word, with the space before it."""


def read_lambada(path: Path, tokenizer: Tokenizer) -> list[Passage]:
    """Read passages from JSON Lines with the text under the key `text`.

    Raises:
        DataFormatError: if the file cannot be read, has no passage or a damaged line.
    """
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


def _divided(line: str, where: str) -> tuple[str, str]:
    """Split a line's passage into the text before the last word, and the last word."""
    try:
        text = json.loads(line)["text"]
        words = text.split()
    except (RecursionError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataFormatError(
            f"{where} is no JSON object with a text under the key text: {line[:80]!r}"
        ) from error
    if len(words) < 2:
        raise DataFormatError(
            f"{where} has {len(words)} words: a passage needs at least 2, of which the last is "
            "predicted"
        )
    return text[: text.rindex(words[-1])].strip(), words[-1]
