"""Histogram of sequence lengths as an image file."""

import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megacore.artifact.files import workspace_errors
from megacore.errors import ConfigError, WorkspaceError
from megacore.inspect.tokens import (
    LengthBins,
    Lengths,
    LengthSummary,
    bin_lengths,
    summarize_lengths,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")

_BAR_COLOR = "#7f9fbf"
_MARK_COLOR = "#1f4e79"
_TOKENS_COLOR = "#c8501e"
_PER_OCTAVE = 4
_HEADROOM = 1.22
"""Height of the axis relative to the highest bar, with room for the labels of the marks."""

_RIGHT = 0.8
"""Fraction of the axis beyond which a mark's label is placed to its left."""


def check_drawable(path: Path) -> None:
    """Raise ConfigError if `draw_lengths` cannot write this kind of file."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"histogram {path}: pictures are written as {' or '.join(SUFFIXES)}, not as "
            f"{path.suffix or 'a name without a suffix'}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"histogram {path}: drawing needs the package matplotlib, which is not installed: `pip "
            "install matplotlib`"
        )


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
    check_drawable(path)
    from matplotlib import rc_context

    figure = lengths_figure(lengths, title)
    try:
        # A fixed salt makes the ids in an SVG file reproducible.
        with workspace_errors(path), rc_context({"svg.hashsalt": "megacore"}):
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise WorkspaceError(
            f"the picture {path} cannot be written ({error.strerror}): choose another path"
        ) from error
    return path


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
