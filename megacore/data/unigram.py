"""The perplexity of a model that knows only how frequent each token is: what training has to beat."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.errors import DataFormatError

_BLOCK_TOKENS = 1 << 24


class UnigramModel:
    """Add-one-smoothed frequencies of tokens."""

    def __init__(self, tokens: Iterable[tuple[str, npt.NDArray[Any]]], vocab_size: int) -> None:
        """Count tokens: of each pair of token files the prefix, and those of its tokens that count.

        Raises DataFormatError for an id beyond `vocab_size`.
        """
        self._vocab_size = vocab_size
        counts = np.zeros(vocab_size, np.int64)
        for prefix, part in tokens:
            counts += self._count(part, f"{prefix}.bin")
        self._log_probability = np.log(counts + 1.0) - np.log(counts.sum() + vocab_size)

    def perplexity(self, targets: Iterable[npt.NDArray[Any]]) -> float:
        """Exp of the mean loss on token ids, in parts of any shape; infinite without any."""
        seen = sum((self._count(part.reshape(-1), "the split") for part in targets), np.zeros(self._vocab_size, int))
        return float(np.exp(-(seen * self._log_probability).sum() / seen.sum())) if seen.any() else float("inf")

    def _count(self, tokens: npt.NDArray[Any], origin: str) -> npt.NDArray[np.int64]:
        """How often each id occurs, shape [v]."""
        counts = np.zeros(self._vocab_size, np.int64)
        for start in range(0, len(tokens), _BLOCK_TOKENS):
            block = tokens[start : start + _BLOCK_TOKENS]
            if block.min() < 0 or block.max() >= self._vocab_size:
                raise DataFormatError(
                    f"{origin} holds the token id {block.max()}, but the vocabulary has {self._vocab_size} "
                    "entries: use the tokenizer that these tokens were made with"
                )
            counts += np.bincount(block, minlength=self._vocab_size)
        return counts
