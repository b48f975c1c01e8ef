"""The report of a comparison in MLflow, and its table in Prefect."""

import json
from pathlib import Path

import pytest

from flows import compare as flow
from megacore.compare.runs import compare_runs
from megacore.errors import LaunchError, TrackingError
from tasks._mlflow import Tracking
from tasks.compare import REPORT, log_report, table
from tests.compare._runs import Written, since, write


def test_a_report_is_a_run_with_its_causes(tracking: Tracking, tmp_path: Path) -> None:
    a = write(tmp_path / "a", Written(), tmp_path / "data")
    b = write(tmp_path / "b", Written({"seed": 7}, noise=since(1)), tmp_path / "data")
    report = compare_runs(a, b).to_json()
    run = tracking.client.get_run(log_report(tracking, report))
    assert run.info.status == "FINISHED"
    assert run.data.tags["megacore.compare.causes"] == "seed"
    assert run.data.tags["mlflow.note.content"] == "A and B differ: seed."
    path = tracking.client.download_artifacts(run.info.run_id, REPORT, str(tmp_path))
    assert json.loads(Path(path).read_text(encoding="utf-8"))["causes"] == ["seed"]
    assert {row["cause"] for row in table(report)} == {"seed"}


def test_a_report_that_mlflow_does_not_take_leaves_no_running_run(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    def refuse(*_: object) -> None:
        raise MlflowException("no room")

    a, b = (write(tmp_path / name, Written(), tmp_path / "data") for name in "ab")
    monkeypatch.setattr(MlflowClient, "log_text", refuse)
    with pytest.raises(TrackingError, match="no room"):
        log_report(tracking, compare_runs(a, b).to_json())
    (run,) = tracking.client.search_runs([tracking.experiment_id])
    assert run.info.status == "FAILED"


def test_a_server_that_does_not_answer_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise LaunchError("the Prefect server does not answer")

    monkeypatch.setattr(flow, "require_server", refuse)
    monkeypatch.setattr("sys.argv", ["compare", "a", "b"])
    assert flow.main() == 2
    assert capsys.readouterr().err == "error: the Prefect server does not answer\n"
