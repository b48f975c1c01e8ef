"""Databases and artifact stores of the servers, and the environment of each process."""

import configparser
import os
import stat
from pathlib import Path

import pytest

from megacore.artifact import Workspace
from megacore.errors import ConfigError, WorkspaceError
from scripts import _backends
from scripts._backends import (
    check_backends,
    environment_of,
    generated_login,
    mlflow_command,
    protect,
    write_private,
)
from tasks._environment import Login, password_file, prepare_environment, sqlite_file

POSTGRES = {
    "PREFECT_SERVER_DATABASE_CONNECTION_URL": "postgresql+asyncpg://prefect@127.0.0.1:1/prefect",
    "MLFLOW_BACKEND_STORE_URI": "postgresql+psycopg://mlflow:hidden-word@127.0.0.1:1/mlflow",
    "MLFLOW_FLASK_SERVER_SECRET_KEY": "a-key-of-the-server",
    "PREFECT_SERVER_API_AUTH_STRING": "team:a-password",
    "PGPASSFILE": "pgpass",
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    unset = (
        *_backends.SERVER_ONLY,
        _backends.MLFLOW_ARTIFACTS,
        _backends.MLFLOW_HOSTS,
        _backends.PREFECT_ORIGINS,
        "PREFECT_API_AUTH_STRING",
        "MLFLOW_TRACKING_URI",
        "MLFLOW_TRACKING_USERNAME",
        "MLFLOW_TRACKING_PASSWORD",
    )
    for name in unset:
        monkeypatch.setenv(name, "")  # so that what the test sets is undone
        monkeypatch.delenv(name)
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


PREFECT, MLFLOW = "http://127.0.0.1:4200", "http://127.0.0.1:5000"


def test_password_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        login, created = generated_login(Workspace(tmp_path))
    finally:
        os.umask(umask)
    assert created
    assert stat.S_IMODE(password_file(Workspace(tmp_path)).stat().st_mode) == 0o600
    assert len(login.password) >= 32
    assert generated_login(Workspace(tmp_path)) == (login, False)
    other = Workspace(tmp_path / "other")
    other.root.mkdir()
    assert generated_login(other)[0] != login


def test_private_file_has_its_mode_before_its_content(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Other users could otherwise open it for a moment, and read what is written later."""
    path = tmp_path / "prefect.toml"
    path.write_text("earlier")
    path.chmod(0o644)
    modes = []
    fdopen = open

    def opened(file: int, mode: str, encoding: str) -> object:
        modes.append(stat.S_IMODE(os.fstat(file).st_mode))
        return fdopen(file, mode, encoding=encoding)

    monkeypatch.setattr(_backends, "open", opened, raising=False)
    write_private(path, "name:password")
    assert modes == [0o600]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == "name:password"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [("megacore:secret-word", 0o640, "has mode 0640"), ("secret-word", 0o600, "not name:password")],
)
def test_known_or_damaged_password_is_refused_without_being_shown(
    tmp_path: Path, content: str, mode: int, message: str
) -> None:
    path = password_file(Workspace(tmp_path))
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(WorkspaceError, match=message) as refused:
        generated_login(Workspace(tmp_path))
    assert "delete it" in str(refused.value)
    assert "secret-word" not in str(refused.value)


def test_servers_get_the_generated_password_and_clients_theirs(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workspace = Workspace(tmp_path / "100% mine")
    workspace.root.mkdir()
    environment.setenv("PREFECT_API_AUTH_STRING", "another:servers")
    assert protect(workspace, PREFECT, MLFLOW) == (["Prefect", "MLflow"], True)
    login = Login.read(workspace)
    server, worker = environment_of("prefect", workspace), environment_of("worker", workspace)
    assert server["PREFECT_SERVER_API_AUTH_STRING"] == str(login)
    assert server["MLFLOW_AUTH_ADMIN_PASSWORD"] == login.password
    assert server["PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"] == f"{PREFECT},http://localhost:4200"
    assert worker["PREFECT_API_AUTH_STRING"] == str(login)
    assert "MLFLOW_TRACKING_PASSWORD" not in worker, "it writes to the file"
    settings = configparser.ConfigParser()
    settings.read(server["MLFLOW_AUTH_CONFIG_PATH"])
    users = workspace.root / "servers" / "mlflow_users.db"
    assert sqlite_file(settings["mlflow"]["database_uri"]) == users


def test_users_of_an_earlier_password_are_forgotten(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    users = tmp_path / "servers" / "mlflow_users.db"
    users.parent.mkdir()
    users.write_text("a hash")
    protect(Workspace(tmp_path), PREFECT, MLFLOW)
    assert not users.exists()
    users.write_text("a hash")
    environment.delenv("MLFLOW_AUTH_CONFIG_PATH")
    protect(Workspace(tmp_path), PREFECT, MLFLOW)
    assert users.exists()


def test_password_of_the_environment_is_used_and_not_written(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_all(environment, {**POSTGRES, "MLFLOW_AUTH_CONFIG_PATH": "users.ini"})
    assert protect(Workspace(tmp_path), PREFECT, MLFLOW) == ([], False)
    assert os.environ["PREFECT_API_AUTH_STRING"] == "team:a-password"
    assert list(tmp_path.iterdir()) == []


def test_only_the_workspaces_own_mlflow_server_is_sent_its_password(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setattr(os, "environ", {**os.environ, "MEGACORE_WORKSPACE": str(tmp_path)})
    login, _ = generated_login(Workspace(tmp_path))
    (tmp_path / "servers.json").write_text(f'{{"mlflow_url": "{MLFLOW}"}}')
    for address, password in (("https://mlflow.example.org", None), (MLFLOW, login.password)):
        environment.setenv("MLFLOW_TRACKING_URI", address)
        prepare_environment()
        assert os.environ.get("MLFLOW_TRACKING_PASSWORD") == password
