"""Measurements of the machine while a run trains, and the reason why an attempt ends."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megacore.config import RunConfig
from megacore.errors import PreemptedError, RankLostError, TrainingStoppedError
from tasks._live_run import AVERAGED, LiveRun, SystemMetrics, exit_reason
from tasks._mlflow import RunFacts, Tracking, ensure_run
from tasks._mlflow_events import Forwarder
from tests._limits import HANG
from tests.tasks.events import EventLog

CPU = "system/cpu_utilization_percentage"


@pytest.fixture
def run_id(tracking: Tracking, run_directory: Path, config: RunConfig, facts: RunFacts) -> str:
    """Provide a running MLflow run."""
    return ensure_run(tracking, run_directory, config, facts)


def poll_until(done: Callable[[], bool], metrics: SystemMetrics, run_id: str) -> None:
    deadline = time.monotonic() + HANG
    while not done():
        assert time.monotonic() < deadline
        metrics.poll(run_id)
        time.sleep(0.02)


def steps(tracking: Tracking, run_id: str) -> list[int]:
    return [metric.step for metric in tracking.client.get_metric_history(run_id, CPU)]


def test_next_attempt_continues_the_curves(
    tracking: Tracking, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks._live_run._LONGEST_STOP", HANG)
    for expected in (2, 4):
        metrics = SystemMetrics(tracking.uri, interval=0.05)
        poll_until(lambda: len(steps(tracking, run_id)) >= expected, metrics, run_id)  # noqa: B023
        metrics.stop()
        assert not metrics.measures
    measured = steps(tracking, run_id)
    assert sorted(measured) == list(range(len(measured)))


def test_monitor_that_ended_is_started_again(tracking: Tracking, run_id: str) -> None:
    metrics = SystemMetrics(tracking.uri, interval=0.05)
    poll_until(lambda: metrics.measures, metrics, run_id)
    tracking.client.set_terminated(run_id, "FAILED")  # ends it as an unavailable store does
    deadline = time.monotonic() + HANG
    while metrics.measures:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    tracking.client.update_run(run_id, status="RUNNING")
    known = len(steps(tracking, run_id))
    poll_until(lambda: len(steps(tracking, run_id)) > known, metrics, run_id)
    metrics.stop()


def test_unavailable_store_delays_nothing(tmp_path: Path) -> None:
    metrics = SystemMetrics(f"sqlite:///{tmp_path}/missing/mlflow.db", interval=0.01)
    started = time.monotonic()
    for _ in range(5):
        metrics.poll("0" * 32)
    metrics.stop()
    assert time.monotonic() - started < 60, "MLflow tries for minutes"
    assert not metrics.measures


@pytest.mark.parametrize(("variable", "expected"), [(None, AVERAGED), ("2", 2)])
def test_a_long_attempt_sends_means(
    tracking: Tracking,
    run_id: str,
    variable: str | None,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLES_BEFORE_LOGGING", variable)
    metrics = SystemMetrics(tracking.uri, interval=0.05)
    poll_until(lambda: metrics.measures, metrics, run_id)
    monitor = metrics._monitor
    assert monitor is not None
    assert monitor.samples_before_logging == int(variable or 1)
    monkeypatch.setattr("tasks._live_run.DENSE_SECONDS", 0.0)
    metrics.poll(run_id)
    assert monitor.samples_before_logging == expected
    metrics.stop()


@pytest.mark.parametrize("system_metrics", [True, False])
def test_run_is_measured_only_if_configured(
    tracking: Tracking,
    run_directory: Path,
    config: RunConfig,
    facts: RunFacts,
    log: EventLog,
    system_metrics: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tasks._live_run.INTERVAL", 0.05)
    log.step(10)
    values = {"tracking": {"system_metrics": system_metrics}}
    chosen = RunConfig.model_validate(config.model_dump() | values)
    forwarder = Forwarder(tracking, run_directory, chosen, facts)
    deadline = time.monotonic() + HANG
    with LiveRun(forwarder, 1) as live:
        while forwarder.run_id is None or (
            system_metrics and not steps(tracking, forwarder.run_id)
        ):
            assert time.monotonic() < deadline
            live.poll()
            time.sleep(0.02)
        for _ in range(10):
            live.poll()
    run_id = forwarder.finish()
    assert bool(steps(tracking, run_id)) == system_metrics


def test_exit_reason_comes_from_events_and_error(log: EventLog) -> None:
    path = log.path
    assert exit_reason(path, 1, None) == "finished"
    events = [
        {"kind": "exit", "attempt": 1, "reason": "signal"},
        {"kind": "exit", "attempt": 2, "reason": "stop_file"},
    ]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert exit_reason(path, 1, PreemptedError("x")) == "signal"
    assert exit_reason(path, 2, TrainingStoppedError("x")) == "stop_file"
    assert exit_reason(path, 3, TrainingStoppedError("x")) == "TrainingStoppedError"
    assert exit_reason(path, 2, RankLostError("x")) == "RankLostError"
    assert exit_reason(path, 1, KeyboardInterrupt()) == "signal", "they saved in the grace"
    assert exit_reason(path, 3, KeyboardInterrupt()) == "KeyboardInterrupt", "they did not"
