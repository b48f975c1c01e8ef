"""Samples of seq_length + 1 tokens for a causal language model: the maps applied to the tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.data.index_maps import EXTRA_TOKENS, MAP_NAMES, map_path
from megacore.data.indexed_dataset import IndexedDataset
from megacore.errors import DataFormatError


class GPTDataset:
    """One split as an array of samples (s + 1 tokens: s inputs and their labels, shifted by one).

    Everything is memory-mapped and checked when it is opened. Raises DataFormatError for maps that are missing,
    damaged, or made for other tokens or another seq_length.
    """

    def __init__(self, prefix: str | Path, index_directory: str | Path, split_name: str, seq_length: int) -> None:
        """Open the tokens of `prefix` and the split's maps in `index_directory`; seq_length is s, in tokens."""
        self.seq_length = seq_length
        self.tokens = IndexedDataset(prefix)
        self._paths = [map_path(index_directory, split_name, name) for name in MAP_NAMES]
        self._document_index, self._sample_index, self._shuffle_index = (_load(path) for path in self._paths)
        self._check()

    def __len__(self) -> int:
        return len(self._shuffle_index)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Sample `index` in shuffled order, shape [s + 1]. Raises IndexError."""
        sample: npt.NDArray[np.int64] = self.gather([index])[0]
        return sample

    def gather(self, indices: Sequence[int] | npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Samples as one batch, shape [b, s + 1]. Raises IndexError for a sample the split does not have."""
        batch = np.empty((len(indices), self.seq_length + EXTRA_TOKENS), np.int64)
        for row, index in zip(batch, indices, strict=True):
            if not 0 <= index < len(self):
                raise IndexError(f"{self._paths[2]} has no sample {index}: it has {len(self)}")
            self._fill(row, int(self._shuffle_index[index]))
        return batch

    def _fill(self, row: npt.NDArray[np.int64], sample: int) -> None:
        """Copy the tokens of `sample`, which may span documents, into `row` [s + 1]."""
        (first, offset), (last, end) = self._sample_index[sample : sample + 2].tolist()
        filled = 0
        try:
            for position in range(first, last + 1):
                length = end + EXTRA_TOKENS - offset if position == last else None
                part = self.tokens.get(int(self._document_index[position]), offset, length)
                row[filled : filled + len(part)] = part  # ValueError where the sample is longer than the row
                filled += len(part)
                offset = 0
        except (IndexError, ValueError) as error:
            raise DataFormatError(self._wrong_sample(sample)) from error
        if filled != len(row):
            raise DataFormatError(self._wrong_sample(sample))

    def _wrong_sample(self, sample: int) -> str:
        return (
            f"{self._paths[1]}: sample {sample} does not have {self.seq_length} + {EXTRA_TOKENS} tokens: the maps were "
            "built for another data.seq_length or other tokens; build them again"
        )

    def _check(self) -> None:
        """Types, shapes, and that no map points beyond what it refers to. Raises DataFormatError."""
        document, sample, shuffle = self._document_index, self._sample_index, self._shuffle_index
        for path, values, dimensions in zip(self._paths, (document, sample, shuffle), (1, 2, 1), strict=True):
            if values.dtype.kind not in "iu" or values.ndim != dimensions:
                raise DataFormatError(
                    f"{path} is an array of {values.dtype} with shape {values.shape}, which is not that map's form: "
                    "build the index maps again"
                )
        if sample.shape != (len(shuffle) + 1, 2):
            raise DataFormatError(
                f"{self._paths[1]} has shape {sample.shape}, but {self._paths[2].name} has {len(shuffle)} samples: "
                "build the index maps again"
            )
        limits = (len(self.tokens), max(len(document), 1), len(shuffle))
        for path, values, limit in zip(self._paths, (document, sample[:, 0], shuffle), limits, strict=True):
            if values.size and (values.min() < 0 or values.max() >= limit):
                raise DataFormatError(
                    f"{path} points to {values.min()} … {values.max()} where only 0 … {limit - 1} exists: "
                    f"it was not built for {self.tokens.prefix}"
                )


def _load(path: Path) -> npt.NDArray[Any]:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except FileNotFoundError as error:
        raise DataFormatError(f"{path} does not exist: build the index maps first") from error
    except (OSError, ValueError, EOFError, SyntaxError) as error:
        raise DataFormatError(f"{path} is not a readable index map ({error}): build the index maps again") from error
