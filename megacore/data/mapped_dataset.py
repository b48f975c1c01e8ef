"""What data sets of one pair of token files have in common: a map of samples, and the compiled part that reads them."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megacore.data.indexed_dataset import IndexedDataset
from megacore.data.samples import Batch, Indices, Rows, as_array, empty_batch
from megacore.errors import DataFormatError


class Sampler(Protocol):
    """A sampler of `megacore.data._compiled`."""

    def gather(
        self, indices: npt.NDArray[np.int64], out: npt.NDArray[np.int64], rows: npt.NDArray[np.int64] | None = None
    ) -> int:
        """Fill rows of `out`; returns -1, or the number of a sample that cannot be read. Raises IndexError."""
        ...


class MappedDataset(ABC):
    """One split as an array of samples; what these are, subclasses say."""

    _sampler: Sampler

    def __init__(self, prefix: str | Path, path: Path, *, seq_length: int, width: int) -> None:
        """Open the tokens.

        Args:
            prefix: path of the token files without .bin/.idx.
            path: of the map with an entry for each sample.
            seq_length: s, in tokens.
            width: ids of a row.
        """
        self.seq_length = seq_length
        self.width = width
        self.tokens = IndexedDataset(prefix)
        self._path = path

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Sample `index` in shuffled order, shape [width]. Raises IndexError."""
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
            raise DataFormatError(self._unreadable(wrong))
        return out

    @abstractmethod
    def _unreadable(self, sample: int) -> str:
        """Why a sample cannot be read, and what to do."""
