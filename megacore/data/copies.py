"""Documents of held-out splits that are copies of training documents."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.data.index_options import IndexOptions, Mixture
from megacore.token_files.indexed_dataset import IndexedDataset

_EXAMPLES = 20


def split_copies(
    mixture: Mixture, options: IndexOptions, splits: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return for each held-out split the number of its documents that are also in the train split.

    Documents are equal if their tokens are. Empty ones, of one token at most, do not count. The
    rows are those of `megacore.corpus.contamination.shares`.
    """
    train = (digest for _, _, digest in _hashes(mixture, options, "train"))
    trained = np.unique(np.fromiter(train, np.uint64))
    rows = {}
    for name in splits:
        held_out = list(_hashes(mixture, options, name))
        copied = np.isin(np.array([digest for *_, digest in held_out], np.uint64), trained)
        count = int(copied.sum())
        rows[name] = {
            "items": len(held_out),
            "searched": len(held_out),
            "contaminated": count,
            "share": count / len(held_out) if held_out else None,
            "examples": [
                {"item": held_out[at][1], "tokens": held_out[at][0]}
                for at in np.flatnonzero(copied)[:_EXAMPLES].tolist()
            ],
        }
    return rows


def _hashes(mixture: Mixture, options: IndexOptions, split: str) -> Iterator[tuple[str, int, int]]:
    """Yield prefix and number of each document of a split, and the hash of its tokens."""
    import xxhash

    for member in mixture.of(split):
        dataset = IndexedDataset(member.prefix)
        for number, tokens in _documents(dataset, options, split):
            if len(tokens) > 1:
                # The same document of two sources may have tokens of different types.
                values = tokens.astype("<i4", copy=False).tobytes()
                yield str(member.prefix), number, xxhash.xxh3_64_intdigest(values)


def _documents(
    dataset: IndexedDataset, options: IndexOptions, split: str
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield the number and the tokens of each document of a split."""
    bounds = dataset.document_indices
    if options.sentences is None:  # splits divide sequences, which are documents
        bounds = np.arange(len(dataset) + 1)
    for number in range(*options.range_of(split, len(bounds) - 1)):
        yield number, dataset.token_range(int(bounds[number]), int(bounds[number + 1]))
