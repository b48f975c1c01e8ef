"""Data sets of samples: one pair of token files read through a map, and blends.

Compiled code reads the samples into arrays.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megacore.data.index_directory import (
    BLEND_MAP_NAMES,
    check_form,
    check_range,
    load_map,
    map_path,
)
from megacore.errors import DataFormatError
from megacore.token_files.indexed_dataset import IndexedDataset

Batch = npt.NDArray[np.int64]
"""Rows of ids [b, width]; -1 is padding, which counts in no loss.

GPT: s + 1 ids, inputs and their labels shifted by one. BERT: 3 s + 1 ids, tokens, labels (-1 where
nothing is predicted), segments, and the sentence label, 1 if the second segment does not continue
the first. T5: s + s_d ids, encoder tokens and decoder labels. `megacore.models.inputs` splits the
rows.
"""
Indices = Sequence[int] | npt.NDArray[np.integer[Any]]
Rows = npt.NDArray[np.int64]


class Dataset(Protocol):
    """Data set of samples in the order in which they are read."""

    seq_length: int
    """Number of tokens of a sample, s."""
    width: int
    """Number of ids of a row."""

    @property
    def sources(self) -> tuple[int, ...]:
        """Numbers of its sources among those of the run."""
        ...

    def source_places(self, indices: Indices) -> npt.NDArray[np.int64]:
        """Return for each sample the index of its source in `sources` [b]. Raises IndexError."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def gather(self, indices: Indices, out: Batch | None = None) -> Batch:
        """Read samples into a batch [b, width]; into `out` if it is not None.

        Raises IndexError, DataFormatError.
        """
        ...


class MemberDataset(Dataset, Protocol):
    """Data set of one pair of token files, which may be a member of other data sets."""

    def gather(self, indices: Indices, out: Batch | None = None, rows: Rows | None = None) -> Batch:
        """Read samples into a batch [b, width].

        Args:
            indices: indices of the samples in shuffled order.
            out: C-contiguous array to fill and return instead of a new one.
            rows: row of `out` for each index; None for the first rows.

        Raises:
            IndexError: if the split has no such sample.
            DataFormatError: if the maps do not belong to the tokens.
        """
        ...


def as_array(indices: Indices) -> npt.NDArray[np.int64]:
    """Return indices as an array for the compiled functions."""
    if isinstance(indices, range):
        return np.arange(indices.start, indices.stop, indices.step, dtype=np.int64)
    return np.ascontiguousarray(indices, dtype=np.int64)


def empty_batch(samples: int, width: int) -> Batch:
    """Return an uninitialized batch."""
    return np.empty((samples, width), np.int64)


class Sampler(Protocol):
    """Sampler of `megacore.data._compiled`."""

    def gather(
        self,
        indices: npt.NDArray[np.int64],
        out: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64] | None = None,
    ) -> int:
        """Fill rows of `out`; return -1, or the number of a sample that cannot be read.

        Raises IndexError.
        """
        ...


class MappedDataset(ABC):
    """Base class of data sets that read the samples of one split through a map."""

    _sampler: Sampler
    sources: tuple[int, ...] = (0,)

    def __init__(self, prefix: str | Path, path: Path, *, seq_length: int, width: int) -> None:
        """Open the tokens.

        Args:
            prefix: path of the token files without .bin/.idx.
            path: path of the map with an entry for each sample.
            seq_length: s, in tokens.
            width: number of ids of a row.
        """
        self.seq_length = seq_length
        self.width = width
        self.tokens = IndexedDataset(prefix)
        self._path = path

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    def source_places(self, indices: Indices) -> npt.NDArray[np.int64]:
        """Return 0 for each sample: there is one source."""
        return np.zeros(len(indices), np.int64)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Return sample `index` in shuffled order, shape [width]. Raises IndexError."""
        sample: npt.NDArray[np.int64] = self.gather((index,))[0]
        return sample

    def gather(self, indices: Indices, out: Batch | None = None, rows: Rows | None = None) -> Batch:
        """Read samples into a batch [b, width]; see `MemberDataset`."""
        positions = as_array(indices)
        if out is None:
            out = empty_batch(len(positions), self.width)
        try:
            wrong = self._sampler.gather(positions, out, rows)
        except IndexError as error:
            raise IndexError(f"{self._path} has no sample {error}: it has {len(self)}") from None
        if wrong >= 0:
            raise DataFormatError(self._unreadable(wrong))
        return out

    @abstractmethod
    def _unreadable(self, sample: int) -> str:
        """Return the message for a sample that cannot be read."""


class BlendedDataset:
    """Samples of one split of a blend.

    The maps of the blend give the member of each sample and its number in that member.

    Raises DataFormatError for maps that are missing, damaged, or refer to missing members.
    """

    def __init__(
        self,
        members: Sequence[MemberDataset],
        index_directory: str | Path,
        split_name: str,
        sources: Sequence[int],
    ) -> None:
        """Open the split's blend in `index_directory`.

        `members` are in the order in which the blend numbers them; there is at least one.
        `sources` are their numbers among the run's sources.
        """
        self.sources = tuple(sources)
        self.seq_length = members[0].seq_length
        self.width = members[0].width
        self._members = list(members)
        self._paths = [map_path(index_directory, split_name, name) for name in BLEND_MAP_NAMES]
        self._dataset_index, self._sample_index = (load_map(path) for path in self._paths)
        check_form(self._paths[0], self._dataset_index, 1, ("<i2",))
        check_form(self._paths[1], self._sample_index, 1)
        if len(self._dataset_index) != len(self._sample_index):
            raise DataFormatError(
                f"{self._paths[0]} has {len(self._dataset_index)} samples, but "
                f"{self._paths[1].name} {len(self._sample_index)}: build the index maps again"
            )
        check_range(
            self._paths[0],
            self._dataset_index,
            len(members),
            "it was not built for these data sets",
        )

    def __len__(self) -> int:
        return len(self._dataset_index)

    def source_places(self, indices: Indices) -> npt.NDArray[np.int64]:
        """Return the number of each sample's member. Raises IndexError."""
        positions = check_indices(indices, len(self), self._paths[0])
        return self._dataset_index[positions].astype(np.int64)

    def gather(self, indices: Indices, out: Batch | None = None) -> Batch:
        """Read samples into a batch [b, width]; into `out` if it is not None.

        Raises IndexError, DataFormatError.
        """
        positions = check_indices(indices, len(self), self._paths[0])
        out = empty_batch(len(positions), self.width) if out is None else out
        try:
            numbers, samples = self._dataset_index[positions], self._sample_index[positions]
            for number in np.unique(numbers):  # each member that has any of the samples
                rows = np.flatnonzero(numbers == number)
                self._members[number].gather(samples[rows], out, rows)
        except IndexError as error:
            raise DataFormatError(
                f"{self._paths[1]} does not belong to its members: {error}"
            ) from error
        return out


class EmptyDataset:
    """Split without a data set."""

    sources: tuple[int, ...] = ()

    def __init__(self, seq_length: int, width: int) -> None:
        self.seq_length = seq_length
        self.width = width

    def __len__(self) -> int:
        return 0

    def source_places(self, indices: Indices) -> npt.NDArray[np.int64]:
        """Return no places. Raises IndexError for any index."""
        return check_indices(indices, 0, "this split")

    def gather(self, indices: Indices, out: Batch | None = None) -> Batch:
        """Return an empty batch [0, width]. Raises IndexError for any index."""
        check_indices(indices, 0, "this split")
        return empty_batch(0, self.width) if out is None else out


def check_indices(indices: Indices, limit: int, owner: str | Path) -> npt.NDArray[np.int64]:
    """Return indices as an array. Raises IndexError for an index outside 0 … limit-1."""
    positions = as_array(indices)
    wrong = positions[(positions < 0) | (positions >= limit)]
    if wrong.size:
        raise IndexError(f"{owner} has no sample {wrong[0]}: it has {limit}")
    return positions
