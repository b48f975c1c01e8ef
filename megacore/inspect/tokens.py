"""What a pair of token files holds: counts, sizes, lengths, the range of token ids, and its first documents."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megacore.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megacore.data.members import token_prefixes
from megacore.errors import DataFormatError
from megacore.inspect.lengths import LengthSummary, summarize_lengths

_BLOCK_BYTES = 1 << 24
"""What is read of `.bin` at a time."""
_BLOCK_ENTRIES = 1 << 20


@dataclass(frozen=True)
class TokenReport:
    """A pair of token files in numbers."""

    prefix: str
    dtype: str
    """NumPy's name of the type that tokens are stored in."""
    documents: int
    """Empty ones included."""
    empty_documents: int
    sequences: int
    tokens: int
    bin_bytes: int
    idx_bytes: int
    lengths: LengthSummary | None
    """Of the sequences; None when there are none."""
    smallest_id: int | None
    """None when there are no tokens, like the next."""
    largest_id: int | None


def find_prefixes(path: str | Path) -> tuple[str, ...]:
    """The token files that a path stands for, each as a path without .bin/.idx.

    It may be such a path, with or without the suffix, or a directory of the tokenize stage (which for several sources
    names more than one pair). Raises DataFormatError when there are none.
    """
    if Path(path).is_dir():
        return token_prefixes(path)
    name = str(path)
    for suffix in (".bin", ".idx"):
        name = name.removesuffix(suffix)
    if not idx_path(name).exists():
        found = sorted(str(other.with_suffix("")) for other in Path(name).parent.glob(f"{Path(name).name}*.idx"))[:3]
        hint = f": did you mean {' or '.join(found)}?" if found else ": give a pair of token files or its directory"
        raise DataFormatError(f"{idx_path(name)} does not exist{hint}")
    return (name,)


def describe(dataset: IndexedDataset) -> TokenReport:
    """Everything about a pair of token files; reads each token once, in bounded memory."""
    smallest, largest = id_range(dataset)
    return TokenReport(
        prefix=dataset.prefix,
        dtype=dataset.dtype.name,
        documents=dataset.documents,
        empty_documents=count_empty(dataset),
        sequences=len(dataset),
        tokens=len(dataset.tokens),
        bin_bytes=os.path.getsize(bin_path(dataset.prefix)),
        idx_bytes=os.path.getsize(idx_path(dataset.prefix)),
        lengths=summarize_lengths(dataset.lengths),
        smallest_id=smallest,
        largest_id=largest,
    )


def count_empty(dataset: IndexedDataset) -> int:
    """Documents without a sequence."""
    starts, empty = dataset.document_indices, 0
    for first in range(0, dataset.documents, _BLOCK_ENTRIES):
        block = starts[first : first + _BLOCK_ENTRIES + 1]
        empty += int(np.count_nonzero(block[1:] == block[:-1]))
    return empty


def id_range(dataset: IndexedDataset) -> tuple[int, int] | tuple[None, None]:
    """The smallest and largest token id; (None, None) without tokens.

    Reads the file rather than its map, whose pages would count as the process's memory. Raises DataFormatError.
    """
    path, ids = bin_path(dataset.prefix), np.empty(_BLOCK_BYTES // dataset.dtype.itemsize, dataset.dtype)
    smallest: int | None = None
    largest = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while size := file.readinto(ids.view(np.uint8).data):
                block = ids[: size // dataset.dtype.itemsize]
                low, high = int(block.min()), int(block.max())
                smallest, largest = (low, high) if smallest is None else (min(smallest, low), max(largest, high))
    except OSError as error:
        raise DataFormatError(f"{path} cannot be read: {error.strerror}") from error
    return (None, None) if smallest is None else (smallest, largest)


def document_tokens(dataset: IndexedDataset, document: int, limit: int | None = None) -> npt.NDArray[Any]:
    """The first `limit` tokens (default: all) of a document, its sequences joined. Raises IndexError."""
    if not 0 <= document < dataset.documents:
        raise IndexError(f"{dataset.prefix} has no document {document}: it has {dataset.documents}")
    first, last = dataset.document_indices[document : document + 2].tolist()
    return dataset.token_range(first, last)[:limit]


def document_of(dataset: IndexedDataset, sequence: int) -> int:
    """The document that a sequence belongs to; empty documents that begin at the same place come before it."""
    return int(np.searchsorted(dataset.document_indices, sequence, side="right")) - 1


def counted(number: int, noun: str) -> str:
    """A number with its noun, as in 1 sequence or 1,204 sequences."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
