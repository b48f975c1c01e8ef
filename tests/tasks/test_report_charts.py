"""Charts of a run's report: the layouts of its ranks."""

from pathlib import Path
from typing import Any

import pytest

from megacore.config import RunConfig, load_config
from megacore.hardware import Hardware
from tasks import _report_charts
from tasks._report import ReportFacts, write_report
from tasks._report_charts import layouts_chart
from tasks._run_history import Attempt, RunHistory
from tests.tasks.events import EventLog

HOST = Hardware(cores=4, memory=64 * 2**30, cpu_flags=frozenset({"avx512f"}))


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda cls: HOST))


def attempt_of(config: RunConfig, ranks: int, hosts: int = 1, **facts: Any) -> Attempt:
    """Return an attempt that took a tenth longer than its ranks predicted."""
    known: dict[str, Any] = {"ranks": ranks, "hosts": [f"node-{i}" for i in range(hosts)]}
    prediction = _report_charts._iteration(config, known).predict()
    known |= {"predicted_ms": prediction.phase_ms} | facts
    attempt = Attempt(1, 0.0, 1.0, 0.0, facts=known)
    total = 1.1e3 * prediction.seconds
    attempt.add_phases({"phase_ms": {"forward-compute": 1.0}, "ms_per_iteration": total})
    return attempt


@pytest.mark.parametrize(
    ("ranks", "hosts", "own"),
    [(1, 1, "tp 1, dp 1, b 8"), (2, 1, "tp 1, dp 2, b 8"), (2, 2, "tp 1, dp 2, b 8")],
)
def test_the_chart_has_the_front_and_the_run(ranks: int, hosts: int, own: str) -> None:
    config = load_config("gpt2-tiny", {"launch.nproc_per_node": "auto"})
    attempt = attempt_of(config, ranks, hosts)
    chart = layouts_chart(config, attempt)
    assert chart is not None
    assert chart.svg.startswith("<svg")
    for text in ("Pareto front", "this run, predicted", "this run, measured time", own):
        assert text in chart.svg
    seconds = sum(attempt.facts["predicted_ms"].values()) / 1e3
    assert f"this run's at {seconds:.4g} s" in chart.note
    assert f"({own})" in chart.note
    assert "faster than a numbered one" in chart.note


def test_the_page_has_the_chart_below_the_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks._report.draw_charts", lambda *_: [])
    config, log = load_config("gpt2-tiny"), EventLog(tmp_path / "events.jsonl")
    attempt = attempt_of(config, 1)
    log.start(**attempt.facts | {"hardware": "CPU core"})
    total = attempt.phases["total"][0]
    log.step(10, ms_per_iteration=total, phase_ms={"forward-compute": total})
    facts = ReportFacts(config, {}, None, "", (), "")
    report = write_report(tmp_path / "report.html", "run", RunHistory(log.path), facts)
    page = report.read_text(encoding="utf-8")
    before, after = page.split("<h3>Layouts of these ranks</h3>")
    assert '<div class="charts"' in before.rpartition("<h2>")[2], "it is as wide as the others"
    assert "<h2>Time per iteration</h2>" in before
    assert "this run, measured time" in after.split("<h2>")[0]


def test_a_run_without_a_measurement_or_prediction_has_no_chart() -> None:
    config = load_config("gpt2-tiny")
    attempt = attempt_of(config, 1)
    assert layouts_chart(config, attempt) is not None
    assert layouts_chart(config, None) is None
    attempt.phases.clear()
    assert layouts_chart(config, attempt) is None
    assert layouts_chart(config, attempt_of(config, 1, predicted_ms={})) is None


def test_a_host_that_predicts_another_time_draws_no_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("gpt2-tiny")
    attempt = attempt_of(config, 1)
    slower = Hardware(cores=4, memory=64 * 2**30, cpu_flags=frozenset({"avx2"}))
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda cls: slower))
    assert layouts_chart(config, attempt) is None


def test_ranks_that_the_layout_cannot_have_draw_no_chart() -> None:
    config = load_config("gpt2-tiny", {"launch.nproc_per_node": "auto"})
    attempt = attempt_of(config, 1)
    attempt.facts["ranks"] = 3
    assert layouts_chart(config, attempt) is None
