"""The doctor's check before a training on several hosts, and its report in the run."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prefect
import prefect.runtime
import pytest

from megacore.config import RunConfig
from megacore.doctor.findings import Examination, Finding
from megacore.errors import LaunchError
from megacore.jobs.run import TrainJob
from tasks._doctor import PREFLIGHT_FILE, check_hosts, send_preflight
from tasks._mlflow import RunFacts, Tracking
from tasks._mlflow_events import Forwarder
from tests.tasks.events import EventLog
from tests.train import _runs

GOOD = Finding("disk", "ok", {"a": "much"})
TIGHT = Finding("disk", "warning", {"b": "little"}, "b has 1 GiB free: make room", ("b",))
BROKEN = Finding(
    "packages", "error", {"b": "torch 1"}, "torch is 1 on b and 2 on a: install the same", ("b",)
)


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> "SimpleNamespace":
    """Provide the doctor's calls; it returns `findings`."""
    doctor = SimpleNamespace(findings=(GOOD,), calls=[], run_count=1)

    def examine(subject: Any, *, full: bool) -> Examination:
        doctor.calls.append((dict(subject.hosts), full))
        return Examination(subject.hosts, doctor.findings, "full" if full else "quick")

    monkeypatch.setattr("megacore.doctor.examine.examine", examine)
    monkeypatch.setattr(prefect, "get_run_logger", lambda: logging.getLogger("doctor"))
    monkeypatch.setattr(prefect.runtime, "task_run", doctor)
    return doctor


def job(place: Path, monkeypatch: pytest.MonkeyPatch, **launch: Any) -> TrainJob:
    """Return a job on two hosts."""
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(place))
    (place / "hosts").write_text("a slots=1\nb slots=1\n")
    values = {"hostfile": str(place / "hosts"), "nproc_per_node": "auto", **launch}
    (place / "run").mkdir()
    return _runs.job(_runs.config(launch=values), place, place / "run", ranks=2)


def test_hosts_are_examined_and_the_report_is_saved(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    doctor: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
) -> None:
    doctor.findings = (GOOD, TIGHT)
    check_hosts(job(tmp_path, monkeypatch))
    assert doctor.calls == [({"a": 1, "b": 1}, False)]
    report = json.loads((tmp_path / "run" / PREFLIGHT_FILE).read_text())
    assert (report["verdict"], report["mode"]) == ("warning", "quick")
    assert "disk on b: b has 1 GiB free: make room" in caplog.text


def test_error_stops_the_start_with_host_and_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doctor: SimpleNamespace
) -> None:
    doctor.findings = (TIGHT, BROKEN)
    with pytest.raises(
        LaunchError, match=r"packages on b: torch is 1 on b and 2 on a: install the same \("
    ) as raised:
        check_hosts(job(tmp_path, monkeypatch))
    assert not raised.value.retryable
    assert (
        json.loads((tmp_path / "run" / PREFLIGHT_FILE).read_text())["checks"][0]["check"]
        == "packages"
    )


def test_full_preflight_runs_all_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doctor: SimpleNamespace
) -> None:
    check_hosts(job(tmp_path, monkeypatch, preflight="full"))
    assert [full for _, full in doctor.calls] == [True]


@pytest.mark.parametrize("case", ["off", "retry", "one host"])
def test_hosts_are_not_examined_when_off_retried_or_single(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doctor: SimpleNamespace, case: str
) -> None:
    launch: dict[str, Any] = {"off": {"preflight": "off"}, "one host": {"hostfile": None}}.get(
        case, {}
    )
    doctor.run_count = 2 if case == "retry" else 1
    check_hosts(job(tmp_path, monkeypatch, **launch))
    assert doctor.calls == []
    assert not (tmp_path / "run" / PREFLIGHT_FILE).exists()


def test_report_is_logged_to_the_run_once(
    tracking: Tracking, run_directory: Path, config: RunConfig, facts: RunFacts, log: EventLog
) -> None:
    (run_directory / PREFLIGHT_FILE).write_text('{"verdict": "ok"}')
    log.step(10)
    run_id = Forwarder(tracking, run_directory, config, facts, interval=0.0).finish()
    assert PREFLIGHT_FILE in {file.path for file in tracking.client.list_artifacts(run_id)}
    sent: list[str] = []
    log_artifact = tracking.client.log_artifact
    tracking.client.log_artifact = lambda run, path: sent.append(path) or log_artifact(run, path)  # type: ignore
    send_preflight(tracking, run_id, run_directory)
    assert sent == []
    (run_directory / PREFLIGHT_FILE).write_text('{"verdict": "warning"}')
    send_preflight(tracking, run_id, run_directory)
    assert sent == [str(run_directory / PREFLIGHT_FILE)]


def test_run_on_one_host_has_no_report(
    tracking: Tracking, run_directory: Path, config: RunConfig, facts: RunFacts, log: EventLog
) -> None:
    log.step(10)
    run_id = Forwarder(tracking, run_directory, config, facts, interval=0.0).finish()
    assert PREFLIGHT_FILE not in {file.path for file in tracking.client.list_artifacts(run_id)}
