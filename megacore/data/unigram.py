"""The perplexity of a model that knows only how frequent each token is: what training has to beat."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.data.indexed_dataset import IndexedDataset
from megacore.data.splits import split_ranges
from megacore.errors import DataFormatError

_BLOCK_TOKENS = 1 << 24


def unigram_perplexity(prefix: str | Path, split: str, vocab_size: int) -> dict[str, float]:
    """Perplexity of the valid and test tokens under add-one-smoothed frequencies of the train tokens.

    A split without tokens is left out. Raises DataFormatError for an id beyond `vocab_size`.
    """
    dataset = IndexedDataset(prefix)
    counts = {
        name: _count(dataset, dataset.token_range(*bounds), vocab_size)
        for name, bounds in split_ranges(split, len(dataset)).items()
    }
    train = counts.pop("train")
    log_probability = np.log(train + 1.0) - np.log(train.sum() + vocab_size)
    return {
        name: float(np.exp(-(seen * log_probability).sum() / seen.sum())) for name, seen in counts.items() if seen.sum()
    }


def _count(dataset: IndexedDataset, tokens: npt.NDArray[Any], vocab_size: int) -> npt.NDArray[np.int64]:
    """How often each id occurs, shape [v]."""
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), _BLOCK_TOKENS):
        block = tokens[start : start + _BLOCK_TOKENS]
        if block.min() < 0 or block.max() >= vocab_size:
            raise DataFormatError(
                f"{dataset.prefix}.bin holds the token id {block.max()}, but the vocabulary has {vocab_size} entries: "
                "use the tokenizer that these tokens were made with"
            )
        counts += np.bincount(block, minlength=vocab_size)
    return counts
