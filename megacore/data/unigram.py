"""The perplexity of a model that knows only how frequent each token is: what training has to beat."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.data.indexed_dataset import IndexedDataset
from megacore.data.splits import split_ranges
from megacore.errors import DataFormatError

_BLOCK_TOKENS = 1 << 24


class UnigramModel:
    """Add-one-smoothed frequencies of the train split's tokens."""

    def __init__(self, prefix: str | Path, split: str, vocab_size: int) -> None:
        """Count the train tokens of `PREFIX.bin`. Raises DataFormatError for an id beyond `vocab_size`."""
        self._prefix = str(prefix)
        self._vocab_size = vocab_size
        dataset = IndexedDataset(prefix)
        train = self._count(dataset.token_range(*split_ranges(split, len(dataset))["train"]))
        self._log_probability = np.log(train + 1.0) - np.log(train.sum() + vocab_size)

    def perplexity(self, tokens: npt.NDArray[Any]) -> float:
        """Exp of the mean loss on `tokens`, of any shape."""
        seen = self._count(tokens.reshape(-1))
        return float(np.exp(-(seen * self._log_probability).sum() / seen.sum()))

    def _count(self, tokens: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """How often each id occurs, shape [v]."""
        counts = np.zeros(self._vocab_size, np.int64)
        for start in range(0, len(tokens), _BLOCK_TOKENS):
            block = tokens[start : start + _BLOCK_TOKENS]
            if block.min() < 0 or block.max() >= self._vocab_size:
                raise DataFormatError(
                    f"{self._prefix}.bin holds the token id {block.max()}, but the vocabulary has {self._vocab_size} "
                    "entries: use the tokenizer that these tokens were made with"
                )
            counts += np.bincount(block, minlength=self._vocab_size)
        return counts
