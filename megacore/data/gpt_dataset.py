"""Samples for a causal language model: the maps applied to the tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.data._gather import Gatherer
from megacore.data.index_directory import MAP_NAMES, map_path
from megacore.data.index_options import Packing
from megacore.data.indexed_dataset import IndexedDataset
from megacore.data.samples import Batch, Indices, Rows, as_array, empty_batch
from megacore.errors import DataFormatError

_MAP_DTYPES = ("<i4", "<u4", "<i8")


class GPTDataset:
    """One split as an array of samples (s + 1 tokens: s inputs and their labels, shifted by one).

    Where a sample has fewer tokens the rest is -1: its last one with `add_extra_token` off, what whole documents leave,
    and the end of the last sample with `keeps_partial`. Everything is memory-mapped and checked when it is
    opened. Raises DataFormatError for maps that are missing, damaged, or made for other tokens or another seq_length.
    """

    def __init__(
        self,
        prefix: str | Path,
        index_directory: str | Path,
        split_name: str,
        seq_length: int,
        *,
        packing: Packing = "packed",
        add_extra_token: bool = True,
        keeps_partial: bool = False,
    ) -> None:
        """Open the tokens of `prefix` and the split's maps in `index_directory`.

        Args:
            prefix: path of the token files without .bin/.idx.
            index_directory: where the maps are.
            split_name: "train", "valid" or "test".
            seq_length: s, in tokens.
            packing: how the maps cut documents into samples, see `megacore.data.packing`.
            add_extra_token: whether a sample has a token beyond s, as the label of the last one.
            keeps_partial: whether the last sample may be shorter.
        """
        self.seq_length = seq_length
        self.width = seq_length + 1
        self.tokens = IndexedDataset(prefix)
        self._wanted = f"{seq_length} + {int(add_extra_token)}"
        self._paths = [map_path(index_directory, split_name, name) for name in MAP_NAMES]
        document_index, sample_index, self._shuffle_index = maps = [load_map(path) for path in self._paths]
        self._check(maps, whole_documents=packing != "packed")
        self._gatherer = Gatherer(
            tokens=self.tokens.tokens,
            pointers=self.tokens.pointers,
            document_index=document_index,
            sample_index=sample_index,
            shuffle_index=self._shuffle_index,
            seq_length=seq_length,
            extra=int(add_extra_token),
            whole_documents=packing != "packed",
            short_last=keeps_partial,
        )

    def __len__(self) -> int:
        return len(self._shuffle_index)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Sample `index` in shuffled order, shape [s + 1]. Raises IndexError."""
        sample: npt.NDArray[np.int64] = self.gather((index,))[0]
        return sample

    def gather(self, indices: Indices, out: Batch | None = None, rows: Rows | None = None) -> Batch:
        """Samples as one batch [b, s + 1]; see `MemberDataset`."""
        wanted = as_array(indices)
        if out is None:
            out = empty_batch(len(wanted), self.width)
        try:
            wrong = self._gatherer.gather(wanted, out, rows)
        except IndexError as error:
            raise IndexError(f"{self._paths[2]} has no sample {error}: it has {len(self)}") from None
        if wrong >= 0:
            raise DataFormatError(
                f"{self._paths[1]}: sample {wrong} does not have {self._wanted} tokens: the maps were built for "
                "another data.seq_length or other tokens; build them again"
            )
        return out

    def _check(self, maps: list[npt.NDArray[Any]], *, whole_documents: bool) -> None:
        """Types, shapes, and that no map points beyond what it refers to. Raises DataFormatError."""
        document, sample, shuffle = maps
        for path, values, dimensions in zip(self._paths, maps, (1, 2, 1), strict=True):
            check_form(path, values, dimensions)
        if sample.shape != (len(shuffle) + 1, 2):
            raise DataFormatError(
                f"{self._paths[1]} has shape {sample.shape}, but {self._paths[2].name} has {len(shuffle)} samples: "
                "build the index maps again"
            )
        # Samples of whole documents end at the beginning of the next document, which the last one lacks.
        positions = max(len(document) + whole_documents, 1)
        limits = (len(self.tokens), positions, len(shuffle))
        for path, values, limit in zip(self._paths, (document, sample[:, 0], shuffle), limits, strict=True):
            check_range(path, values, limit, f"it was not built for {self.tokens.prefix}")


def load_map(path: Path) -> npt.NDArray[Any]:
    """An index map, memory-mapped. Raises DataFormatError."""
    try:
        with np.errstate(over="raise"):  # of a shape whose size does not fit 64 bits
            return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)  # type: ignore[no-any-return]
    except FileNotFoundError as error:
        raise DataFormatError(f"{path} does not exist: build the index maps first") from error
    except Exception as error:  # NumPy reads a header as Python source, and passes on all that can go wrong there
        reason = " ".join(str(error).split())
        raise DataFormatError(f"{path} is not a readable index map ({reason}): build the index maps again") from error


def check_form(path: Path, values: npt.NDArray[Any], dimensions: int, dtypes: Sequence[str] = _MAP_DTYPES) -> None:
    """That a map is an array of one of its types. Raises DataFormatError."""
    if values.dtype not in map(np.dtype, dtypes) or values.ndim != dimensions or not values.flags.c_contiguous:
        raise DataFormatError(
            f"{path} is an array of {values.dtype} with shape {values.shape}, which is not that map's form: "
            "build the index maps again"
        )


def check_range(path: Path, values: npt.NDArray[Any], limit: int, reason: str) -> None:
    """That a map's values lie in 0 … limit-1. Raises DataFormatError."""
    if values.size and (values.min() < 0 or values.max() >= limit):
        raise DataFormatError(
            f"{path} points to {values.min()} … {values.max()} where only 0 … {limit - 1} exists: {reason}"
        )
