"""Plots of a run."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tasks._plots import MOST_POINTS, Curve, plot_run, plot_smoothed, short_count
from tasks._run_history import RunHistory
from tests.tasks.events import EventLog


def test_curves_contain_the_first_report_of_an_iteration(log: EventLog) -> None:
    log.step(10, loss=4.0)
    log.step(20, loss=3.0)
    log.evaluation(20, loss=2.0)
    log.attempt = 2
    log.step(20, loss=9.0)
    log.evaluation(20, loss=9.0)
    log.write("step", 30, lm_loss=None, consumed_tokens=960)
    history = RunHistory(log.path)
    assert history.by_iteration("train_loss") == Curve([10, 20], [4.0, 3.0])
    assert history.by_iteration("valid_loss") == Curve([20], [2.0])
    assert history.tokens_at([20]) == 640


def test_the_first_step_event_of_an_iteration_counts_as_a_whole(log: EventLog) -> None:
    """MLflow takes it so, too: its curves and those of the report are the same."""
    log.write("step", 10, lm_loss=4.0, lr=None, consumed_tokens=320)
    log.write("step", 10, lm_loss=3.0, lr=0.1, consumed_tokens=320)
    history = RunHistory(log.path)
    assert history.by_iteration("train_loss") == Curve([10], [4.0])
    assert history.by_iteration("lr") == Curve([], [])


def test_a_long_curve_is_drawn_with_a_limited_number_of_points() -> None:
    axes = Figure().add_subplot()
    plot_smoothed(axes, Curve([*range(9_000)], [1.0, 2.0] * 4_500), "loss")
    assert [len(line.get_xdata()) for line in axes.lines] == [MOST_POINTS] * 2


@pytest.mark.parametrize(("iterations", "evaluations"), [(0, 0), (1, 0), (3, 1), (500, 10)])
def test_curves_of_any_length_are_drawn(
    log: EventLog, tmp_path: Path, iterations: int, evaluations: int
) -> None:
    from matplotlib.image import imread

    log.path.touch()
    for iteration in range(1, iterations + 1):
        log.step(iteration, loss=9.0 / iteration**0.2)
    for index in range(1, evaluations + 1):
        log.evaluation(iterations * index // evaluations, loss=8.0 / index**0.2)
        log.perplexity(iterations * index // evaluations, loss=8.0 / index**0.2)
    for path in plot_run(RunHistory(log.path), tmp_path, "gpt2-test"):
        pixels = imread(path)
        assert pixels.shape[:2] == (624, 1040)
        if evaluations:
            orange = (pixels[..., 0] > 0.7) & (pixels[..., 1] < 0.5) & (pixels[..., 2] < 0.3)
            assert orange.sum() > 20


def test_the_best_value_is_in_the_legend_where_it_covers_no_curve() -> None:
    from matplotlib.figure import Figure

    from tasks._plots import plot_validation

    axes = Figure().add_subplot()
    plot_validation(axes, Curve([10, 20, 30], [4.0, 2.5, 3.0]), "validation", "{:.2f}")
    assert axes.get_legend_handles_labels()[1] == ["validation, best 2.50 at 20"]
    assert not axes.texts


def test_smoothing_preserves_ends_and_level() -> None:
    values = [5.0 - index / 1000 for index in range(1000)]
    curve = Curve(list(range(1000)), values)
    smooth = curve.smoothed()
    assert smooth.values[0] == values[0]
    assert smooth.values == pytest.approx(values, abs=0.011)
    assert Curve([1], [2.0]).smoothed() == Curve([1], [2.0])


def test_short_count_uses_suffixes() -> None:
    assert [short_count(value) for value in (0, 999, 1500, 2.5e6, 3.2e10, 1e12)] == [
        "0",
        "999",
        "1.5K",
        "2.5M",
        "32B",
        "1T",
    ]
