"""Where the servers keep their data: what the environment may say, and what reaches whom."""

from pathlib import Path

import pytest

from megacore.artifact import Workspace
from megacore.errors import ConfigError
from scripts import _backends
from scripts._backends import check_backends, environment_of, mlflow_command

POSTGRES = {
    "PREFECT_SERVER_DATABASE_CONNECTION_URL": "postgresql+asyncpg://prefect@127.0.0.1:1/prefect",
    "MLFLOW_BACKEND_STORE_URI": "postgresql+psycopg://mlflow:hidden-word@127.0.0.1:1/mlflow",
    "MLFLOW_FLASK_SERVER_SECRET_KEY": "a-key-of-the-server",
    "PREFECT_SERVER_API_AUTH_STRING": "team:a-password",
    "PGPASSFILE": "pgpass",
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*_backends.SERVER_ONLY, _backends.MLFLOW_ARTIFACTS):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def set_all(environment: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        environment.setenv(name, value)


def test_nothing_said_is_the_workspaces_own(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_backends()
    words = mlflow_command(Workspace(tmp_path), "127.0.0.1", 5000)
    assert f"sqlite:///{tmp_path / 'mlflow.db'}" in words
    assert "--no-serve-artifacts" in words
    assert not _backends.runs_use_server()


def test_a_database_is_in_no_argument(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    users = tmp_path / "users.ini"
    users.touch()
    set_all(environment, {**POSTGRES, "MLFLOW_AUTH_CONFIG_PATH": str(users)})
    check_backends()
    words = mlflow_command(Workspace(tmp_path), "127.0.0.1", 5000)
    assert words[words.index("--app-name") + 1] == "basic-auth"
    assert "--serve-artifacts" in words
    assert not any("postgresql" in word or "hidden-word" in word for word in words)


def test_artifacts_lie_in_the_workspace_unless_said_otherwise(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_all(environment, POSTGRES)
    workspace = Workspace(tmp_path)
    assert environment_of("mlflow", workspace)["MLFLOW_ARTIFACTS_DESTINATION"] == str(
        tmp_path / "mlartifacts"
    )
    environment.setenv("MLFLOW_ARTIFACTS_DESTINATION", "s3://bucket/path")
    assert environment_of("mlflow", workspace)["MLFLOW_ARTIFACTS_DESTINATION"] == "s3://bucket/path"


def test_servers_know_the_databases_and_nobody_else(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_all(environment, POSTGRES)
    for name in ("prefect", "mlflow"):
        assert set(POSTGRES) <= set(environment_of(name, Workspace(tmp_path)))
    for name in ("worker", "deploy"):
        assert not set(POSTGRES) & set(environment_of(name, Workspace(tmp_path)))


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        (
            "PREFECT_SERVER_DATABASE_CONNECTION_URL",
            "postgresql://a:secret@b/c",
            "begins with 'postgresql': give one that begins with postgresql+asyncpg://",
        ),
        (
            "MLFLOW_BACKEND_STORE_URI",
            "postgresql+psycopg2://a:secret@b/c",
            "begins with 'postgresql+psycopg2': give one that begins with postgresql+psycopg://",
        ),
        ("MLFLOW_BACKEND_STORE_URI", "mlflow:secret@b/c", "is no address"),
    ],
)
def test_a_database_of_another_kind_is_refused(
    environment: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    environment.setenv(variable, value)
    with pytest.raises(ConfigError, match=variable) as refused:
        check_backends()
    assert said in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_driver_that_is_missing_is_named(environment: pytest.MonkeyPatch) -> None:
    set_all(environment, POSTGRES)
    environment.setattr(_backends.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"driver is not installed: pip install -c constraints.txt -e '.\[postgres\]'",
    ):
        check_backends()


def test_users_need_a_database_a_key_and_their_file(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setenv("MLFLOW_AUTH_CONFIG_PATH", str(tmp_path / "none.ini"))
    with pytest.raises(ConfigError, match="MLFLOW_BACKEND_STORE_URI is not"):
        check_backends()
    set_all(
        environment, {name: value for name, value in POSTGRES.items() if "SECRET_KEY" not in name}
    )
    with pytest.raises(ConfigError, match="MLFLOW_FLASK_SERVER_SECRET_KEY is not"):
        check_backends()
    set_all(environment, POSTGRES)
    with pytest.raises(ConfigError, match="no such file"):
        check_backends()
