"""Drawings of a pipeline schedule with its bubble, and of the layouts of a search."""

import importlib.util
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megacore.artifact.files import replace_file, workspace_errors
from megacore.errors import ConfigError, WorkspaceError
from megacore.pipeline_parallel.schedules import Direction, Span, Timeline
from megacore.plan.memory import GIB
from megacore.plan.search_result import FRONT, SearchResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png")

_COLORS = {
    Direction.FORWARD: (0.122, 0.306, 0.475),
    Direction.BACKWARD: (0.784, 0.369, 0.118),
    Direction.WEIGHTS: (0.243, 0.494, 0.318),
}
"""RGB colors of the first chunk's passes; later chunks have lighter shades."""
_LIGHTEST = 0.58
"""Fraction of white in the color of the last chunk."""
_IDLE_COLOR = "#f0f0f0"
_IDLE_LINES = "#c9c9c9"
_BAR = 0.82
"""Height of a bar relative to its row."""
_GAPS = (0.1, 0.7)
"""Gap between boxes: relative to the shortest box, and maximum in points."""
_ROW_INCHES = 0.42
_BOX_INCHES = 0.2
"""Width of the shortest pass, if the figure stays within its limits."""
_WIDTHS = (8.0, 32.0)
_MARGIN_INCHES = 1.0
_LEGEND_INCHES = 1.6
"""Width of a legend entry."""
_TEXT_INCHES = 0.34
"""Height of the text between axis and legend."""
_DIGIT_WIDTH = 0.7
"""Width of a digit, including its share of the space around the number, relative to the font
size."""
_FONT_SIZES = (4.0, 8.0)
_SHOWN = 4.0
"""Memory of a device, relative to the most that a layout needs, to which the chart shows it."""


def draw(timeline: Timeline, path: Path, name: str) -> Path:
    """Draw a schedule over time and return the path of the picture, an .svg or .png.

    The picture has a row per pipeline stage. Forward and backward passes have two colors, with a
    shade per chunk. Each box has the number of its micro batch if it fits, and idle time is
    hatched. The title has pp, v, m and the bubble.

    Raises:
        ConfigError: the suffix is not supported, or matplotlib is not installed.
        WorkspaceError: the file cannot be written.
    """
    check_drawable(path)
    return save_figure(schedule_figure(timeline, name), path)


def draw_search(result: SearchResult, path: Path, name: str) -> Path:
    """Draw the simulated layouts of a search with `front`, and return the path of the picture.

    The picture has a point for each layout, at its time and its memory. The layouts of which no
    other is as fast with as little memory (the Pareto front) are connected and named. Raises the
    errors of `draw`.
    """
    check_drawable(path, "--chart")
    return save_figure(search_figure(result, name), path)


def save_figure(figure: "Figure", path: Path) -> Path:
    """Write a figure and return its path. Raises WorkspaceError."""
    from matplotlib import rc_context

    picture = io.BytesIO()
    try:
        # A fixed salt keeps the ids of equal pictures equal.
        with (
            workspace_errors(path, "choose another path", only_writes=True),
            rc_context({"svg.hashsalt": "megacore"}),
        ):
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(picture, format=path.suffix[1:], metadata=metadata)
            replace_file(path, picture.getvalue())
    except OSError as error:
        raise WorkspaceError(
            f"the picture {path} cannot be written ({error.strerror}): choose another path"
        ) from error
    return path


def check_drawable(path: Path, option: str = "--draw") -> None:
    """Raise ConfigError if the option `option` cannot write this type of file."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"{option} {path}: pictures are written as {' or '.join(SUFFIXES)}, not as "
            f"{path.suffix or 'a name without a suffix'}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"{option} needs the package matplotlib, which is not installed: "
            "`pip install matplotlib`"
        )


def search_figure(
    result: SearchResult, name: str, marks: Mapping[str, tuple[float, float]] | None = None
) -> "Figure":
    """Return the figure that `draw_search` writes.

    Args:
        result: result of `search` with `front`.
        name: name of the configuration.
        marks: further points by their names: bytes of memory, and seconds.
    """
    from matplotlib.figure import Figure

    front = result.front
    figure = Figure(figsize=(9.0, 5.5 + 0.18 * len(front)), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    others = [each for each in result.evaluated if each not in front]
    axes.scatter(
        [each.memory / GIB for each in others],
        [each.seconds for each in others],
        color=_IDLE_LINES,
        label="other simulated layouts",
    )
    axes.plot(
        [each.memory / GIB for each in front],
        [each.seconds for each in front],
        color=_COLORS[Direction.FORWARD],
        marker="o",
        label="Pareto front",
    )
    for number, each in enumerate(front, 1):
        axes.annotate(
            str(number),
            (each.memory / GIB, each.seconds),
            xytext=(5, 5),
            textcoords="offset points",
            fontweight="bold",
        )
    for label, (memory, seconds) in (marks or {}).items():
        axes.plot([memory / GIB], [seconds], "D", label=label)
    machine = result.machine
    if machine.memory_gib * GIB <= _SHOWN * max(each.memory for each in result.evaluated):
        axes.axvline(machine.memory_gib, color=_COLORS[Direction.BACKWARD], linestyle="--")
    axes.set_title(f"{name} on {result.ranks:,} x {machine.name}", loc="left", fontweight="bold")
    names = "\n".join(f"{number}  {each.choice.name}" for number, each in enumerate(front, 1))
    axes.set_xlabel(
        f"memory of the rank that needs most, of {machine.memory_gib:.4g} GiB\n\n{names}\n\n"
        f"{len(result.evaluated)} of {result.total:,} candidates are simulated: layouts of more "
        f"than {FRONT:g} times the least time may need less memory",
        loc="left",
        fontsize=9,
    )
    axes.set_ylabel("seconds of an iteration", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return figure


def schedule_figure(timeline: Timeline, name: str) -> "Figure":
    """Return the figure that `draw` writes."""
    from matplotlib.figure import Figure

    spans = [span for row in timeline.spans for span in row]
    shortest = min(span.end - span.start for span in spans)
    width = min(
        max(_WIDTHS[0], _MARGIN_INCHES + _BOX_INCHES * timeline.makespan / shortest), _WIDTHS[1]
    )
    stages = len(timeline.spans)
    figure = Figure(figsize=(width, 1.7 + _ROW_INCHES * stages), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    _plot_idle(axes, timeline)
    points = 72 * (width - _MARGIN_INCHES) / timeline.makespan
    gap = min(_GAPS[1], _GAPS[0] * shortest * points)
    for direction in Direction:
        for chunk in range(timeline.chunks):
            _plot_passes(axes, timeline, direction, chunk, gap)
    digits = len(str(max(span.work.micro_batch for span in spans)))
    for stage, row in enumerate(timeline.spans):
        for span in row:
            _write_number(axes, stage, span, timeline.chunks, points, digits)
    _label(figure, axes, timeline, name)
    return figure


def _plot_idle(axes: "Axes", timeline: Timeline) -> None:
    """Plot each row over the whole time as idle; the passes are drawn over it."""
    for stage in range(len(timeline.spans)):
        axes.broken_barh(
            [(0, timeline.makespan)],
            (stage - _BAR / 2, _BAR),
            facecolor=_IDLE_COLOR,
            edgecolor=_IDLE_LINES,
            hatch="////",
            linewidth=0,
            label="idle" if stage == 0 else None,
        )


def _plot_passes(
    axes: "Axes", timeline: Timeline, direction: Direction, chunk: int, gap: float
) -> None:
    label: str | None = (
        f"{direction.value}, chunk {chunk}" if timeline.chunks > 1 else direction.value
    )
    for stage, row in enumerate(timeline.spans):
        bars = [
            (span.start, span.end - span.start)
            for span in row
            if span.work.direction is direction and span.work.chunk == chunk
        ]
        if bars:
            color = _shade(direction, chunk, timeline.chunks)
            axes.broken_barh(
                bars,
                (stage - _BAR / 2, _BAR),
                facecolor=color,
                edgecolor="white",
                linewidth=gap,
                label=label,
            )
            label = None


def _write_number(
    axes: "Axes", stage: int, span: Span, chunks: int, points: float, digits: int
) -> None:
    """Write the number of the micro batch into its box if `digits` digits fit.

    A unit of time is `points` points wide.
    """
    size = min((span.end - span.start) * points / (digits * _DIGIT_WIDTH), _FONT_SIZES[1])
    if size < _FONT_SIZES[0]:
        return
    dark = _luminance(_shade(span.work.direction, span.work.chunk, chunks)) < 0.5
    axes.text(
        (span.start + span.end) / 2,
        stage,
        str(span.work.micro_batch),
        ha="center",
        va="center_baseline",
        fontsize=size,
        color="white" if dark else "black",
    )


def _label(figure: "Figure", axes: "Axes", timeline: Timeline, name: str) -> None:
    stages, chunks = len(timeline.spans), timeline.chunks
    micro_batches = 1 + max(span.work.micro_batch for span in timeline.spans[0])
    formula = "" if timeline.delayed else "(pp − 1) / (m · v) = "
    axes.set_title(
        f"{name}: pp {stages}, v {chunks}, m {micro_batches}: bubble "
        f"{timeline.bubble_fraction:.1%}",
        loc="left",
        fontweight="bold",
    )
    axes.set_xlabel(
        f"time; the bubble is idle time / compute time, {formula}{timeline.equal_bubble:.1%} with "
        "equal chunks",
        loc="left",
        color="#555555",
        fontsize=9,
    )
    axes.set_xlim(0, timeline.makespan)
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
    axes.tick_params(axis="y", length=0)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    _place_legend(figure, axes)


def _place_legend(figure: "Figure", axes: "Axes") -> None:
    """Place the legend below the axis and its text, in as many columns as fit."""
    from matplotlib.transforms import ScaledTranslation

    handles, labels = axes.get_legend_handles_labels()
    order = [*range(1, len(handles)), 0]  # the idle entry was plotted first and is listed last
    axes.legend(
        [handles[index] for index in order],
        [labels[index] for index in order],
        loc="upper left",
        bbox_to_anchor=(0, 0),
        bbox_transform=axes.transAxes + ScaledTranslation(0, -_TEXT_INCHES, figure.dpi_scale_trans),
        ncols=min(len(order), int(figure.get_figwidth() / _LEGEND_INCHES)),
        borderaxespad=0,
        borderpad=0,
        frameon=False,
        fontsize=9,
    )


def _shade(direction: Direction, chunk: int, chunks: int) -> tuple[float, float, float]:
    """Return the RGB color of a pass; later chunks are lighter."""
    white = _LIGHTEST * chunk / max(1, chunks - 1)
    red, green, blue = (part + (1 - part) * white for part in _COLORS[direction])
    return red, green, blue


def _luminance(color: tuple[float, float, float]) -> float:
    """Return the perceived brightness, from 0 to 1 (ITU-R BT.601)."""
    return 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]
