"""What data sets of whole sentences have in common: sentences, a map of samples, and the compiled part that reads both.

A sample is a function of the seed and its number alone: reading order, ranks and resumption change nothing.
"""

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megacore.data.index_directory import SENTENCE_MAP_NAME, map_path
from megacore.data.indexed_dataset import IndexedDataset
from megacore.data.samples import Batch, Indices, Rows, as_array, empty_batch
from megacore.data.sentence_maps import load_sentence_map
from megacore.errors import DataFormatError


class Sampler(Protocol):
    """The compiled part: `megacore.data._sentence_samples`."""

    def gather(
        self, indices: npt.NDArray[np.int64], out: npt.NDArray[np.int64], rows: npt.NDArray[np.int64] | None = None
    ) -> int:
        """Fill rows of `out`; returns -1, or the number of a sample that cannot be read."""
        ...


class SentenceDataset:
    """One split as an array of samples; what these are, subclasses say.

    Everything is memory-mapped and checked when it is opened. Raises DataFormatError for maps that are missing,
    damaged, or made for other sentences or another seq_length.
    """

    def __init__(
        self, prefix: str | Path, index_directory: str | Path, split_name: str, *, seq_length: int, special_tokens: int
    ) -> None:
        """Open the sentences of `prefix` and the split's map in `index_directory`.

        Args:
            prefix: path of the token files without .bin/.idx, a sequence per sentence.
            index_directory: where the map is.
            split_name: "train", "valid" or "test".
            seq_length: s, in tokens.
            special_tokens: how many of these a sample has besides its sentences.
        """
        self.seq_length = seq_length
        self.width = 0
        self.tokens = IndexedDataset(prefix)
        self._path = map_path(index_directory, split_name, SENTENCE_MAP_NAME)
        self._rows = load_sentence_map(index_directory, split_name, self.tokens, seq_length - special_tokens)
        self._sampler: Sampler

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Sample `index`, shape [width]. Raises IndexError."""
        sample: npt.NDArray[np.int64] = self.gather((index,))[0]
        return sample

    def gather(self, indices: Indices, out: Batch | None = None, rows: Rows | None = None) -> Batch:
        """Samples as one batch [b, width]; see `MemberDataset`."""
        wanted = as_array(indices)
        if out is None:
            out = empty_batch(len(wanted), self.width)
        try:
            wrong = self._sampler.gather(wanted, out, rows)
        except IndexError as error:
            raise IndexError(f"{self._path} has no sample {error}: it has {len(self)}") from None
        if wrong >= 0:
            raise DataFormatError(
                f"{self._path}: sample {wrong} cannot be read from {self.tokens.prefix}: it has too few sentences, or "
                "token ids that the vocabulary does not have; use the tokenizer that the tokens were made with, or "
                "build the index maps again"
            )
        return out
