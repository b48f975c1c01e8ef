"""Chart of a run's report: the layouts that its ranks could have had, and its own."""

from typing import Any

from megacore.cluster.hosts.hardware import hardware_of
from megacore.config import RunConfig
from megacore.errors import MegacoreError
from megacore.plan.draw import search_figure
from megacore.plan.iteration import Iteration
from megacore.plan.layouts import layout_of
from megacore.plan.memory import GIB
from megacore.plan.search import search_around
from megacore.plan.throughput import planned_iteration
from megacore.plan.vocabulary import expected_vocab_size
from tasks._report_charts import SETTINGS, Chart, svg_of
from tasks._run_history import Attempt

_SAME = 0.01
"""Largest difference, relative to the time that the ranks predicted, of the time predicted here."""


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
    with rc_context(SETTINGS):
        svg = svg_of(search_figure(result, config.name, marks))
    return Chart(
        "Layouts of these ranks",
        f"The fastest is predicted at {fastest.seconds:.4g} s and {fastest.memory / GIB:.1f} GiB "
        f"({fastest.choice.name}), this run's at {own.seconds:.4g} s and "
        f"{own.memory / GIB:.1f} GiB ({own.choice.name}).",
        svg,
    )


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
