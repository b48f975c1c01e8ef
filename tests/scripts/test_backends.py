"""Databases and artifact stores of the servers, and the environment of each process."""

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


def test_default_database_is_in_the_workspace(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_backends()
    command = mlflow_command(Workspace(tmp_path), "127.0.0.1", 5000)
    assert f"sqlite:///{tmp_path / 'mlflow.db'}" in command
    assert "--no-serve-artifacts" in command
    assert not _backends.runs_use_server()


def test_database_address_is_in_no_argument(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    users = tmp_path / "users.ini"
    users.touch()
    set_all(environment, {**POSTGRES, "MLFLOW_AUTH_CONFIG_PATH": str(users)})
    check_backends()
    command = mlflow_command(Workspace(tmp_path), "127.0.0.1", 5000)
    assert command[command.index("--app-name") + 1] == "basic-auth"
    assert "--serve-artifacts" in command
    assert not any("postgresql" in word or "hidden-word" in word for word in command)


def test_artifacts_are_in_the_workspace_by_default(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_all(environment, POSTGRES)
    workspace = Workspace(tmp_path)
    assert environment_of("mlflow", workspace)["MLFLOW_ARTIFACTS_DESTINATION"] == str(
        tmp_path / "mlartifacts"
    )
    environment.setenv("MLFLOW_ARTIFACTS_DESTINATION", "s3://bucket/path")
    assert environment_of("mlflow", workspace)["MLFLOW_ARTIFACTS_DESTINATION"] == "s3://bucket/path"


def test_only_the_servers_get_the_database_variables(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_all(environment, POSTGRES)
    for name in ("prefect", "mlflow"):
        assert set(POSTGRES) <= set(environment_of(name, Workspace(tmp_path)))
    for name in ("worker", "deploy"):
        assert not set(POSTGRES) & set(environment_of(name, Workspace(tmp_path)))


@pytest.mark.parametrize(
    ("variable", "value", "message"),
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
def test_unsupported_database_is_refused_without_its_password(
    environment: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    environment.setenv(variable, value)
    with pytest.raises(ConfigError, match=variable) as refused:
        check_backends()
    assert message in str(refused.value)
    assert "secret" not in str(refused.value)


def test_missing_driver_is_refused_with_its_installation_command(
    environment: pytest.MonkeyPatch,
) -> None:
    set_all(environment, POSTGRES)
    environment.setattr(_backends.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"driver is not installed: pip install -c constraints.txt -e '.\[postgres\]'",
    ):
        check_backends()


def test_authentication_without_database_key_or_user_file_is_refused(
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
