"""Several data sets read as one: blended by the maps of a blend, or one after the other."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.data.index_directory import BLEND_MAP_NAMES, map_path
from megacore.data.map_files import check_form, check_range, load_map
from megacore.data.samples import Batch, Indices, MemberDataset, as_array, empty_batch
from megacore.errors import DataFormatError


class BlendedDataset:
    """One split of a blend: for each sample the maps say which member it comes from and which of its samples it is.

    Raises DataFormatError for maps that are missing or damaged, or name members that are not there.
    """

    def __init__(self, members: Sequence[MemberDataset], index_directory: str | Path, split_name: str) -> None:
        """Open the split's blend in `index_directory`; `members`, at least one, in the order of its numbers."""
        self.seq_length = members[0].seq_length
        self.width = members[0].width
        self._members = list(members)
        self._paths = [map_path(index_directory, split_name, name) for name in BLEND_MAP_NAMES]
        self._dataset_index, self._sample_index = (load_map(path) for path in self._paths)
        check_form(self._paths[0], self._dataset_index, 1, ("<i2",))
        check_form(self._paths[1], self._sample_index, 1)
        if len(self._dataset_index) != len(self._sample_index):
            raise DataFormatError(
                f"{self._paths[0]} has {len(self._dataset_index)} samples, but {self._paths[1].name} "
                f"{len(self._sample_index)}: build the index maps again"
            )
        check_range(self._paths[0], self._dataset_index, len(members), "it was not built for these data sets")

    def __len__(self) -> int:
        return len(self._dataset_index)

    def gather(self, indices: Indices, out: Batch | None = None) -> Batch:
        """Samples as one batch [b, width], in `out` if it is given. Raises IndexError, DataFormatError."""
        wanted = check_indices(indices, len(self), self._paths[0])
        out = empty_batch(len(wanted), self.width) if out is None else out
        try:
            gather_members(self._members, self._dataset_index[wanted], self._sample_index[wanted], out)
        except IndexError as error:
            raise DataFormatError(f"{self._paths[1]} does not belong to its members: {error}") from error
        return out


class ConcatDataset:
    """Data sets one after the other, each sample once; of nothing it is empty."""

    def __init__(self, members: Sequence[MemberDataset], seq_length: int, width: int) -> None:
        """`members` in order."""
        self.seq_length = seq_length
        self.width = width
        self._members = list(members)
        self._starts = np.fromiter(accumulate(map(len, members), initial=0), np.int64, len(members) + 1)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def gather(self, indices: Indices, out: Batch | None = None) -> Batch:
        """Samples as one batch [b, width], in `out` if it is given. Raises IndexError, DataFormatError."""
        wanted = check_indices(indices, len(self), "this split")
        out = empty_batch(len(wanted), self.width) if out is None else out
        numbers = np.searchsorted(self._starts, wanted, side="right") - 1
        gather_members(self._members, numbers, wanted - self._starts[numbers], out)
        return out


def check_indices(indices: Indices, limit: int, owner: str | Path) -> npt.NDArray[np.int64]:
    """Indices as an array. Raises IndexError for one that is not in 0 … limit-1."""
    wanted = as_array(indices)
    wrong = wanted[(wanted < 0) | (wanted >= limit)]
    if wrong.size:
        raise IndexError(f"{owner} has no sample {wrong[0]}: it has {limit}")
    return wanted


def gather_members(
    members: Sequence[MemberDataset], numbers: npt.NDArray[Any], samples: npt.NDArray[np.int64], out: Batch
) -> None:
    """Read sample `samples[i]` of member `numbers[i]` into row i of `out`: one call for each member that has any."""
    for number in np.unique(numbers):
        rows = np.flatnonzero(numbers == number)
        members[number].gather(samples[rows], out, rows)
