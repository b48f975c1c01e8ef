"""PNG plots of a run: loss, perplexity, and the lengths of its documents."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tasks._run_history import RunHistory

LOSS_FILE = "loss.png"
PPL_FILE = "ppl.png"
LENGTHS_FILE = "lengths.png"

MOST_POINTS = 2000
"""Maximum number of points of a drawn curve."""

TRAIN_COLOR = "#7f9fbf"
SMOOTH_COLOR = "#1f4e79"
VALID_COLOR = "#c8501e"
_SMOOTH_SPAN = 0.01
_SMOOTH_LEAST = 300
_WIDE_RANGE = 30.0
_MARKED_POINTS = 60
MARGIN = 1.03
"""Length of the horizontal axis, relative to the last point."""


@dataclass
class Curve:
    """Values by iteration, in ascending order; each iteration has its first reported value.

    A report has consumed tokens in place of iterations.
    """

    iterations: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, points: Mapping[int, float]) -> "Curve":
        """Return the curve through these points."""
        iterations = sorted(points)
        return cls(iterations, [points[iteration] for iteration in iterations])

    def smoothed(self) -> "Curve":
        """Return the moving average over 2% of the points, or the curve itself for few points.

        The window is centred, and one-sided at the end. At the start, where a loss falls steeply,
        it is narrow.
        """
        count = len(self.values)
        if count < _SMOOTH_LEAST:
            return self
        import numpy as np

        half, index = int(_SMOOTH_SPAN * count), np.arange(count)
        sums = np.concatenate(([0.0], np.cumsum(self.values)))
        first = np.maximum(0, index - half)
        last = np.minimum(count, 2 * index - first + 1)
        average = (sums[last] - sums[first]) / (last - first)
        return Curve(self.iterations, average.tolist())

    def thinned(self, limit: int) -> "Curve":
        """Return at most `limit` of the points: the extremes of equal parts, and both ends.

        A spike of one iteration stays visible.
        """
        count = len(self.values)
        if count <= limit:
            return self
        import numpy as np

        values = np.asarray(self.values)
        parts = np.array_split(np.arange(1, count - 1), max(1, (limit - 2) // 2))
        extremes = {0, count - 1}
        for part in parts:
            low = int(part[0])
            inside = values[low : int(part[-1]) + 1]
            extremes |= {low + int(inside.argmin()), low + int(inside.argmax())}
        kept = sorted(extremes)
        return Curve([self.iterations[index] for index in kept], [self.values[i] for i in kept])


def plot_run(history: "RunHistory", directory: Path, run_name: str) -> list[Path]:
    """Write loss.png and ppl.png into `directory` and return their paths.

    The loss axis is linear (it is a logarithm already), the perplexity axis logarithmic.
    """
    train, valid = history.by_iteration("train_loss"), history.by_iteration("valid_loss")
    last = max([0, *train.iterations[-1:], *valid.iterations[-1:]])
    tokens = float(history.tokens_at([last])[0]) / last if last else 0.0
    loss, axes = _figure(f"{run_name}: loss", "lm loss (nats per token)", last, tokens)
    plot_smoothed(axes, train, "train")
    plot_validation(axes, valid, "validation", "{:.3f}")
    _legend(axes)
    ppl, axes = _figure(
        f"{run_name}: validation perplexity", "perplexity (log scale)", last, tokens
    )
    perplexities = history.by_iteration("valid_ppl")
    set_log_scale(axes, perplexities.values)
    plot_validation(axes, perplexities, "validation", "{:.1f}")
    _legend(axes)
    paths = [directory / LOSS_FILE, directory / PPL_FILE]
    for figure, path in zip((loss, ppl), paths, strict=True):
        figure.savefig(path)
    return paths


def _legend(axes: "Axes") -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right", frameon=False)


def set_log_scale(axes: "Axes", values: Sequence[float]) -> None:
    """Make the vertical axis logarithmic, with plain numbers that suit the range of `values`."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    values = values or [1.0]
    steps = (
        (1.0, 2.0, 5.0)
        if max(values) > _WIDE_RANGE * min(values)
        else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=steps))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _figure(title: str, label: str, last: int, per_iteration: float) -> "tuple[Figure, Axes]":
    """Create a figure of `last` iterations, with the consumed tokens above if they are known."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=(8.0, 4.8), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("iteration")
    axes.set_ylabel(label)
    axes.set_xlim(0, max(1, last) * MARGIN)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines["right"].set_visible(False)
    if per_iteration:
        top = axes.secondary_xaxis(
            "top",
            functions=(
                partial(operator.mul, per_iteration),
                partial(operator.mul, 1 / per_iteration),
            ),
        )
        top.set_xlabel("consumed tokens", loc="right")
        top.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
    return figure, axes


def plot_smoothed(axes: "Axes", curve: Curve, label: str) -> None:
    """Plot the curve pale and its moving average strong, each of at most MOST_POINTS points."""
    if not curve.values:
        return
    smooth = curve.smoothed()
    if smooth is not curve:
        raw = curve.thinned(MOST_POINTS)
        axes.plot(raw.iterations, raw.values, color=TRAIN_COLOR, linewidth=0.8, alpha=0.7)
    plot_line(axes, smooth.thinned(MOST_POINTS), label=label)


def plot_line(axes: "Axes", curve: Curve, *, label: str | None = None) -> None:
    """Plot a line; a single point, of which a line shows nothing, has a marker."""
    style = "o" if len(curve.values) == 1 else "-"
    axes.plot(
        curve.iterations,
        curve.values,
        style,
        color=SMOOTH_COLOR,
        linewidth=1.6,
        markersize=4,
        label=label,
    )


def plot_validation(
    axes: "Axes",
    curve: Curve,
    label: str,
    number: str,
    position: Callable[[float], str] = "{:,}".format,
) -> None:
    """Plot the curve and write its best value in the legend, where it covers no curve.

    `number` and `position` format the best value and its position.
    """
    if not curve.values:
        return
    marker: dict[str, Any] = (
        {"marker": "o", "markersize": 4} if len(curve.values) <= _MARKED_POINTS else {}
    )
    best = min(range(len(curve.values)), key=curve.values.__getitem__)
    value = number.format(curve.values[best])
    axes.plot(
        curve.iterations,
        curve.values,
        color=VALID_COLOR,
        linewidth=1.4,
        label=f"{label}, best {value} at {position(curve.iterations[best])}",
        **marker,
    )


def short_count(value: float) -> str:
    """Format a count with K, M, B or T: 2,457,600 as 2.5M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.0f}"
