"""Databases, users and commands of the servers of `make server`.

The data is in the workspace, or where the environment's variables point. The variables are
Prefect's and MLflow's, so the same ones work without `make server`. They are read only from the
environment, because every user of the host can read a command line.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from megacore.artifact import Workspace
from megacore.errors import ConfigError

PREFECT_DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
MLFLOW_DATABASE = "MLFLOW_BACKEND_STORE_URI"
MLFLOW_ARTIFACTS = "MLFLOW_ARTIFACTS_DESTINATION"
MLFLOW_USERS = "MLFLOW_AUTH_CONFIG_PATH"
MLFLOW_SECRET_KEY = "MLFLOW_FLASK_SERVER_SECRET_KEY"
PREFECT_PASSWORD = "PREFECT_SERVER_API_AUTH_STRING"

SERVER_ONLY = frozenset(
    {
        PREFECT_DATABASE,
        PREFECT_PASSWORD,
        MLFLOW_DATABASE,
        MLFLOW_SECRET_KEY,
        MLFLOW_USERS,
        "MLFLOW_AUTH_ADMIN_USERNAME",
        "MLFLOW_AUTH_ADMIN_PASSWORD",
        "PGPASSFILE",
        "PGPASSWORD",
    }
)
"""Credentials of databases and settings of the servers: the worker and its runs get none of
them."""

_DRIVERS = {PREFECT_DATABASE: "postgresql+asyncpg", MLFLOW_DATABASE: "postgresql+psycopg"}
_SQLITE = {PREFECT_DATABASE: "sqlite+aiosqlite", MLFLOW_DATABASE: "sqlite"}


def check_backends() -> None:
    """Raise ConfigError if the environment's settings of databases and users cannot work."""
    for variable, driver in _DRIVERS.items():
        value = os.environ.get(variable, "")
        kind = value.partition("://")[0] if "://" in value else ""
        if value and kind not in (driver, _SQLITE[variable]):
            # A value that is no address is not shown, because it may be a password.
            begins = f"begins with {kind!r}" if kind else "is no address"
            raise ConfigError(
                f"{variable} {begins}: give one that begins with {driver}:// and leaves the "
                "password to the file that PGPASSFILE names"
            )
        if kind == driver and importlib.util.find_spec(driver.partition("+")[2]) is None:
            raise ConfigError(
                f"{variable} names a PostgreSQL database, whose driver is not installed: pip "
                "install -c constraints.txt -e '.[postgres]'"
            )
    if MLFLOW_USERS in os.environ:
        _check_users()


def _check_users() -> None:
    reasons = {
        MLFLOW_DATABASE: "users are asked for by a server that runs write to",
        MLFLOW_SECRET_KEY: "pages with forms are signed with it: openssl rand -hex 32 makes one",
    }
    for variable, reason in reasons.items():
        if not os.environ.get(variable):
            raise ConfigError(f"{MLFLOW_USERS} is set and {variable} is not, and {reason}")
    if not Path(os.environ[MLFLOW_USERS]).is_file():
        raise ConfigError(
            f"{MLFLOW_USERS} is {os.environ[MLFLOW_USERS]!r}, and there is no such file: name "
            "MLflow's basic_auth.ini"
        )
    if importlib.util.find_spec("flask_wtf") is None:
        raise ConfigError(
            f"{MLFLOW_USERS} is set, and flask-wtf, which MLflow's users need, is not installed: "
            "pip install -c constraints.txt -e '.[postgres]'"
        )


def runs_use_server() -> bool:
    """Return True if runs write to MLflow's server.

    They must if the server has its own database, to which runs have no access.
    """
    return bool(os.environ.get(MLFLOW_DATABASE))


def mlflow_command(workspace: Workspace, host: str, port: int) -> list[str]:
    """Return the command of MLflow's server.

    The server uses the database of the environment, or shows the store that runs write to directly.
    """
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        host,
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    if not runs_use_server():
        store = ["--backend-store-uri", workspace.tracking_uri]
        return [
            *command,
            "--no-serve-artifacts",
            *store,
            "--default-artifact-root",
            str(workspace.mlflow_artifacts),
        ]
    # MLflow itself reads the addresses of the database and the artifacts from the environment.
    users = ["--app-name", "basic-auth"] if MLFLOW_USERS in os.environ else []
    return [*command, "--serve-artifacts", *users]


def environment_of(name: str, workspace: Workspace) -> Mapping[str, str]:
    """Return the environment of the process `name` (prefect, mlflow, deploy or worker)."""
    if name in ("prefect", "mlflow"):
        return {MLFLOW_ARTIFACTS: str(workspace.mlflow_artifacts), **os.environ}
    return {
        variable: value for variable, value in os.environ.items() if variable not in SERVER_ONLY
    }
