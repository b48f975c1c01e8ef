"""Texts of zero-shot evaluation: WikiText in windows, LAMBADA's passages, and passkeys.

WikiText (Merity et al. 2016, arXiv:1609.07843) is one tokenized text. It is detokenized first,
because GPT-2 was evaluated on detokenized text (Radford et al. 2019, section 3.1). The rules are
those of NVIDIA/Megatron-LM's zero-shot evaluation, in the same order, so that perplexities can be
compared. LAMBADA (Paperno et al. 2016, arXiv:1606.06031) has passages whose last word can be
guessed only from the complete passage. A passkey is a number hidden in filler text of any length
(Mohtashami and Jaggi 2023, arXiv:2305.16300, section 4.2); the prompts are made here.
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.artifact.files import access_errors, regular
from megacore.config.train import PasskeyConfig
from megacore.errors import ConfigError, DataFormatError
from megacore.tokenizer import Tokenizer
from megacore.tokenizer.vocabulary import special_tokens

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
    """Read a UTF-8 file without byte order mark, and without translating line ends.

    Raises:
        DataFormatError: if the file cannot be read or is not UTF-8.
    """
    try:
        with access_errors(path):
            return regular(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataFormatError(f"{path} cannot be read: {error.strerror}: check the path") from error
    except UnicodeDecodeError as error:
        raise DataFormatError(
            f"{path} is not UTF-8 ({error.reason} at byte {error.start}): convert it"
        ) from error


def wikitext_items(path: Path) -> tuple[str, ...]:
    """Return the detokenized paragraphs of a split of WikiText. Raises DataFormatError."""
    lines = detokenize_wikitext(read_text(path)).split("\n")
    return tuple(line for line in lines if line.strip())


def lambada_items(path: Path) -> tuple[str, ...]:
    """Return LAMBADA's passages, each with its last word. Raises DataFormatError."""
    return tuple(" ".join(pair) for pair in _divided_passages(path))


def _divided_passages(path: Path) -> list[tuple[str, str]]:
    """Return the text before the last word, and the last word, of each passage."""
    return [
        _divided(line, f"{path}:{number}")
        for number, line in enumerate(read_text(path).split("\n"), 1)
        if line.strip()
    ]


@dataclass(frozen=True)
class Passage:
    """One LAMBADA passage as model input."""

    context: npt.NDArray[np.integer[Any]]
    """Ids of all words but the last."""
    target: npt.NDArray[np.integer[Any]]
    """Ids of the last word, with the space before it, and of any text that shares a token with it;
    empty if the tokenizer has no token for it, or only the one for unknown text."""


def read_lambada(path: Path, tokenizer: Tokenizer) -> list[Passage]:
    """Read passages from JSON Lines with the text under the key `text`.

    Raises:
        DataFormatError: if the file cannot be read, has no passage or a damaged line, or if the
            tokenizer has no token for the last word of any passage.
    """
    pairs = _divided_passages(path)
    if not pairs:
        raise DataFormatError(
            f"{path} holds no passage: give one JSON object with the key text per line"
        )
    contexts = tokenizer.encode_batch([context for context, _ in pairs])
    wholes = tokenizer.encode_batch([" ".join(pair) for pair in pairs])
    unknown = special_tokens(tokenizer).unk
    passages = [
        _passage(tokenizer, unknown, context, whole)
        for context, whole in zip(contexts, wholes, strict=True)
    ]
    if not any(len(passage.target) for passage in passages):
        raise DataFormatError(
            f"the tokenizer has no token for the last words of the {len(passages):,} passages in "
            f"{path}: give passages in the language of the model"
        )
    return passages


def _passage(
    tokenizer: Tokenizer,
    unknown: int | None,
    context: npt.NDArray[np.integer[Any]],
    whole: npt.NDArray[np.integer[Any]],
) -> Passage:
    """Divide a passage where its ids begin to differ from those of its context.

    The last word is not encoded separately, because some tokenizers prepend a space to each text.
    The first id stays in the context, because nothing predicts it.
    """
    start = max(1, _shared_start(context, whole))
    known = whole[start:] if unknown is None else whole[start:][whole[start:] != unknown]
    if not tokenizer.decode(known).strip():  # without the word, or only its space
        start = len(whole)
    return Passage(whole[:start], whole[start:])


def _divided(line: str, where: str) -> tuple[str, str]:
    """Split a line's passage into the text before the last word, and the last word."""
    try:
        text = json.loads(line)["text"]
        text.encode()  # refuses half of a surrogate pair
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


_TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I "
    "will quiz you about the important information there."
)
_FILLER = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
_HIDDEN = "The pass key is {number}. Remember it. {number} is the pass key."
_QUESTION = "What is the pass key? The pass key is"
_NUMBERS = range(10000, 100000)
_MEASURED = 20 * len(_FILLER)
"""Sentences by which the tokens of a sentence are measured."""


@dataclass(frozen=True)
class Passkey:
    """One prompt of the passkey test, with the numbers that may follow it."""

    prompt: npt.NDArray[np.integer[Any]]
    """Ids up to the number."""
    numbers: tuple[npt.NDArray[np.integer[Any]], ...]
    """Ids of each candidate, the hidden number first."""

    @property
    def tokens(self) -> int:
        """Tokens of the prompt with its longest candidate."""
        return len(self.prompt) + max(map(len, self.numbers))


def check_passkeys(tokenizer: Tokenizer, config: PasskeyConfig, positions: int) -> None:
    """Check that every prompt fits the model's `positions` and its own length.

    Raises:
        ConfigError: if a length exceeds `positions` or is too short for a prompt, or if the
            tokenizer cannot tell numbers apart.
    """
    for length in config.lengths:
        if length > positions:
            raise ConfigError(
                f"the passkey test has the length {length} and the model has {positions} "
                f"positions: lower it to at most {positions}"
            )
        for depth in config.depths:
            _bare_passkeys(tokenizer, config, length, depth)


def make_passkeys(
    tokenizer: Tokenizer, config: PasskeyConfig, length: int, depth: float
) -> list[Passkey]:
    """Make the prompts of one length and depth, which depend only on the arguments.

    Each prompt has as many sentences of filler as fit into `length` tokens.

    Raises:
        ConfigError: see `check_passkeys`.
    """
    rows, passkeys = _bare_passkeys(tokenizer, config, length, depth)
    most = _fitting_sentences(tokenizer, rows[0], length, depth)
    for row, numbers in enumerate(rows):
        for sentences in range(most, 0, -1):  # the number of the first row may have fewer tokens
            passkey = _passkey(tokenizer, numbers, sentences, depth)
            if passkey.tokens <= length:
                passkeys[row] = passkey
                break
    return passkeys


def _bare_passkeys(
    tokenizer: Tokenizer, config: PasskeyConfig, length: int, depth: float
) -> tuple[list[list[int]], list[Passkey]]:
    """Draw the candidates of each prompt, and make the prompts without filler.

    Raises ConfigError if one has more than `length` tokens, or two candidates the same tokens.
    """
    draws = random.Random(f"{config.seed} {length} {depth:g}")
    rows = [draws.sample(_NUMBERS, config.candidates) for _ in range(config.prompts)]
    passkeys = [_passkey(tokenizer, numbers, 0, depth) for numbers in rows]
    longest = max(passkey.tokens for passkey in passkeys)
    if longest > length:
        raise ConfigError(
            f"the passkey test has the length {length}, but a prompt without filler has {longest} "
            f"tokens with this tokenizer: give lengths of at least {longest}"
        )
    for numbers, passkey in zip(rows, passkeys, strict=True):
        if len({tuple(ids.tolist()) for ids in passkey.numbers}) < len(numbers):
            raise ConfigError(
                f"the tokenizer has the same tokens for two of the numbers {numbers}: a passkey "
                "test needs a vocabulary with digits"
            )
    return rows, passkeys


def _fitting_sentences(
    tokenizer: Tokenizer, numbers: Sequence[int], length: int, depth: float
) -> int:
    """Return the largest number of filler sentences of a prompt of at most `length` tokens."""

    def tokens(sentences: int) -> int:
        return _passkey(tokenizer, numbers, sentences, depth).tokens

    shortest = tokens(0)
    per_sentence = max(1.0, (tokens(_MEASURED) - shortest) / _MEASURED)
    sentences = int((length - shortest) / per_sentence)
    while sentences > 0 and tokens(sentences) > length:
        sentences -= 1
    while sentences < length and tokens(sentences + 1) <= length:
        sentences += 1
    return sentences


def _passkey(tokenizer: Tokenizer, numbers: Sequence[int], sentences: int, depth: float) -> Passkey:
    """Make a prompt that hides the first of `numbers` among a number of filler sentences."""
    filler = [_FILLER[number % len(_FILLER)] for number in range(sentences)]
    before = round(depth * sentences)
    parts = (
        _TASK,
        " ".join(filler[:before]),
        _HIDDEN.format(number=numbers[0]),
        " ".join(filler[before:]),
        _QUESTION,
    )
    prompt, question, *answers = tokenizer.encode_batch(
        [
            "\n".join(filter(None, parts)),
            _QUESTION,
            *(f"{_QUESTION} {number}" for number in numbers),
        ]
    )
    # The space before a number may be a token of the question's end in some vocabularies.
    shared = min(_shared_start(question, answer) for answer in answers)
    end = len(prompt) - (len(question) - shared)
    return Passkey(prompt[:end], tuple(answer[shared:] for answer in answers))


def _shared_start(left: npt.NDArray[np.integer[Any]], right: npt.NDArray[np.integer[Any]]) -> int:
    """Return the number of equal ids at the beginning of both."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length
