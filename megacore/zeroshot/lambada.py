"""LAMBADA (Paperno et al. 2016, arXiv:1606.06031): passages whose last word only the whole passage gives away."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.errors import DataFormatError
from megacore.tokenizer import Tokenizer
from megacore.zeroshot.wikitext import read_text


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
        _divided(line, f"{path}:{number}") for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()
    ]
    if not pairs:
        raise DataFormatError(f"{path} holds no passage: give one JSON object with the key text per line")
    contexts = tokenizer.encode_batch([context for context, _ in pairs])
    targets = tokenizer.encode_batch([f" {word}" for _, word in pairs])
    return [Passage(context, target) for context, target in zip(contexts, targets, strict=True)]


def _divided(line: str, place: str) -> tuple[str, str]:
    """The passage of a line without its last word, and that word."""
    try:
        text = json.loads(line)["text"]
        words = text.split()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataFormatError(f"{place} is no JSON object with a text under the key text: {line[:80]!r}") from error
    if len(words) < 2:
        raise DataFormatError(f"{place} has {len(words)} words: a passage needs at least 2, of which the last is asked")
    return text[: text.rindex(words[-1])].strip(), words[-1]
