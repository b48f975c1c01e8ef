"""The description, logs and events of a run in MLflow."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import tasks._run_page
from megacore.config import RunConfig
from megacore.plan.epochs import Epochs
from tasks._mlflow import RunFacts, Tracking
from tasks._mlflow_events import Forwarder
from tasks._run_page import NOTE, NOTE_DIGEST, describe_model, note_tags, update_run_page
from tests.tasks.conftest import KilledError
from tests.tasks.events import EventLog


@pytest.fixture
def run_id(
    tracking: Tracking, run_directory: Path, config: RunConfig, facts: RunFacts, log: EventLog
) -> str:
    """Provide the MLflow run of two attempts with two checkpoints, the first of them killed."""
    log.start()
    log.step(10)
    log.checkpoint(10, loss=3.0)
    log.attempt = 2
    log.start(10)
    log.step(20)
    log.checkpoint(20, loss=2.0)
    log.deleted(10)
    logs = run_directory / "logs"
    logs.mkdir()
    for number in (1, 2):
        (logs / f"attempt-00{number}.log").write_text(f"line of {number}\n")
    return Forwarder(tracking, run_directory, config, facts).flush()


def artifacts_of(tracking: Tracking, run_id: str) -> Path:
    return tracking.workspace.mlflow_artifacts / "pretrain" / run_id / "artifacts"


def note(tracking: Tracking, run_id: str) -> str:
    text: str = tracking.client.get_run(run_id).data.tags[NOTE]
    return text


def test_description_and_metric_have_the_epochs(
    tracking: Tracking, run_directory: Path, config: RunConfig, facts: RunFacts, log: EventLog
) -> None:
    log.start()
    repeated = replace(facts, epochs=Epochs(900, 100, (("/data/a.jsonl", 9.0),)))
    run_id = Forwarder(tracking, run_directory, config, repeated).flush()
    update_run_page(tracking, run_id, run_directory, repeated)
    lines = note(tracking, run_id).splitlines()
    assert "- epochs: 9 (900 tokens of training over 100 tokens of the train split)" in lines
    assert any(line.startswith("- **warning:** the training makes 9 epochs") for line in lines)
    assert tracking.client.get_run(run_id).data.metrics["epochs"] == 9.0


def test_description_has_data_checkpoints_by_perplexity_and_attempts(
    tracking: Tracking, run_directory: Path, facts: RunFacts, run_id: str
) -> None:
    update_run_page(tracking, run_id, run_directory, facts, results=["**good**"], ending="signal")
    lines = note(tracking, run_id).splitlines()
    assert lines[0] == "**good**"
    assert "- tokens data: `tokenize-abababababababab`, 1,000 tokens" in lines
    rows = [line.split(" | ") for line in lines if line.startswith("| [")]
    assert [(row[1], row[3].rstrip(" |")) for row in rows] == [("20", "7.3891"), ("10", "20.086")]
    assert rows[0][0].startswith("| [gpt2-test-v1-iter_0000020](#/experiments/")
    assert rows[0][0].endswith("?workflowType=machine_learning)")
    assert rows[1][0].endswith(") (deleted)")
    attempts = [line.strip("| ").split(" | ") for line in lines[-2:]]
    assert [(row[0], row[1], row[3]) for row in attempts] == [
        ("2", "10 to 20", "signal"),
        ("1", "0 to 10", "killed or lost"),
    ]
    assert tracking.client.get_run(run_id).data.tags["attempts"] == "2"


def test_logs_and_events_are_artifacts_without_secrets_and_bounded(
    tracking: Tracking,
    run_directory: Path,
    facts: RunFacts,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HUB_TOKEN", "not-for-everybody")
    monkeypatch.setattr(tasks._run_page, "_FILE_LIMIT", 40)
    log = run_directory / "logs" / "attempt-002.log"
    log.write_text("a first line that is too long to be kept\nnot-for-everybody\nlast\n")
    update_run_page(tracking, run_id, run_directory, facts)
    folder = artifacts_of(tracking, run_id) / "logs"
    assert (folder / "attempt-001.log").read_text() == "line of 1\n"
    assert (folder / "attempt-002.log").read_text() == "***\nlast\n"
    monkeypatch.setattr(tasks._run_page, "_FILE_LIMIT", 1 << 20)
    (folder / "attempt-001.log").write_text("sent")
    log.write_text("more\n")
    update_run_page(tracking, run_id, run_directory, facts)
    assert (folder / "attempt-001.log").read_text() == "sent", "a finished log is sent once"
    assert (folder / "attempt-002.log").read_text() == "more\n"
    events = (artifacts_of(tracking, run_id) / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in events][-1] == "checkpoint_deleted"


def test_the_newest_log_is_that_of_the_highest_attempt(
    tracking: Tracking, run_directory: Path, facts: RunFacts, run_id: str
) -> None:
    logs = [run_directory / "logs" / f"attempt-{number}.log" for number in (999, 1000)]
    for text in ("first", "second"):
        for log in logs:
            log.write_text(text)
        update_run_page(tracking, run_id, run_directory, facts)
    sent = artifacts_of(tracking, run_id) / "logs"
    assert [(sent / log.name).read_text() for log in logs] == ["first", "second"]


def test_edited_description_is_left_alone(
    tracking: Tracking, run_directory: Path, facts: RunFacts, run_id: str
) -> None:
    update_run_page(tracking, run_id, run_directory, facts, results=["first"])
    update_run_page(tracking, run_id, run_directory, facts, results=["second"])
    assert note(tracking, run_id).startswith("second")
    for edit in ("my own words", ""):
        tracking.client.set_tag(run_id, NOTE, edit)
        update_run_page(tracking, run_id, run_directory, facts, results=["third"])
        assert note(tracking, run_id) == edit


def test_same_description_is_not_written_again() -> None:
    tags = note_tags("text", {})
    assert tags[NOTE] == "text"
    assert note_tags("text", tags) == {}
    assert note_tags("x" * 9000, {})[NOTE] == "x" * 4900


@pytest.fixture
def receipt(tracking: Tracking, run_id: str) -> dict[str, str]:
    """Provide the receipt of a registered model with a test PPL."""
    from mlflow.entities import Metric

    client = tracking.client
    model = client.create_logged_model(
        tracking.experiment_id, name="m", source_run_id=run_id, params={"step": "20"}
    )
    values = {"unigram_test_ppl": 100.0, "test_ppl": 8.5, "valid_ppl": 7.25}
    client.log_batch(
        run_id, [Metric(k, v, 1, 20, model_id=model.model_id) for k, v in values.items()]
    )
    client.create_registered_model("m")
    client.create_model_version("m", "file:///nowhere", run_id)
    return {
        "model_name": "m",
        "version": "1",
        "uri": "models:/m/1",
        "model_id": model.model_id,
        "run_id": run_id,
    }


def test_model_version_and_registered_model_are_described(
    tracking: Tracking, facts: RunFacts, receipt: dict[str, str]
) -> None:
    results = describe_model(tracking, facts, receipt)
    assert results[0] == "**test PPL 8.5, validation PPL 7.25, unigram test PPL 100**"
    version = tracking.client.get_model_version("m", "1")
    assert version.description.startswith("\n".join(results))
    assert f"- MLflow run: `{receipt['run_id']}`" in version.description
    model = tracking.client.get_logged_model(receipt["model_id"])
    assert model.tags[NOTE] == version.description
    assert "`models:/m@candidate`" in tracking.client.get_registered_model("m").description


def test_crash_while_describing_a_version_is_repaired_and_an_edit_kept(
    tracking: Tracking,
    facts: RunFacts,
    receipt: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    crash: Callable[..., None],
) -> None:
    from mlflow import MlflowClient

    for moment, ppl in enumerate((8.25, 8.0), start=2):
        model = {"model_id": receipt["model_id"], "step": 20, "timestamp": moment}
        tracking.client.log_metric(receipt["run_id"], "test_ppl", ppl, **model)
        with monkeypatch.context() as patch:
            patch.setattr(MlflowClient, "update_model_version", crash)
            with pytest.raises(KilledError):
                describe_model(tracking, facts, receipt)
        describe_model(tracking, facts, receipt)
    version = tracking.client.get_model_version("m", "1")
    assert version.description.startswith("**test PPL 8,")
    assert len(version.tags[NOTE_DIGEST].split()) == 1
    tracking.client.update_model_version("m", "1", "mine")
    describe_model(tracking, facts, receipt)
    assert tracking.client.get_model_version("m", "1").description == "mine"
