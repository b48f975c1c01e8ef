"""SVG charts of a run's report.

They show curves by tokens and training time, attempts by the clock, and possible layouts.
"""

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_high
from typing import TYPE_CHECKING, Any, Literal

from megacore.cluster.hosts.hardware import hardware_of
from megacore.config import RunConfig
from megacore.errors import MegacoreError
from megacore.observe.logging import MFU_NAMES, perplexity
from megacore.plan.draw import search_figure
from megacore.plan.iteration import Iteration
from megacore.plan.layouts import layout_of
from megacore.plan.memory import GIB
from megacore.plan.search import search_around
from megacore.plan.throughput import planned_iteration
from megacore.plan.vocabulary import expected_vocab_size
from tasks._plots import (
    MARGIN,
    MOST_POINTS,
    SMOOTH_COLOR,
    VALID_COLOR,
    Curve,
    plot_line,
    plot_smoothed,
    plot_validation,
    set_log_scale,
    short_count,
)
from tasks._run_history import Attempt, RunHistory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "megacore",
    "font.size": 12,
    "axes.edgecolor": "#9aa1ab",
    "axes.labelcolor": "#5b6570",
    "xtick.color": "#5b6570",
    "ytick.color": "#5b6570",
    "path.simplify": True,
}
"""Settings of matplotlib: text stays text, in the page's font, and a fixed salt makes ids
reproducible."""
_TEST_COLOR = "#4d7c2a"
_RESTART_COLOR = "#8a8f98"
_GRID_COLOR = "#e3e6ea"
_SIZE = (10.3, 4.5)
"""Size in inches; a column of the page shows a point of the figure as a pixel."""
_MARGINS = {"left": 0.09, "right": 0.985, "bottom": 0.125, "top": 0.865, "hspace": 0.16}
_MOST_MARKS = 400
_NAMED_ATTEMPTS = 8
_LATE = 0.85
"""Share of the time from which an attempt's name stands before its start, where it fits."""
_MOST_POSITION_CURVES = 5
_MOST_TASKS = 8
_SHARES = ("acc", "exact_match", "acc_norm", "f1")
"""Metrics of lm-eval between 0 and 1; the first that a task has is drawn."""
_MOST_SOURCES = 10
_HEADROOM = 1.08
_SAME = 0.01
"""Largest difference, relative to the time that the ranks predicted, of the time predicted here."""
_WIDE_RANGE = 20.0
"""Ratio of the largest gradient norm to the median from which its axis is logarithmic."""
_LONG = ((7200.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""Units of time: from how many seconds, length in seconds, name."""


@dataclass(frozen=True)
class Chart:
    """A picture of the page."""

    title: str
    note: str
    """One sentence on what it shows."""
    svg: str


def draw_charts(
    history: RunHistory,
    test_ppl: Mapping[int, float],
    test_by_position: Sequence[Mapping[str, Any]] = (),
    lm_eval: Mapping[int, Mapping[str, float]] | None = None,
) -> list[Chart]:
    """Draw the charts for which the run has values.

    `test_ppl` and `lm_eval` are by iteration of the checkpoint; `test_by_position` belongs to the
    exported one.
    """
    drawn = (
        _loss(history),
        _perplexity(history, test_ppl),
        _by_source(history),
        _by_position(history, test_by_position),
        _accuracies(history, lm_eval or {}),
        _learning_rate(history),
        _gradient_norm(history),
        _throughput(history),
        _attempts(history),
    )
    return [chart for chart in drawn if chart is not None]


def layouts_chart(config: RunConfig, attempt: Attempt | None) -> Chart | None:
    """Return the chart of an attempt's possible layouts by predicted time and memory.

    There is none if the attempt was not measured or predicted, if no layout fits, or if its time is
    predicted otherwise here: this host then differs from the run's.
    """
    if attempt is None or not attempt.phases or not attempt.facts.get("predicted_ms"):
        return None
    predicted = sum(attempt.facts["predicted_ms"].values()) / 1e3
    try:
        iteration = _iteration(config, attempt.facts)
        result, own = search_around(iteration)
    except MegacoreError:
        return None
    if abs(own.seconds - predicted) > _SAME * predicted:
        return None
    from matplotlib import rc_context

    fastest = result.best[0]
    measured = sum(attempt.phase_ms.values()) / 1e3
    marks = {
        "this run, predicted": (own.memory, own.seconds),
        "this run, measured time": (own.memory, measured),
    }
    with rc_context(_SETTINGS):
        svg = _svg_of(search_figure(result, config.name, marks))
    return Chart(
        "Layouts of these ranks",
        "Each point is a layout; none is faster than a numbered one without more memory. "
        f"The fastest is predicted at {fastest.seconds:.4g} s and {fastest.memory / GIB:.1f} GiB "
        f"({fastest.choice.name}), this run's at {own.seconds:.4g} s and "
        f"{own.memory / GIB:.1f} GiB ({own.choice.name}).",
        svg,
    )


def duration_unit(seconds: float) -> tuple[float, str]:
    """Return the unit in which to show times up to `seconds`: its length in seconds, its name."""
    return next((length, name) for least, length, name in _LONG if seconds >= least)


def _loss(history: RunHistory) -> Chart | None:
    train, valid = history.curve("train_loss"), history.curve("valid_loss")
    if not train.values and not valid.values:
        return None
    with _figure(history) as (figure, (axes,)):
        plot_smoothed(axes, train, "training")
        _plot_best(axes, valid, "quick validation", "{:.3f}")
        axes.set_ylabel("nats per token")
        _legend(axes)
        return Chart(
            "Loss",
            "Training, and the quick validation every train.eval_interval iterations.",
            _svg_of(figure),
        )


def _perplexity(history: RunHistory, test_ppl: Mapping[int, float]) -> Chart | None:
    valid = history.curve("valid_ppl")
    test = Curve.of(test_ppl)
    test = Curve(history.tokens_at(test.iterations).round().astype(int).tolist(), test.values)
    if not valid.values and not test.values:
        return None
    with _figure(history) as (figure, (axes,)):
        set_log_scale(axes, [*valid.values, *test.values])
        _plot_best(axes, valid, "validation", "{:.2f}")
        if test.values:
            axes.plot(
                test.iterations,
                test.values,
                "D",
                color=_TEST_COLOR,
                markersize=5,
                markerfacecolor="white",
                label="test, kept checkpoints",
            )
        axes.set_ylabel("PPL (log scale)")
        _legend(axes)
        return Chart("Perplexity", "Of the weights of each checkpoint.", _svg_of(figure))


def _by_source(history: RunHistory) -> Chart | None:
    """Draw the loss of each source: quick validation, and pale the estimate of training."""
    curves = {
        kind: {
            name: curve for name, points in known.items() if (curve := points.curve("loss")).values
        }
        for kind, known in history.by_source.items()
    }
    train, valid = curves.get("step", {}), curves.get("evaluation", {})
    names = list(dict.fromkeys([*valid, *train]))
    if not names:
        return None
    with _figure(history) as (figure, (axes,)):
        for number, name in enumerate(names[:_MOST_SOURCES]):
            for known, style, alpha in ((train, "-", 0.35), (valid, "o-", 1.0)):
                if name not in known:
                    continue
                curve = known[name].thinned(MOST_POINTS)
                axes.plot(
                    history.tokens_at(curve.iterations),
                    curve.values,
                    style,
                    color=f"C{number % 10}",
                    alpha=alpha,
                    markersize=3,
                    linewidth=1.4,
                    label=name if known is valid or name not in valid else None,
                )
        axes.set_ylabel("nats per token")
        _legend(axes)
        more = len(names) - _MOST_SOURCES
        note = (
            "Quick validation of each source of the blend; pale, the estimate of its training loss."
        )
        more_note = f" {more} more sources are not drawn." if more > 0 else ""
        return Chart("Loss by source", f"{note}{more_note}", _svg_of(figure))


def _by_position(history: RunHistory, test: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Draw the perplexity by position of a few checkpoints, the last in the strongest color."""
    from matplotlib.ticker import MaxNLocator

    known = {
        iteration: [each for each in rows if each["loss"] is not None]
        for iteration, rows in history.by_position.items()
    }
    test = [each for each in test if each["loss"] is not None]
    iterations = sorted(iteration for iteration, rows in known.items() if len(rows) > 1)
    if not iterations:
        return None
    count = min(_MOST_POSITION_CURVES, len(iterations))
    chosen = [iterations[-1 - number * len(iterations) // count] for number in range(count)]
    with _bare_figure() as (figure, (axes,)):
        curves = {iteration: known[iteration] for iteration in chosen}
        rows = [*test, *(each for curve in curves.values() for each in curve)]
        set_log_scale(axes, [perplexity(each["loss"]) for each in rows])
        for number, (iteration, curve) in enumerate(curves.items()):
            axes.plot(
                *_middles(curve),
                "o-",
                color=VALID_COLOR,
                alpha=1.0 - 0.8 * number / count,
                markersize=4,
                label=f"iteration {iteration:,}",
            )
        if len(test) > 1:
            axes.plot(*_middles(test), "D--", color=_TEST_COLOR, markersize=4, label="test")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
        axes.set_xlabel("position in the sample (tokens)")
        axes.set_ylabel("PPL (log scale)")
        # Above the axes, where other charts have their time axis: the curves fill the whole width.
        axes.legend(
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=_MOST_POSITION_CURVES + 1,
            borderaxespad=0,
            columnspacing=1.2,
            handletextpad=0.4,
            frameon=False,
        )
        return Chart(
            "Perplexity by position",
            "In ranges of positions of equal width: validation of some checkpoints"
            + (", test of the exported one." if len(test) > 1 else "."),
            _svg_of(figure),
        )


def _middles(rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Return the middle and the perplexity of each range of positions."""
    starts = [each["start"] for each in rows]
    width = min(after - before for before, after in pairwise(starts))
    return (
        [start + (width - 1) / 2 for start in starts],
        [perplexity(each["loss"]) for each in rows],
    )


def _accuracies(history: RunHistory, lm_eval: Mapping[int, Mapping[str, float]]) -> Chart | None:
    """Draw one score of each task that was measured for several checkpoints and is a share."""
    iterations = sorted(lm_eval)
    names = dict.fromkeys(name for scores in lm_eval.values() for name in scores)
    curves: dict[str, list[float]] = {}
    for name in names:
        values = [lm_eval[iteration].get(name, math.nan) for iteration in iterations]
        _, task, *metric = name.split("/")
        if metric[0] in _SHARES and not any(map(math.isnan, values)):
            curves.setdefault(task, values)
    if len(iterations) < 2 or not curves:
        return None
    with _figure(history) as (figure, (axes,)):
        tokens = history.tokens_at(iterations)
        for task, values in list(curves.items())[:_MOST_TASKS]:
            axes.plot(tokens, values, "o-", markersize=4, label=task)
        axes.set_ylabel("score")
        _legend(axes, "upper left")  # scores rise
        note = "Accuracy or exact matches of each task."
        if len(curves) > _MOST_TASKS:
            note += f" {len(curves) - _MOST_TASKS} more are in the table."
        return Chart("lm-eval", note, _svg_of(figure))


def _learning_rate(history: RunHistory) -> Chart | None:
    from matplotlib.ticker import FuncFormatter

    rates = history.curve("lr").thinned(MOST_POINTS)
    if not rates.values:
        return None
    with _figure(history) as (figure, (axes,)):
        plot_line(axes, rates)
        axes.set_ylim(0, max(rates.values) * _HEADROOM or 1.0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        return Chart("Learning rate", "Of the last update of each log interval.", _svg_of(figure))


def _gradient_norm(history: RunHistory) -> Chart | None:
    norms = history.curve("grad_norm")
    if not norms.values:
        return None
    with _figure(history) as (figure, (axes,)):
        plot_smoothed(axes, norms, "gradient norm")
        wide = max(norms.values) > _WIDE_RANGE * median_high(norms.values)
        if min(norms.values) > 0 and wide:
            set_log_scale(axes, norms.values)
        else:
            axes.set_ylim(0, max(norms.values) * _HEADROOM or 1.0)
        return Chart("Gradient norm", "Before clipping.", _svg_of(figure))


def _throughput(history: RunHistory) -> Chart | None:
    from matplotlib.ticker import FuncFormatter

    curves: list[tuple[Curve, str, Callable[[float], str]]] = [
        (history.curve("tokens_per_second"), "tokens/s", short_count),
        *(
            (history.curve(name), f"MFU {name_of}", lambda share: f"{100 * share:.3g}%")
            for name, name_of in MFU_NAMES.items()
        ),
    ]
    panels = [(curve, label, unit) for curve, label, unit in curves if curve.values]
    if not panels:
        return None
    with _figure(history, panels=len(panels)) as (figure, all_axes):
        for axes, (curve, label, unit) in zip(all_axes, panels, strict=True):
            plot_smoothed(axes, curve, label)
            axes.set_ylabel(label)
            axes.set_ylim(0, max(curve.values) * _HEADROOM or 1.0)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _, unit=unit: unit(value)))
        known = any(curve.values for curve, _, _ in curves[1:])
        note = "" if known else " MFU is not known on this hardware."
        return Chart("Tokens per second and MFU", f"Of all ranks together.{note}", _svg_of(figure))


def _attempts(history: RunHistory) -> Chart | None:
    """Draw consumed tokens by time of the clock, in which the time between attempts is visible."""
    from matplotlib.ticker import FuncFormatter

    if not any(attempt.times for attempt in history.attempts):
        return None
    begin, end = history.attempts[0].start, max(attempt.end for attempt in history.attempts)
    length, name = duration_unit(end - begin)
    share = max(2, MOST_POINTS // len(history.attempts))
    with _bare_figure() as (figure, (axes,)):
        limit = max(1.0, (end - begin) / length) * MARGIN
        axes.set_xlim(0, limit)
        for index, attempt in enumerate(history.attempts):
            start = (attempt.start - begin) / length
            if index:
                before = (history.attempts[index - 1].end - begin) / length
                axes.axvspan(before, start, color="#f3f4f6", linewidth=0)
                _mark_restart(axes, start)
            tokens = history.tokens_at([attempt.first_iteration, *attempt.iterations])
            times = [start, *((time - begin) / length for time in attempt.times)]
            # Times and tokens both rise: every n-th point is enough.
            stride = max(1, -(-len(times) // share))
            axes.plot(
                [*times[::stride], times[-1]],
                [*tokens[::stride], tokens[-1]],
                color=SMOOTH_COLOR,
                linewidth=1.6,
            )
            if 1 < len(history.attempts) <= _NAMED_ATTEMPTS:
                late = start > _LATE * limit
                axes.annotate(
                    f"attempt {attempt.number}",
                    (start, 1.0),
                    xycoords=("data", "axes fraction"),
                    xytext=(-4 if late else 4, -4),
                    ha="right" if late else "left",
                    textcoords="offset points",
                    va="top",
                    color="#5b6570",
                )
        axes.set_ylim(0, max(1, history.tokens) * _HEADROOM)
        axes.set_xlabel(f"{name} since the first start")
        axes.set_ylabel("consumed tokens")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
        note = "By the clock; a new attempt repeats what was trained after the last checkpoint."
        return Chart("Attempts and restarts", note, _svg_of(figure))


def _iteration(config: RunConfig, facts: dict[str, Any]) -> Iteration:
    """Return the iteration of an attempt on its hosts, which are assumed to be equal."""
    ranks, hardware = facts["ranks"], hardware_of(config.launch)
    together = -(-ranks // max(1, len(facts.get("hosts") or ())))
    vocab_size = expected_vocab_size(config.data.tokenizer)
    return planned_iteration(
        config,
        vocab_size,
        hardware,
        layout_of(config, ranks, vocab_size),
        config.launch.threads_per_rank or max(1, hardware.cores // together),
        ranks_per_host=together,
    )


@contextmanager
def _figure(history: RunHistory, panels: int = 1) -> "Iterator[tuple[Figure, Sequence[Axes]]]":
    """Yield a figure with consumed tokens below and training time above, and marks in it."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    with _bare_figure(panels) as (figure, all_axes):
        for axes in all_axes:
            axes.set_xlim(0, max(1, history.tokens) * MARGIN)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=8))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
            for attempt in history.attempts[1:][:_MOST_MARKS]:
                _mark_restart(axes, float(history.tokens_at([attempt.first_iteration])[0]))
        _add_time_axis(all_axes[0], history)
        all_axes[-1].set_xlabel("consumed tokens")
        _mark_checkpoints(all_axes[-1], history)
        yield figure, all_axes


@contextmanager
def _bare_figure(panels: int = 1) -> "Iterator[tuple[Figure, Sequence[Axes]]]":
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context(_SETTINGS):
        figure = Figure(figsize=_SIZE, dpi=72)
        FigureCanvasSVG(figure)
        # Equal margins align the charts, and the search for the smallest ones takes long.
        figure.subplots_adjust(**_MARGINS)
        all_axes = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
        for axes in all_axes:
            axes.grid(True, which="major", color=_GRID_COLOR, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines["right"].set_visible(False)
            axes.spines["top"].set_visible(False)
        yield figure, list(all_axes)


def _add_time_axis(axes: "Axes", history: RunHistory) -> None:
    """Add training time above: round values at the tokens that were consumed by then."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    if history.seconds <= 0 or history.tokens <= 0:
        return
    seconds = history.seconds_at(history.step_iterations)
    length, name = duration_unit(float(seconds[-1]))
    ticks = np.asarray(MaxNLocator(nbins=8).tick_values(0, float(seconds[-1]) / length))
    values = ticks[(ticks >= 0) & (ticks <= seconds[-1] / length)]
    tokens = np.interp(values * length, seconds, history.tokens_at(history.step_iterations))
    top = axes.secondary_xaxis("top")
    top.set_xticks(tokens, [f"{value:g}" for value in values])
    top.set_xlabel(f"training time ({name})")


def _mark_restart(axes: "Axes", position: float) -> None:
    axes.axvline(position, color=_RESTART_COLOR, linewidth=1.0, linestyle=(0, (3, 3)), zorder=0.9)


def _mark_checkpoints(axes: "Axes", history: RunHistory) -> None:
    """Draw a tick on the lower axis for each checkpoint, pale if it was deleted."""
    for deleted, color in ((True, "#c3c8cf"), (False, VALID_COLOR)):
        iterations = [
            saved.iteration
            for saved in history.checkpoints.values()
            if saved.deleted is deleted and saved.size_bytes is not None
        ]
        stride = max(1, -(-len(iterations) // _MOST_MARKS))
        tokens = history.tokens_at(iterations[::stride])
        axes.plot(
            tokens,
            [0.0] * len(tokens),
            "|",
            color=color,
            markersize=11,
            markeredgewidth=1.4,
            transform=axes.get_xaxis_transform(),
            clip_on=False,
            zorder=5,
        )


def _plot_best(axes: "Axes", curve: Curve, label: str, number: str) -> None:
    def position(tokens: float) -> str:
        return f"{short_count(tokens)} tokens"

    # The best value is one of the extremes, so it survives thinning.
    plot_validation(axes, curve.thinned(MOST_POINTS), label, number, position)


def _legend(axes: "Axes", corner: Literal["upper left", "upper right"] = "upper right") -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc=corner, edgecolor="none", framealpha=0.9)


def _svg_of(figure: "Figure") -> str:
    """Return the figure as an element of an HTML page, without metadata and namespaces.

    The ids of groups are removed, because they are the same in every figure.
    """
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    head, rest = text.split(">", 1)
    head = re.sub(r' (?:xmlns(?::\w+)?|width|height|version)="[^"]*"', "", head)
    return f'{head} role="img">{rest.strip()}'
