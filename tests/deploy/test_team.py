"""A team's servers: the flow on PostgreSQL with passwords, and a backup restored after a loss."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil
import pytest

from scripts._backends import SERVER_ONLY
from tests.deploy._postgres import Postgres, running
from tests.deploy._team import NAME, Team

pytest.importorskip("psycopg")
pytest.importorskip("flask_wtf")


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    root = tmp_path_factory.mktemp("team")
    with running(root) as postgres:
        postgres.create_databases()
        team = Team(root, postgres)
        try:
            yield team
        finally:
            team.clone.servers("stop")


@pytest.mark.long
def test_run_on_postgresql_survives_backup_and_restore(team: Team, tmp_path: Path) -> None:
    team.start()
    check_that_passwords_are_required(team)
    check_that_the_worker_has_no_database_settings(team)
    check_that_deploying_needs_the_password(team)
    team.run()
    before = server_contents(team)
    check_that_the_run_is_complete(team, before)
    check_that_no_secret_is_visible(team)

    copied = team.script("backup.sh", tmp_path / "copy")
    assert copied.returncode == 0, copied.stderr
    check_that_existing_data_is_not_overwritten(team, tmp_path / "copy")
    assert team.clone.servers("stop").returncode == 0
    team.postgres.drop_databases()
    shutil.rmtree(team.artifacts)
    shutil.rmtree(team.clone.workspace)

    team.postgres.create_databases()
    restored = team.script("restore.sh", tmp_path / "copy")
    assert restored.returncode == 0, restored.stderr
    team.start()
    after = server_contents(team)
    assert after == before
    check_that_the_run_is_complete(team, after)


def server_contents(team: Team) -> dict[str, Any]:
    """Return the servers' records of the run, without values that change on their own."""
    experiment = team.ask_mlflow("mlflow/experiments/get-by-name?experiment_name=pretrain")[
        "experiment"
    ]
    (run,) = team.ask_mlflow(
        "mlflow/runs/search", {"experiment_ids": [experiment["experiment_id"]]}
    )["runs"]
    models = team.ask_mlflow(
        "mlflow/logged-models/search", {"experiment_ids": [experiment["experiment_id"]]}
    )
    version = team.ask_mlflow(f"mlflow/registered-models/alias?name={NAME}&alias=candidate")[
        "model_version"
    ]
    files = team.ask_mlflow(f"mlflow/artifacts/list?run_id={run['info']['run_id']}")["files"]
    (flow_run,) = team.ask_prefect("flow_runs/filter", {})
    tasks = team.ask_prefect("task_runs/filter", {})
    losses = f"mlflow/metrics/get-history?run_id={run['info']['run_id']}&metric_key=train/lm_loss"
    return {
        "run": run["info"]["run_id"],
        "status": run["info"]["status"],
        "metrics": sorted((metric["key"], metric["value"]) for metric in run["data"]["metrics"]),
        "losses": team.ask_mlflow(losses)["metrics"],
        "params": sorted((param["key"], param["value"]) for param in run["data"]["params"]),
        "models": sorted(
            (model["info"]["model_type"], model["info"]["name"]) for model in models["models"]
        ),
        "version": (version["version"], version["source"], version["run_id"]),
        "files": sorted(file["path"] for file in files),
        "flow run": (flow_run["id"], flow_run["state_type"]),
        "tasks": sorted((task["name"], task["state_type"]) for task in tasks),
        "share": {
            str(path.relative_to(team.artifacts)): path.read_bytes()
            for path in team.artifacts.rglob("*")
            if path.is_file()
        },
    }


def check_that_the_run_is_complete(team: Team, contents: dict[str, Any]) -> None:
    assert contents["status"] == "FINISHED"
    assert [point["step"] for point in contents["losses"]] == [1, 2, 3]
    assert {"test_ppl", "valid_ppl"} <= {name.rpartition("/")[2] for name, _ in contents["metrics"]}
    assert ("data.seq_length", "32") in contents["params"]
    assert contents["models"] == [
        ("checkpoint", f"{NAME}-iter_0000002"),
        ("checkpoint", f"{NAME}-iter_0000003"),
        ("transformers", NAME),
    ]
    assert contents["version"][0] == "1"
    assert contents["version"][1].startswith("mlflow-artifacts:/")
    files = ["config.yaml", "evaluation.json", "events.jsonl", "export", "logs", "plots", "report"]
    assert contents["files"] == files
    assert any(name.endswith("artifacts/model/model.safetensors") for name in contents["share"])
    assert contents["flow run"][1] == "COMPLETED"
    assert len(contents["tasks"]) == 11
    assert {state for _, state in contents["tasks"]} == {"COMPLETED"}
    in_database = team.postgres.superuser(
        "--dbname", "mlflow", "--tuples-only", "--command", "SELECT run_uuid FROM runs"
    )
    assert in_database.stdout.split() == [contents["run"]]
    assert not (team.clone.workspace / "mlflow.db").exists()
    assert not list((team.clone.workspace / "prefect").glob("*.db"))


def check_that_passwords_are_required(team: Team) -> None:
    for question in (
        lambda: team.ask_prefect("flow_runs/filter", {}, password=""),
        lambda: team.ask_prefect("flow_runs/filter", {}, password="team:wrong"),
        lambda: team.ask_mlflow("mlflow/experiments/search?max_results=1", user=None),
        lambda: team.ask_mlflow("mlflow/experiments/search?max_results=1", user="somebody"),
    ):
        with pytest.raises(HTTPError) as refused:
            question()
        assert refused.value.code == 401


def check_that_the_worker_has_no_database_settings(team: Team) -> None:
    worker = psutil.Process(team.clone.state()["processes"]["worker"]["pid"]).environ()
    assert SERVER_ONLY & set(worker) == set()
    assert worker["PREFECT_API_AUTH_STRING"] == team.prefect_password
    assert worker["MLFLOW_TRACKING_URI"] == team.mlflow


def check_that_deploying_needs_the_password(team: Team) -> None:
    refused = team.deploy("team:wrong")
    assert refused.returncode == 8
    assert refused.stderr.startswith(
        f"error: the Prefect server at {team.prefect}/api did not take it"
    )
    assert refused.stderr.count("\n") == 1
    assert team.deploy(team.prefect_password).returncode == 0


def check_that_no_secret_is_visible(team: Team) -> None:
    lines = [
        psutil.Process(pid).cmdline() for pid in team.clone.left_over(team.clone.state()["token"])
    ]
    assert len(lines) >= 3
    texts = {"a command line": str(lines), "PostgreSQL's log": team.postgres.log()}
    for path in team.clone.root.rglob("*"):
        if path.is_file():
            texts[str(path)] = path.read_text(encoding="utf-8", errors="replace")
    assert [
        place for place, text in texts.items() for secret in team.secrets if secret in text
    ] == []


def check_that_existing_data_is_not_overwritten(team: Team, copy: Path) -> None:
    refused = team.script("restore.sh", copy)
    assert refused.returncode == 1
    assert "database prefect holds" in refused.stderr
    repeated = team.script("backup.sh", copy)
    assert repeated.returncode == 1
    assert "already exists" in repeated.stderr


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Postgres]:
    with running(tmp_path) as postgres:
        yield postgres


def test_databases_are_not_created_without_passwords(empty: Postgres) -> None:
    empty.passwords = {"mlflow": "only this one"}
    with pytest.raises(AssertionError, match="syntax error"):
        empty.create_databases()
    roles = empty.superuser(
        "--tuples-only", "--command", "SELECT rolname FROM pg_roles WHERE rolcanlogin"
    )
    assert roles.stdout.split() == ["admin"]
    assert "only this one" not in empty.log()


def test_only_dropped_databases_are_created_again(empty: Postgres) -> None:
    """A restore needs this: the users and the other databases still exist."""
    empty.create_databases()
    commands = (
        "COMMENT ON DATABASE prefect IS 'the old one'; DROP DATABASE mlflow; DROP DATABASE "
        "mlflow_users;"
    )
    assert empty.superuser("--set", "ON_ERROR_STOP=1", stdin=commands).returncode == 0
    empty.create_databases()
    query = (
        "SELECT datname, pg_get_userbyid(datdba), coalesce(shobj_description(oid, 'pg_database'), "
        "'-') FROM pg_database WHERE datname IN ('prefect', 'mlflow', 'mlflow_users') ORDER BY 1"
    )
    rows = empty.superuser("--tuples-only", "--no-align", "--command", query).stdout.split("\n")[:3]
    assert rows == ["mlflow|mlflow|-", "mlflow_users|mlflow|-", "prefect|prefect|the old one"]
    assert not [password for password in empty.passwords.values() if password in empty.log()]
