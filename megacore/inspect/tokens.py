"""Statistics of token files: counts, sizes, the range of token ids, and sequence lengths.

The memory for the distribution of lengths does not grow with the number of sequences. The
distribution is also drawn as an image file.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megacore.errors import DataFormatError
from megacore.paths import exists, glob, is_dir
from megacore.token_files.indexed_dataset import (
    MEMBERS_NAME,
    TOKENS_NAMES,
    IndexedDataset,
    bin_path,
    idx_path,
    token_prefixes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_BLOCK = 1 << 20
"""Number of lengths or documents read at a time."""
_LOW_BITS = 16
"""Low bits of a length. A quantile is computed in two passes: over the upper, then the lower half
of the 32 bits."""
Lengths = npt.NDArray[np.int32]
_BLOCK_BYTES = 1 << 24
"""Bytes of `.bin` read at a time."""


@dataclass(frozen=True)
class LengthSummary:
    """Statistics of the lengths, in tokens, of at least one sequence."""

    sequences: int
    """Number of sequences."""
    tokens: int
    """Sum of the lengths."""
    shortest: int
    median: int
    """Median by nearest rank: the least length that half of the sequences do not exceed."""
    p95: int
    """95th percentile: the least length that 95 % of the sequences do not exceed."""
    longest: int

    @property
    def mean(self) -> float:
        """Mean number of tokens per sequence."""
        return self.tokens / self.sequences


@dataclass(frozen=True)
class LengthBins:
    """Histogram of lengths: bin i counts lengths of edges[i] … edges[i + 1] - 1 tokens."""

    edges: npt.NDArray[np.int64]
    """[bins + 1]: ascending edges."""
    sequences: npt.NDArray[np.int64]
    """[bins]: number of sequences."""
    tokens: npt.NDArray[np.int64]
    """[bins]: number of tokens of the sequences."""


@dataclass(frozen=True)
class TokenReport:
    """Statistics of a pair of token files."""

    prefix: str
    dtype: str
    """Name of NumPy's type in which tokens are stored."""
    documents: int
    """Number of documents, empty ones included."""
    empty_documents: int
    sequences: int
    tokens: int
    bin_bytes: int
    idx_bytes: int
    lengths: LengthSummary | None
    """Statistics of the sequence lengths; None if there are no sequences."""
    smallest_id: int | None
    """Smallest token id; None if there are no tokens (also `largest_id`)."""
    largest_id: int | None


def find_prefixes(
    path: str | Path, accepted: str = "a pair of token files or its directory"
) -> tuple[str, ...]:
    """Return the prefixes (paths without .bin/.idx) of the token files at a path.

    The path is that of a pair of token files, with or without the suffix, or a directory of the
    tokenize stage, which for several sources refers to several pairs. Raises DataFormatError if
    there are none; the message suggests `accepted`.
    """
    if is_dir(path):
        if not has_token_files(Path(path)):
            raise DataFormatError(
                f"{path} holds no token files of the tokenize stage: give {accepted}"
            )
        return token_prefixes(path)
    name = prefix_of(path)
    require_pair(name, accepted, path)
    return (name,)


def has_token_files(directory: Path) -> bool:
    """Return True for a directory of the tokenize stage."""
    return exists(directory / MEMBERS_NAME) or any(
        exists(idx_path(directory / name)) for name in TOKENS_NAMES
    )


def require_pair(prefix: str, accepted: str, path: str | Path | None = None) -> None:
    """Raise DataFormatError if there is no pair of token files at `prefix`.

    The message suggests pairs with similar names, else `accepted`.
    `path` is the path that the user gave, which is named if it does not exist; None means that of
    the .idx.
    """
    if exists(idx_path(prefix)):
        return
    similar = sorted(
        str(other.with_suffix(""))
        for other in glob(Path(prefix).parent, f"{escape(Path(prefix).name)}*.idx")
    )[:3]
    hint = f"did you mean {' or '.join(similar)}?" if similar else f"give {accepted}"
    absent = idx_path(prefix) if path is None or similar or os.path.lexists(path) else path
    raise DataFormatError(f"{absent} does not exist: {hint}")


def prefix_of(path: str | Path) -> str:
    """Return the path of a pair of token files without .bin or .idx."""
    return str(path).removesuffix(".bin").removesuffix(".idx")


def describe(dataset: IndexedDataset) -> TokenReport:
    """Compute statistics of a pair of token files, reading each token once in bounded memory."""
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
    """Return the number of documents without a sequence."""
    starts, empty = dataset.document_indices, 0
    for first in range(0, dataset.documents, _BLOCK):
        block = starts[first : first + _BLOCK + 1]
        empty += int(np.count_nonzero(block[1:] == block[:-1]))
    return empty


def id_range(dataset: IndexedDataset) -> tuple[int, int] | tuple[None, None]:
    """Return the smallest and largest token id, or (None, None) without tokens.

    Reads the file instead of a memory map, whose pages would count as memory of the process. Raises
    DataFormatError.
    """
    path = bin_path(dataset.prefix)
    ids = np.empty(_BLOCK_BYTES // dataset.dtype.itemsize, dataset.dtype)
    smallest: int | None = None
    largest = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while size := file.readinto(ids.view(np.uint8).data):
                block = ids[: size // dataset.dtype.itemsize]
                low, high = int(block.min()), int(block.max())
                smallest, largest = (
                    (low, high) if smallest is None else (min(smallest, low), max(largest, high))
                )
    except OSError as error:
        raise DataFormatError(f"{path} cannot be read: {error.strerror}") from error
    return (None, None) if smallest is None else (smallest, largest)


def document_tokens(
    dataset: IndexedDataset, document: int, limit: int | None = None
) -> npt.NDArray[Any]:
    """Return the first `limit` tokens (default: all) of a document, its sequences concatenated.

    Raises IndexError if there is no such document.
    """
    if not 0 <= document < dataset.documents:
        raise IndexError(f"{dataset.prefix} has no document {document}: it has {dataset.documents}")
    first, last = dataset.document_indices[document : document + 2].tolist()
    return dataset.token_range(first, last)[:limit]


def document_of(dataset: IndexedDataset, sequence: int) -> int:
    """Return the document that contains a sequence.

    Empty documents with the same start precede it.
    """
    return int(np.searchsorted(dataset.document_indices, sequence, side="right")) - 1


def summarize_lengths(lengths: Lengths) -> LengthSummary | None:
    """Return statistics of the sequence lengths, or None if there is no sequence."""
    if not len(lengths):
        return None
    shortest, longest, tokens = int(lengths[0]), int(lengths[0]), 0
    for block in blocks(lengths, _BLOCK):
        shortest, longest = min(shortest, int(block.min())), max(longest, int(block.max()))
        tokens += int(block.sum(dtype=np.int64))
    # Nearest rank, counted from 0: the ceil(q n)-th smallest length.
    ranks = [-(-len(lengths) * percent // 100) - 1 for percent in (50, 95)]
    median, p95 = ranked(lengths, ranks)
    return LengthSummary(len(lengths), tokens, shortest, median, p95, longest)


def ranked(lengths: Lengths, ranks: Sequence[int]) -> list[int]:
    """Return sorted(lengths)[rank] for each rank, without sorting."""
    high = np.zeros(1 << (31 - _LOW_BITS), np.int64)
    for block in blocks(lengths, _BLOCK):
        high += np.bincount(block >> _LOW_BITS, minlength=len(high))
    ends = np.cumsum(high)
    result = []
    for rank in ranks:
        bucket = int(np.searchsorted(ends, rank, side="right"))
        low = np.zeros(1 << _LOW_BITS, np.int64)
        for block in blocks(lengths, _BLOCK):
            inside = block[block >> _LOW_BITS == bucket]
            low += np.bincount(inside & ((1 << _LOW_BITS) - 1), minlength=len(low))
        before = int(ends[bucket] - high[bucket])
        result.append(
            (bucket << _LOW_BITS)
            + int(np.searchsorted(np.cumsum(low), rank - before, side="right"))
        )
    return result


def bin_lengths(lengths: Lengths, per_octave: int = 1) -> LengthBins:
    """Count lengths in `per_octave` bins for each doubling, from the shortest to the longest.

    With 1 the bins are 1, 2-3, 4-7, 8-15 …; lengths of 0, if any, have a separate bin.
    """
    summary = summarize_lengths(lengths)
    if summary is None:
        nothing = np.zeros(0, np.int64)
        return LengthBins(np.ones(1, np.int64), nothing, nothing)
    octaves = summary.longest.bit_length() + 1
    powers = 2.0 ** (np.arange(octaves * per_octave + 1) / per_octave)
    edges = np.unique(np.concatenate([[0], np.ceil(powers)]).astype(np.int64))
    first = int(np.searchsorted(edges, summary.shortest, side="right")) - 1
    last = int(np.searchsorted(edges, summary.longest, side="right"))
    edges = edges[first : last + 1]
    sequences, tokens = np.zeros(len(edges) - 1, np.int64), np.zeros(len(edges) - 1, np.int64)
    for block in blocks(lengths, _BLOCK):
        place = np.searchsorted(edges, block, side="right") - 1
        sequences += np.bincount(place, minlength=len(sequences))
        # Sums of doubles are exact up to 2^53, which no block of 2^20 lengths below 2^31 reaches.
        tokens += np.bincount(place, weights=block, minlength=len(tokens)).astype(np.int64)
    return LengthBins(edges, sequences, tokens)


def blocks(values: npt.NDArray[Any], size: int) -> Iterator[npt.NDArray[Any]]:
    """Yield blocks of `size` consecutive values; the last one may be smaller."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


_BAR_COLOR = "#7f9fbf"
_MARK_COLOR = "#1f4e79"
_TOKENS_COLOR = "#c8501e"
_PER_OCTAVE = 4
_HEADROOM = 1.22
"""Height of the axis relative to the highest bar, with room for the labels of the marks."""

_RIGHT = 0.8
"""Fraction of the axis beyond which a mark's label is placed to its left."""


def draw_lengths(lengths: Lengths, path: Path, title: str) -> Path:
    """Write the distribution of sequence lengths as an image and return its path.

    Bars are the share of the sequences in each bin (four per doubling of the length), the line is
    the share of their tokens; median, mean and 95th percentile are marked.

    Args:
        lengths: number of tokens of each sequence, [S].
        path: output file, .png or .svg.
        title: title of the image, such as the name of the data set.

    Raises:
        ConfigError: if the suffix is another one or matplotlib is not installed.
        WorkspaceError: if the file cannot be written.
    """
    from megacore.plan.draw import check_drawable, save_figure

    check_drawable(path, "histogram")
    return save_figure(lengths_figure(lengths, title), path)


def lengths_figure(lengths: Lengths, title: str) -> "Figure":
    """Return the figure that `draw_lengths` writes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(True, axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["right", "top"]].set_visible(False)
    axes.set_ylabel("share (%)")
    summary = summarize_lengths(lengths)
    if summary is None or not summary.tokens:
        axes.set_xlabel("tokens per sequence")
        axes.text(0.5, 0.5, "no tokens", transform=axes.transAxes, ha="center", color="#555555")
        return figure
    bins = bin_lengths(lengths, _PER_OCTAVE)
    _plot_shares(axes, bins, summary)
    empty = int(bins.sequences[0]) if bins.edges[0] == 0 else 0
    axes.set_xlabel(
        (
            f"tokens per sequence (log scale); {summary.sequences:,} sequences, {summary.tokens:,} "
            "tokens"
        )
        + (f"; {empty:,} without tokens are left of the axis" if empty else "")
    )
    _plot_marks(axes, summary)
    figure.legend(frameon=False, loc="outside lower right", ncols=2, fontsize=9)
    return figure


def _plot_shares(axes: "Axes", bins: LengthBins, summary: LengthSummary) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    first = int(bins.edges[0] == 0)  # a logarithmic axis cannot show lengths of 0
    edges = bins.edges[first:]
    sequences = 100 * bins.sequences[first:] / summary.sequences
    tokens = 100 * bins.tokens[first:] / summary.tokens
    axes.set_xscale("log", base=2)
    axes.bar(
        edges[:-1],
        sequences,
        np.diff(edges),
        align="edge",
        color=_BAR_COLOR,
        linewidth=0,
        label="of the sequences",
    )
    axes.stairs(
        tokens, edges, color=_TOKENS_COLOR, linewidth=1.4, label="of the tokens that they hold"
    )
    axes.set_xlim(edges[0] / 1.1, edges[-1] * 1.1)
    axes.set_ylim(0, max(sequences.max(), tokens.max()) * _HEADROOM)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=12))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _plot_marks(axes: "Axes", summary: LengthSummary) -> None:
    """Draw vertical lines at median, mean and 95th percentile, with labels below each other."""
    marks = [
        ("median", float(summary.median)),
        ("mean", summary.mean),
        ("95 %", float(summary.p95)),
    ]
    shortest, longest = axes.get_xlim()
    for row, (name, value) in enumerate(marks):
        if value < shortest:
            continue
        axes.axvline(value, color=_MARK_COLOR, linewidth=1.0, linestyle=(0, (4, 3)))
        right = math.log(value / shortest) > _RIGHT * math.log(longest / shortest)
        axes.annotate(
            f"{name} {value:,.0f}",
            (value, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if right else 4, -10 - 13 * row),
            textcoords="offset points",
            ha="right" if right else "left",
            color=_MARK_COLOR,
            fontsize=9,
            bbox={
                "boxstyle": "square,pad=0.15",
                "facecolor": "white",
                "edgecolor": "none",
                "alpha": 0.85,
            },
        )
