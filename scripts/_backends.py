"""Where the servers of `make server` keep what they know.

In the workspace, or where the environment says.

The variables are Prefect's and MLflow's own, so that the same ones work without `make server`. They
come from the environment alone: a command line can be read by every user of the machine.
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
"""What lets somebody into a database, or is the servers' own: the worker and its runs get none of
it."""

_DRIVERS = {PREFECT_DATABASE: "postgresql+asyncpg", MLFLOW_DATABASE: "postgresql+psycopg"}
_SQLITE = {PREFECT_DATABASE: "sqlite+aiosqlite", MLFLOW_DATABASE: "sqlite"}


def check_backends() -> None:
    """Raise ConfigError where what the environment says of the databases and users cannot work."""
    for variable, driver in _DRIVERS.items():
        value = os.environ.get(variable, "")
        kind = value.partition("://")[0] if "://" in value else ""
        if value and kind not in (driver, _SQLITE[variable]):
            # Of a value that is no address nothing is shown: it may be a password.
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
    for needed, why in reasons.items():
        if not os.environ.get(needed):
            raise ConfigError(f"{MLFLOW_USERS} is set and {needed} is not, and {why}")
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
    """Whether runs write to MLflow's server.

    It has a database of its own, which they do not know.
    """
    return bool(os.environ.get(MLFLOW_DATABASE))


def mlflow_command(workspace: Workspace, host: str, port: int) -> list[str]:
    """MLflow's server.

    It is on the database of the environment, or a view on the store that runs write to directly.
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
    # The database and the place of the artifacts are in the environment, which MLflow reads itself.
    users = ["--app-name", "basic-auth"] if MLFLOW_USERS in os.environ else []
    return [*command, "--serve-artifacts", *users]


def environment_of(name: str, workspace: Workspace) -> Mapping[str, str]:
    """What the process `name` (prefect, mlflow, deploy or worker) gets of this environment."""
    if name in ("prefect", "mlflow"):
        return {MLFLOW_ARTIFACTS: str(workspace.mlflow_artifacts), **os.environ}
    return {
        variable: value for variable, value in os.environ.items() if variable not in SERVER_ONLY
    }
