"""WikiText (Merity et al. 2016, arXiv:1609.07843): a test split as one text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.errors import DataFormatError
from megacore.tokenizer import Tokenizer
from megacore.zeroshot.detokenize import count_words, detokenize_wikitext


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
        raise DataFormatError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}): convert it") from error
