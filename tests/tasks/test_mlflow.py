"""The single MLflow run of a run directory."""

import errno
import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from mlflow.exceptions import MlflowException
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

import tasks._mlflow
from megacore.artifact import Workspace, lock
from megacore.artifact.build import try_lock
from megacore.artifact.files import write_json
from megacore.config import RunConfig
from megacore.errors import MegacoreError, TrackingError, WorkspaceError
from megacore.redact import redact
from tasks._environment import file_location, sqlite_file, sqlite_url
from tasks._mlflow import (
    RUN_ID_FILE,
    RunFacts,
    Tracking,
    create_store,
    end_run,
    end_trained_run,
    ensure_run,
    flatten,
    git_facts,
    page_url,
    runs_url,
)
from tests.tasks.conftest import KilledError, make_config


def all_runs(tracking: Tracking) -> list[str]:
    return [run.info.run_id for run in tracking.client.search_runs([tracking.experiment_id])]


def noted_run_id(run_directory: Path) -> str | None:
    """Return the run id noted in the run directory."""
    run_id: str | None = json.loads((run_directory / RUN_ID_FILE).read_text())["run_id"]
    return run_id


def test_store_is_created_atomically(tmp_path: Path) -> None:
    path = tmp_path / "new" / "mlflow.db"
    uri = f"sqlite:///{path}"
    stale = tmp_path / "new" / "mlflow.db.tmp-1"
    stale.parent.mkdir()
    stale.write_text("half a store")

    def raise_killed(engine: object) -> None:
        raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlflow.store.db.utils._initialize_tables", raise_killed)
        with pytest.raises(KilledError):
            create_store(uri)
    assert not path.exists()
    create_store(uri)
    written = path.read_bytes()
    create_store(uri)
    assert path.read_bytes() == written
    assert [file.name for file in path.parent.iterdir() if "tmp" in file.name] == []
    create_store("http://127.0.0.1:1")


def test_pages_open_with_the_views_of_model_training(tracking: Tracking) -> None:
    experiment = tracking.client.get_experiment(tracking.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    assert page_url("http://host:5000", "experiments/1/runs/2") == (
        "http://host:5000/#/experiments/1/runs/2?workflowType=machine_learning"
    )


def test_view_by_perplexity_is_made_once_and_repaired(tracking: Tracking) -> None:
    def view() -> str:
        experiment = Tracking(tracking.workspace, "pretrain").experiment_id
        tags: dict[str, str] = tracking.client.get_experiment(experiment).tags
        return tags["mlflow.sharedViewState.by-ppl"]

    state = json.loads(view())
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`valid_ppl`", True)
    shown = {"metrics.`valid_ppl`", "metrics.`test_ppl`", "tags.`tokens`", "tags.`step`"}
    assert shown <= set(state["selectedColumns"])
    # MLflow does not fill in what a shared view lacks: its page would fail.
    assert {"runsPinned", "runsExpanded", "columnOrder", "globalLineChartConfig"} <= state.keys()
    tracking.client.delete_experiment_tag(tracking.experiment_id, "mlflow.sharedViewState.by-ppl")
    assert json.loads(view()) == state
    assert runs_url("http://host:5000", "1") == (
        "http://host:5000/#/experiments/1/runs?workflowType=machine_learning"
        "&viewStateShareKey=by-ppl"
    )


def test_run_has_config_versions_and_data_sets(
    tracking: Tracking, run_directory: Path, config: RunConfig, facts: RunFacts
) -> None:
    run_id = ensure_run(tracking, run_directory, config, facts)
    assert (
        ensure_run(tracking, run_directory, config, facts) == run_id == noted_run_id(run_directory)
    )
    assert all_runs(tracking) == [run_id]
    run = tracking.client.get_run(run_id)
    assert run.info.run_name == "gpt2-test.v1-01234567"
    assert run.data.params["train.train_iters"] == "100"
    assert run.data.params["data.tokenizer.kind"] == "train-bpe"
    assert run.data.tags["version.torch"]
    assert run.data.tags["flow_run"] == "daring-lynx"
    (dataset,) = run.inputs.dataset_inputs
    assert dataset.dataset.digest == "f" * 36
    assert json.loads(dataset.dataset.profile) == {"tokens": 1000}
    text = (
        tracking.workspace.mlflow_artifacts / "pretrain" / run_id / "artifacts" / "config.yaml"
    ).read_text()
    assert "train_iters: 100" in text


def test_nothing_is_written_outside_the_workspace(
    tracking: Tracking,
    run_directory: Path,
    config: RunConfig,
    facts: RunFacts,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    ensure_run(tracking, run_directory, config, facts)
    assert list(elsewhere.iterdir()) == []


def test_kill_between_creating_and_noting_a_run_creates_no_second(
    tracking: Tracking,
    run_directory: Path,
    config: RunConfig,
    facts: RunFacts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raise_killed_at_the_second_write(path: Path, value: dict[str, str | None]) -> None:
        if value["run_id"] is not None:
            raise KilledError
        write_json(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(tasks._mlflow, "write_json", raise_killed_at_the_second_write)
        with pytest.raises(KilledError):
            ensure_run(tracking, run_directory, config, facts)
    (created,) = all_runs(tracking)
    assert noted_run_id(run_directory) is None
    assert ensure_run(tracking, run_directory, config, facts) == created
    assert all_runs(tracking) == [created]


def test_kill_while_describing_the_run_is_repaired(
    tracking: Tracking,
    run_directory: Path,
    config: RunConfig,
    facts: RunFacts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raise_killed(*_: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(tasks._mlflow, "log_datasets", raise_killed)
        with pytest.raises(KilledError):
            ensure_run(tracking, run_directory, config, facts)
    run = tracking.client.get_run(ensure_run(tracking, run_directory, config, facts))
    assert len(run.inputs.dataset_inputs) == 1


def test_run_missing_in_the_store_is_created_again(
    tracking: Tracking, run_directory: Path, config: RunConfig, facts: RunFacts
) -> None:
    first = ensure_run(tracking, run_directory, config, facts)
    tracking.client.delete_run(first)
    second = ensure_run(tracking, run_directory, config, facts)
    write_json(run_directory / RUN_ID_FILE, {"token": "t", "run_id": "0" * 32})
    third = ensure_run(tracking, run_directory, config, facts)
    assert len({first, second, third}) == 3


def test_deleted_run_file_starts_another_run(
    tracking: Tracking, run_directory: Path, config: RunConfig, facts: RunFacts
) -> None:
    first = ensure_run(tracking, run_directory, config, facts)
    (run_directory / RUN_ID_FILE).unlink()
    assert ensure_run(tracking, run_directory, config, facts) != first


def test_extended_run_is_reopened_and_tagged_with_changes(
    tracking: Tracking, run_directory: Path, config: RunConfig, facts: RunFacts
) -> None:
    run_id = ensure_run(tracking, run_directory, config, facts)
    end_run(tracking, run_id)
    assert tracking.client.get_run(run_id).info.status == "FINISHED"
    for train_iters in (200, 100):
        assert (
            ensure_run(tracking, run_directory, make_config(train_iters=train_iters), facts)
            == run_id
        )
        run = tracking.client.get_run(run_id)
        assert run.info.status == "RUNNING"
        assert run.data.params["train.train_iters"] == "100"
        assert run.data.tags["changed.train.train_iters"] == str(train_iters)


@pytest.mark.parametrize("damage", ["garbage", "cut"])
def test_damaged_store_is_to_be_restored_or_moved_away(
    tmp_path: Path,
    tracking: Tracking,
    run_directory: Path,
    config: RunConfig,
    facts: RunFacts,
    damage: str,
) -> None:
    path = tmp_path / "mlflow.db"
    content = path.read_bytes()
    path.write_bytes(b"x" * 20000 if damage == "garbage" else content[: len(content) // 2])
    with pytest.raises(TrackingError, match=r"restore .*mlflow\.db from a copy, or move it away"):
        ensure_run(tracking, run_directory, config, facts)


def test_publication_does_not_end_a_run_that_another_flow_extends(
    tracking: Tracking, run_directory: Path, config: RunConfig, facts: RunFacts
) -> None:
    run_id = ensure_run(tracking, run_directory, config, facts)
    for shared, status in ((False, "RUNNING"), (True, "FINISHED")):
        with lock(run_directory, shared=shared):
            end_trained_run(tracking, run_id, run_directory)
        assert tracking.client.get_run(run_id).info.status == status


def test_a_flow_that_extends_a_run_waits_until_its_publication_has_ended_it(
    tracking: Tracking,
    run_directory: Path,
    config: RunConfig,
    facts: RunFacts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_id = ensure_run(tracking, run_directory, config, facts)
    end, extended = tracking.client.set_terminated, []

    def ended(*arguments: Any) -> None:
        with try_lock(run_directory) as free:
            extended.append(free)
        end(*arguments)

    monkeypatch.setattr(tracking.client, "set_terminated", ended)
    end_trained_run(tracking, run_id, run_directory)
    assert extended == [False]
    assert tracking.client.get_run(run_id).info.status == "FINISHED"
    with try_lock(run_directory) as free:
        assert free


def test_store_of_a_moved_workspace_warns_of_files_at_its_old_place(
    tmp_path: Path, tracking: Tracking, caplog: pytest.LogCaptureFixture
) -> None:
    assert tracking.experiment_id
    shutil.copytree(tmp_path, moved := tmp_path.with_name("moved to"))
    assert Tracking(Workspace(moved), "pretrain").experiment_id == tracking.experiment_id
    assert f"has the files of experiment 'pretrain' in {tmp_path}/mlartifacts" in caplog.text
    assert f"`ln -s '{moved}' {tmp_path}`" in caplog.text
    caplog.clear()
    shutil.rmtree(tmp_path)
    tmp_path.symlink_to(moved)
    assert Tracking(Workspace(moved), "pretrain").experiment_id
    assert not caplog.text


def test_experiment_named_like_a_path_keeps_its_files_in_the_workspace(
    tracking: Tracking, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = Tracking(tracking.workspace, "/team/gpt2")
    experiment = named.client.get_experiment(named.experiment_id)
    assert experiment.artifact_location == (tmp_path / "mlartifacts" / "team" / "gpt2").as_uri()
    shutil.copytree(tmp_path, moved := tmp_path.with_name("moved"))
    assert Tracking(Workspace(moved), "/team/gpt2").experiment_id == named.experiment_id
    assert f"`ln -s {moved} {tmp_path}`" in caplog.text


def test_deleted_experiment_is_refused(
    tracking: Tracking, run_directory: Path, config: RunConfig, facts: RunFacts
) -> None:
    tracking.client.delete_experiment(tracking.experiment_id)
    second_tracking = Tracking(tracking.workspace, "pretrain")
    with pytest.raises(TrackingError, match="experiment 'pretrain' was deleted in MLflow"):
        ensure_run(second_tracking, run_directory, config, facts)


def test_store_from_the_environment_is_used_without_showing_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Tracking(Workspace(tmp_path), "x").uri == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    tracking = Tracking(Workspace(tmp_path), "x")
    with pytest.raises(TrackingError) as caught:
        _ = tracking.experiment_id
    assert "did not open experiment 'x'" in str(caught.value)
    assert "secret" not in str(caught.value)


FULL = OperationalError(
    "INSERT INTO tags", {}, sqlite3.OperationalError("database or disk is full")
)
LOCKED = OperationalError("INSERT INTO tags", {}, sqlite3.OperationalError("database is locked"))


@pytest.mark.parametrize(
    ("uri", "error", "kind", "message"),
    [
        (
            "",
            MlflowException(str(FULL)),
            WorkspaceError,
            r"MLflow cannot write .*mlflow\.db: database or",
        ),
        ("", FULL, WorkspaceError, r"disk is full; .* are free in "),
        ("", LOCKED, TrackingError, "did not start: .* database is locked: check that it is up"),
        ("http://host", MlflowException(str(FULL)), TrackingError, "did not start: .*disk is full"),
        (
            "http://host",
            OSError(errno.ENOSPC, "No space", "a/b"),
            WorkspaceError,
            "free some space",
        ),
        ("http://host", ConnectionError("refused"), TrackingError, "did not start: refused"),
    ],
)
def test_full_disk_is_no_fault_of_a_server(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uri: str,
    error: Exception,
    kind: type[MegacoreError],
    message: str,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with (
        pytest.raises(kind, match=message) as caught,
        Tracking(Workspace(tmp_path), "x").errors("start"),
    ):
        raise error
    assert caught.value.retryable == (kind is TrackingError)


def test_flatten_redacts_and_truncates() -> None:
    flat = flatten(
        {"a": {"b": 1, "c": None}, "d": [1, 2], "e": {}, "f": "x" * 7000, "g": "s3://me:pw@host/p"}
    )
    assert flat == {
        "a.b": "1",
        "a.c": "null",
        "d": "[1, 2]",
        "e": "{}",
        "f": "x" * 6000,
        "g": "s3://***@host/p",
    }
    assert redact("https://host/d?sv=1&api_key=abc&x=2") == "https://host/d?sv=1&***&x=2"


def test_git_facts_name_commit_and_dirty_state(tmp_path: Path) -> None:
    assert git_facts(tmp_path) == {}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "m"], check=True)
    clean = git_facts(tmp_path)
    assert len(clean["mlflow.source.git.commit"]) == 40
    assert clean["megacore.git_dirty"] == "false"
    (tmp_path / "file").write_text("2")
    assert git_facts(tmp_path)["megacore.git_dirty"] == "true"


def test_mlflow_is_imported_lazily() -> None:
    code = (
        "import sys, tasks._mlflow, tasks._mlflow_events, tasks._registry, "
        "tasks._checkpoint_models, tasks._plots\n"
        "assert not {'mlflow', 'matplotlib', 'torch', 'prefect'} & set(sys.modules), 'imported too "
        "early'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_urls_of_databases_lead_to_their_file(tmp_path: Path) -> None:
    directory = tmp_path / 'it\'s a "täst" 100%?#1 50%20'
    directory.mkdir()
    for file, driver in (
        (directory / "mlflow.db", "pysqlite"),
        (tmp_path / "plain.db", "pysqlite"),
    ):
        url = sqlite_url(file, driver)
        engine = create_engine(url)
        with engine.connect() as connection:
            connection.execute(text("CREATE TABLE t (x INTEGER)"))
        engine.dispose()
        assert file.exists()
        assert sqlite_file(url) == file
        assert unquote(urlsplit(file_location(file)).path) == str(file)
    assert {path.name for path in tmp_path.iterdir()} == {directory.name, "plain.db"}
    assert sqlite_url(tmp_path / "plain.db", "aiosqlite") == (
        f"sqlite+aiosqlite:///{tmp_path}/plain.db"
    )
    assert sqlite_file("postgresql+psycopg://host/db") is None


def test_answers_are_kept_until_the_store_changes(
    tracking: Tracking, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(name: str, *, write: bool = False) -> int:
        asked.append(name)
        if write:
            tracking.client.set_experiment_tag(tracking.experiment_id, "asked", str(len(asked)))
        return len(asked)

    assert tracking.experiment_id
    assert [tracking.recall(["a", 1], lambda: ask("a")) for _ in range(2)] == [1, 1]
    assert tracking.recall(["b"], lambda: ask("b")) == 2
    assert Tracking(tracking.workspace, "other").recall(["a", 1], lambda: ask("a")) == 1
    assert tracking.recall(["c"], lambda: ask("c", write=True)) == 3
    assert tracking.recall(["c"], lambda: ask("c")) == 4, "the first one changed the store"
    assert tracking.recall(["a", 1], lambda: ask("a")) == 5
    Path(f"{tracking.uri.removeprefix('sqlite:///')}-wal").touch()
    assert tracking.recall(["a", 1], lambda: ask("a")) == 6, "changes may be in the log"
    monkeypatch.setattr(tracking, "uri", "http://127.0.0.1:9")
    assert tracking.recall(["a", 1], lambda: ask("a")) == 7
    assert not tracking.keeps_answers
