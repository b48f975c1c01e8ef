"""The report of a run as an HTML page."""

import html
import json
import re
import time
import tracemalloc
from contextlib import nullcontext
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tasks._report
from megacore.artifact import Artifact
from megacore.artifact.files import write_json
from megacore.config import RunConfig
from tasks._plots import SMOOTH_COLOR, Curve
from tasks._publication import RECEIPT, REPORT, result_lines
from tasks._report import ReportFacts, write_report
from tasks._report_charts import MOST_POINTS, draw_charts
from tasks._run_history import RunHistory
from tests.tasks.conftest import make_config
from tests.tasks.events import EventLog, sources

CANARY = "c4n4ry-0123456789"
ROWS = [
    {"checkpoint": f"iter_{iteration:07d}", "iteration": iteration, "valid_ppl": v, "test_ppl": t}
    for iteration, v, t in ((20, 90.25, 91.5), (40, 60.125, 61.75))
]


class Page(HTMLParser):
    """Elements and text of a page; fails for a tag that is closed without being open."""

    VOID = ("meta", "path", "use")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words += data.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)


def facts_of(config: RunConfig | None = None, **changed: Any) -> ReportFacts:
    values: dict[str, Any] = {
        "config": config or make_config(),
        "evaluation": {"checkpoints": ROWS, "unigram": {"valid": 812.4, "test": 833.1}},
        "exported": 40,
        "sample": "def f(x):\n    return x < 1 & x\n",
        "artifacts": [
            Artifact(
                stage="tokenize",
                key="ab" * 8,
                path="/data/abababababababab",
                digest="f" * 64,
                counts={"tokens": 35_460},
            )
        ],
        "mlflow_run": "65273701",
    }
    return ReportFacts(**values | changed)


def write_page(log: EventLog, facts: ReportFacts) -> Page:
    report, run = log.path.with_name(REPORT), log.path.parent.name
    return Page(write_report(report, run, RunHistory(log.path), facts))


@pytest.fixture
def two_attempts(log: EventLog) -> EventLog:
    """Write a run that was killed after iteration 30 and resumed from iteration 20."""
    return write_two_attempts(log)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Provide the page of a run with two attempts."""
    directory = tmp_path_factory.mktemp("run")
    return write_page(write_two_attempts(EventLog(directory / "events.jsonl")), facts_of())


@pytest.fixture
def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the charts, which take most of a page's time."""
    monkeypatch.setattr(tasks._report, "draw_charts", lambda *_: [])


def write_two_attempts(log: EventLog) -> EventLog:
    log.start()
    for iteration in (10, 20, 30):
        log.step(
            iteration, loss=6.0 - iteration / 20, tokens_per_second=100.0, mfu=0.4, mfu_measured=0.5
        )
        if iteration == 20:
            log.evaluation(20)
            log.perplexity(20, loss=4.5)
            log.checkpoint(20)
    log.attempt, log.time = 2, log.time + 3600
    log.start(20, resumed_from=20, ranks=1, changes=["train.micro_batch_size 2 -> 1"])
    log.write("warning", 20, message="host node-b did not answer")
    for iteration in (30, 40):
        log.step(
            iteration, loss=6.0 - iteration / 20, tokens_per_second=50.0, mfu=0.2, mfu_measured=0.3
        )
    log.perplexity(40, loss=4.0)
    log.checkpoint(40)
    log.deleted(20)
    log.write("exit", 40, reason="finished")
    return log


def test_page_shows_numbers_charts_checkpoints_sample_data_and_attempts(page: Page) -> None:
    for shown in (
        "gpt2-test.v1",
        "Test PPL 61.75 unigram model 833.10",
        "Validation PPL 60.12 best checkpoint, iteration 40",
        "Tokens 1.28K 1,280 consumed",
        "2 attempts",
        "Parameters 38.8K 38,784",
        "Hardware 1 × CPU 1 host (node-a), fp32",
        "MFU 40.0% / 50.0% median, of the vendor's peak / of measured matmuls",
        "Prompt: def",
        "return x < 1 & x",
        "tokenize abababababababab 35,460 tokens /data/abababababababab",
        '{"kind": "source_tree"',
        "0 to 30 killed or lost 2 node-a",
        "20 to 40 finished 1 node-a",
        "Changed in attempt 2: train.micro_batch_size 2 -> 1",
        "host node-b did not answer",
        "micro_batch_size: 1",
    ):
        assert shown in page.text, shown
    titles = ["Loss", "Perplexity", "Learning rate", "Gradient norm"]
    titles += ["Tokens per second and MFU", "Attempts and restarts"]
    labels = [value for name, value in page.attributes if name == "aria-label"]
    assert labels == titles
    assert page.tags.count("svg") == 6
    assert page.text.count("consumed tokens") == 6
    assert page.text.count("training time (seconds)") == 5


@pytest.mark.usefixtures("without_charts")
def test_checkpoints_are_sorted_by_validation_perplexity(two_attempts: EventLog) -> None:
    two_attempts.checkpoint(50)
    text = write_page(two_attempts, facts_of()).text
    begin, end = text.index("Validation PPL Test PPL"), text.index("Sample")
    table = text[begin:end]
    order = [table.index(ppl) for ppl in ("60.12 61.75", "90.25 91.50", "– – 1.05 kB", "812.40")]
    assert order == sorted(order)
    assert "exported" in table
    assert "deleted" in table
    assert "kept" in table


def test_history_has_the_first_report_of_an_iteration_and_no_time_between_attempts(
    two_attempts: EventLog,
) -> None:
    history = RunHistory(two_attempts.path)
    assert [attempt.number for attempt in history.attempts] == [1, 2]
    assert history.curve("tokens_per_second") == Curve([320, 640, 960, 1280], [100, 100, 100, 50])
    assert history.curve("valid_ppl").iterations == [640, 1280]
    assert history.tokens == 1280
    assert history.seconds < 30
    assert history.attempts[0].reason is None
    seconds = history.seconds_at([10, 20, 30, 40]).tolist()
    assert seconds == sorted(seconds)
    assert seconds[-1] < 30


@pytest.mark.usefixtures("without_charts")
def test_names_samples_and_warnings_are_escaped(two_attempts: EventLog) -> None:
    hostile = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
    two_attempts.write("warning", 40, message=hostile)
    config = make_config().model_copy(update={"name": hostile})
    page = write_page(two_attempts, facts_of(config, sample=f"def {hostile}\x00\x1b[31m"))
    assert not {"script", "img"} & set(page.tags)
    assert page.source.count(html.escape(hostile).replace("&quot;", "&#34;")) >= 3
    assert hostile in page.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", page.source)


@pytest.mark.usefixtures("without_charts")
def test_secrets_are_redacted(two_attempts: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", CANARY)
    two_attempts.write("warning", 40, message=f"https://me:{CANARY}@host did not answer")
    page = write_page(two_attempts, facts_of(sample=f"token {CANARY}"))
    assert CANARY not in page.source
    assert "https://***@host did not answer" in page.text


def test_page_loads_nothing(page: Page) -> None:
    links = {name for name, _ in page.attributes} & {"src", "srcset", "action", "data", "poster"}
    assert links == set()
    references = [
        value
        for name, value in page.attributes
        if name.endswith("href") or (value and "url(" in value)
    ]
    assert references
    assert all(value and re.match(r"(url\()?#\w", value.strip()) for value in references)
    assert not {"link", "script", "iframe", "object", "embed"} & set(page.tags)
    assert "http://" not in page.source
    assert "https://" not in page.source
    assert "@import" not in page.source


def test_run_with_only_a_start_has_a_page(log: EventLog) -> None:
    log.start()
    empty = facts_of(evaluation={}, exported=None, sample="", artifacts=[])
    text = write_page(log, empty).text
    for shown in (
        "Test PPL – not measured",
        "No iteration has been reported.",
        "No checkpoint has been saved.",
        "No sample has been written.",
        "0 to 0 no end reported 2 node-a",
    ):
        assert shown in text, shown


def test_run_without_events_has_a_page(log: EventLog) -> None:
    empty = facts_of(evaluation={}, exported=None, sample="", artifacts=[])
    assert "No attempt has been reported." in write_page(log, empty).text


def test_values_that_are_missing_leave_out_their_chart(log: EventLog) -> None:
    log.start()
    log.step(1, loss=5.0, grad_norm=None, mfu=None, mfu_measured=None, tokens_per_second=10.0)
    log.perplexity(1, loss=None)
    charts = draw_charts(RunHistory(log.path), {})
    titles = ["Loss", "Learning rate", "Tokens per second and MFU", "Attempts and restarts"]
    assert [chart.title for chart in charts] == titles
    assert "MFU is not known" in charts[2].note


def test_perplexity_by_position_is_drawn_for_a_few_checkpoints(log: EventLog) -> None:
    log.start()
    for iteration in range(1, 13):
        log.perplexity(iteration, loss=3.0, by_position=[4.0, 3.0, 2.0 / iteration, None])
    (chart,) = (
        chart
        for chart in draw_charts(RunHistory(log.path), {})
        if chart.title == "Perplexity by position"
    )
    named = re.findall(r"iteration (\d+)", chart.svg)
    assert (named[0], len(named)) == ("12", 5)
    tops = {float(y) for y in re.findall(r' y="([\d.]+)"[^>]*>iteration', chart.svg)}
    assert len(tops) == 1, "the legend is one row"
    assert tops.pop() < 43, "the legend is above the axes, and covers no curve"


def test_the_loss_of_each_source_is_drawn_with_its_name(log: EventLog) -> None:
    log.start()
    for iteration in range(1, 5):
        log.step(iteration, **sources({"web": 3.0 / iteration, "books": 2.0 / iteration}))
        log.evaluation(iteration, web=3.1 / iteration, code=None)
    (chart,) = (
        chart for chart in draw_charts(RunHistory(log.path), {}) if chart.title == "Loss by source"
    )
    assert [re.findall(rf">{name}<", chart.svg) for name in ("web", "books", "code")] == [
        [">web<"],
        [">books<"],
        [],
    ]


def test_a_run_of_an_earlier_version_has_no_chart_by_position(log: EventLog) -> None:
    log.start()
    log.perplexity(1)
    assert "Perplexity by position" not in [
        chart.title for chart in draw_charts(RunHistory(log.path), {})
    ]


def test_a_single_point_has_a_marker_in_every_chart_of_steps(log: EventLog) -> None:
    log.start()
    log.step(1, tokens_per_second=10.0, mfu=None, mfu_measured=None)
    charts = {chart.title: chart.svg for chart in draw_charts(RunHistory(log.path), {})}
    for title in ("Loss", "Learning rate", "Gradient norm", "Tokens per second and MFU"):
        uses = re.findall(r'<use [^>]*style="fill: ([^;"]*)', charts[title])
        assert SMOOTH_COLOR in uses, title


def test_a_later_attempt_replaces_the_losses_by_position_of_its_checkpoint(log: EventLog) -> None:
    log.start()
    log.perplexity(1, loss=3.0, by_position=[4.0, 3.0])
    log.attempt = 2
    log.perplexity(1, loss=2.5, by_position=[3.5, 2.0])
    history = RunHistory(log.path)
    assert [each["loss"] for each in history.by_position[1]] == [3.5, 2.0]


def test_the_stage_evaluate_adds_test_and_replaces_validation_by_position(
    two_attempts: EventLog,
) -> None:
    positions = [
        {"start": 4 * number, "loss": loss, "tokens": 8} for number, loss in ((0, 4), (1, 3))
    ]
    rows = [{**row, "valid_by_position": positions, "test_by_position": positions} for row in ROWS]
    text = write_page(two_attempts, facts_of(evaluation={"checkpoints": rows})).text
    assert "validation of some checkpoints, test of the exported one." in text
    assert "iteration 20 iteration 40 test" in text or "iteration 40 iteration 20 test" in text


@pytest.mark.usefixtures("without_charts")
def test_zero_shot_scores_are_tables(two_attempts: EventLog) -> None:
    cells = [
        {"length": length, "depth": depth, "accuracy": depth, "ranked_accuracy": 1.0}
        for length in (512, 1024)
        for depth in (0.0, 0.5)
    ]
    passkey = {"accuracy": 0.25, "ranked_accuracy": 1.0, "chance": 0.1, "cells": cells}
    lambada = {"accuracy": 0.125, "target_ppl": 1234.5}
    scores = {"lambada": lambada, "passkey": passkey}
    names = ("iter_0000020", "iter_0000040")
    page = write_page(two_attempts, facts_of(zero_shot=dict.fromkeys(names, scores)))
    for shown in (
        "Zero-shot scores Text Measure iteration 20 iteration 40 LAMBADA accuracy 12.50% 12.50%",
        "LAMBADA PPL of last words 1,234.50 1,234.50 Passkey accuracy 25.00% 25.00%",
        "Passkey accuracy of iteration 40 depth 0% depth 50% 512 tokens 0% 50% 1,024 tokens 0% 50%",
        "Passkey ranked accuracy of iteration 40, chance 10% depth 0%",
    ):
        assert shown in page.text, shown
    assert "Zero-shot" not in write_page(two_attempts, facts_of()).text


def test_many_points_are_thinned_and_a_spike_is_kept() -> None:
    count = 50_000
    values = [1.0 + index % 7 / 10 for index in range(count)]
    values[31_234] = 99.0
    thin = Curve(list(range(count)), values).thinned(MOST_POINTS)
    assert MOST_POINTS / 2 < len(thin.values) <= MOST_POINTS
    assert (thin.iterations[0], thin.iterations[-1]) == (0, count - 1)
    assert thin.iterations == sorted(set(thin.iterations))
    assert max(thin.values) == 99.0
    assert Curve([1, 2, 3], [1.0, 2.0, 3.0]).thinned(3) == Curve([1, 2, 3], [1.0, 2.0, 3.0])


def test_charts_of_many_points_are_small(log: EventLog) -> None:
    log.start()
    for iteration in range(1, 3001):
        log.step(iteration, loss=9.0 / iteration**0.2 + iteration % 7 / 10)
    loss = draw_charts(RunHistory(log.path), {})[0]
    drawn = max(len(re.findall(r"[ML] ", path)) for path in re.findall(r' d="([^"]*)"', loss.svg))
    assert 100 < drawn <= MOST_POINTS


@pytest.mark.parametrize("server", [None, "https://mlflow.example"])
def test_places_name_the_report_and_its_page_in_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str | None
) -> None:
    monkeypatch.setattr("tasks._publication.shown_by", lambda tracking: server)
    monkeypatch.setattr("tasks._publication.standing", lambda *names: "alias candidate")
    tracking: Any = SimpleNamespace(
        errors=lambda action: nullcontext(),
        experiment="pretrain",
        experiment_id="7",
        experiment_of=lambda run_id: "7",
    )
    receipt = {"uri": "models:/m/1", "model_name": "m", "version": "1", "run_id": "abc"}
    write_json(tmp_path / RECEIPT, receipt)
    before = result_lines(tracking, tmp_path, tmp_path, tmp_path)
    (tmp_path / REPORT).touch()
    added = [
        line for line in result_lines(tracking, tmp_path, tmp_path, tmp_path) if line not in before
    ]
    expected = [f"- report: `{tmp_path / REPORT}`"]
    if server is not None:
        page = f"{server}/#/experiments/7/runs/abc/artifacts/report/report.html"
        expected += [f"- report in MLflow: [report.html]({page}?workflowType=machine_learning)"]
    assert added == expected
    view = "experiments/7/runs?workflowType=machine_learning&viewStateShareKey=by-ppl"
    runs = f"- all runs by PPL: [pretrain]({server}/#/{view})"
    assert (runs in before) == (server is not None)


@pytest.mark.usefixtures("without_charts")
def test_tables_of_many_rows_are_cut(log: EventLog) -> None:
    for attempt in range(1, 121):
        log.attempt = attempt
        log.start(attempt - 1)
        log.step(attempt)
        log.perplexity(attempt, loss=5.0 - attempt / 100)
        log.checkpoint(attempt)
        log.write("warning", attempt, message="slow")
    worst = {"checkpoint": "iter_0000001", "iteration": 1, "valid_ppl": 900.5, "test_ppl": 901.5}
    evaluation = {"checkpoints": [worst], "unigram": {"valid": 812.4, "test": 833.1}}
    text = write_page(log, facts_of(evaluation=evaluation, exported=None)).text
    assert "900.50 901.50" in text
    assert "19 more are not shown." in text
    assert text.count("The first 20 are not shown.") == 2


@pytest.mark.usefixtures("without_charts")
def test_a_run_slower_than_predicted_names_the_slow_part(log: EventLog) -> None:
    predicted = {"compute": 90.0, "data-parallel wait": 10.0}
    log.start(predicted_ms=predicted, hardware="NVIDIA H100")
    for iteration, total in ((10, 900.0), (20, 140.0), (30, 140.0)):
        phases = {
            "forward-compute": 30.0,
            "backward-compute": 85.0,
            "data-parallel wait": 45.0,
            "optimizer": 11.0,
        }
        log.step(iteration, ms_per_iteration=total, phase_ms=phases)
    page = write_page(log, facts_of())
    assert "40% slower than predicted for NVIDIA H100: 40.0 ms more, " in page.text
    assert "and 35.0 ms more in data-parallel wait." in page.text
    assert "compute 90.0 95.0" in page.text


@pytest.mark.usefixtures("without_charts")
def test_a_run_without_a_prediction_has_no_comparison(log: EventLog) -> None:
    log.start()
    log.step(10, ms_per_iteration=100.0, phase_ms={"optimizer": 10.0})
    assert "Time per iteration" not in write_page(log, facts_of()).text


def test_times_have_the_stated_zone_in_summer_and_in_winter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        hours = int(tasks._report._zone()[3:6])
        for month in ("2026-01-15", "2026-07-15"):
            seconds = datetime.fromisoformat(f"{month} 10:00:00+00:00").timestamp()
            assert tasks._report._date(seconds) == f"{month} {10 + hours}:00:00"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_long_history_takes_little_memory(log: EventLog) -> None:
    phases = {f"phase {number}": 0.5 for number in range(8)}
    with open(log.path, "w", encoding="utf-8") as file:
        for iteration in range(1, 10_001):
            step = {
                "kind": "step",
                "time": 1e9 + iteration,
                "attempt": 1 + (iteration >= 5000),
                "iteration": iteration,
                "consumed_tokens": 32 * iteration,
                "phase_ms": phases,
                "ms_per_iteration": 4.0 + iteration,
            }
            values = dict.fromkeys(("lm_loss", "lr", "grad_norm", "mfu"), 1.0 / iteration)
            file.write(json.dumps(step | values) + "\n")
    tracemalloc.start()
    history = RunHistory(log.path)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 10_000 * 300
    assert history.curve("train_loss").values[-1] == 1e-4
    brief = RunHistory(log.path, heads=("step",))
    assert [attempt.last_iteration for attempt in brief.attempts] == [4999, 10_000]
    assert [attempt.seconds for attempt in brief.attempts] == [
        attempt.seconds for attempt in history.attempts
    ]


def test_training_time_rises_when_the_clock_is_set_back(log: EventLog) -> None:
    log.start()
    for iteration in (10, 20, 30, 40):
        log.step(iteration)
        log.time -= 3600.0 if iteration == 20 else 0.0
    seconds = RunHistory(log.path).seconds_at([10, 20, 30, 40]).tolist()
    assert seconds == sorted(seconds)
    assert seconds[-1] > 0
