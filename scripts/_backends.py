"""Databases, users and commands of the servers of `make server`.

The data is in the workspace, or where the environment's variables point. The variables are
Prefect's and MLflow's, so the same ones work without `make server`. They are read only from the
environment, because every user of the host can read a command line.

Whoever reaches Prefect's server runs code in its worker, so both servers ask for a password. Where
the environment names none, it is made for the workspace.
"""

import configparser
import importlib.util
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from megacore.artifact import Workspace
from megacore.artifact.files import reason_of
from megacore.errors import ConfigError, WorkspaceError
from tasks._environment import (
    PREFECT_DATABASE,
    Login,
    file_location,
    password_file,
    sqlite_url,
    tracking_uri,
)

MLFLOW_DATABASE = "MLFLOW_BACKEND_STORE_URI"
MLFLOW_ARTIFACTS = "MLFLOW_ARTIFACTS_DESTINATION"
MLFLOW_USERS = "MLFLOW_AUTH_CONFIG_PATH"
MLFLOW_ADMIN = "MLFLOW_AUTH_ADMIN_USERNAME"
MLFLOW_ADMIN_PASSWORD = "MLFLOW_AUTH_ADMIN_PASSWORD"
MLFLOW_SECRET_KEY = "MLFLOW_FLASK_SERVER_SECRET_KEY"
PREFECT_PASSWORD = "PREFECT_SERVER_API_AUTH_STRING"
PREFECT_ORIGINS = "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"
MLFLOW_HOSTS = "MLFLOW_SERVER_ALLOWED_HOSTS"

USER = "megacore"
"""Name in the generated password of both servers."""

SERVER_ONLY = frozenset(
    {
        PREFECT_DATABASE,
        PREFECT_PASSWORD,
        MLFLOW_DATABASE,
        MLFLOW_SECRET_KEY,
        MLFLOW_USERS,
        MLFLOW_ADMIN,
        MLFLOW_ADMIN_PASSWORD,
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
    if importlib.util.find_spec("flask_wtf") is None:
        raise ConfigError(
            "flask-wtf, which MLflow's server needs to ask for a password, is not installed: pip "
            "install -c constraints.txt -e '.[flows]'"
        )
    if os.environ.get(MLFLOW_USERS):
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


def generated_login(workspace: Workspace) -> tuple[Login, bool]:
    """Return the password of the workspace's servers, and True if it was made now.

    The file has mode 0600 from its creation on. Raises WorkspaceError if other users of the host
    can read it or it is damaged: who has read it runs code.
    """
    path = password_file(workspace)
    try:
        created = not path.exists()
        if created:
            _users_database(workspace).unlink(missing_ok=True)  # has the hash of an earlier one
            write_private(path, f"{USER}:{secrets.token_urlsafe(24)}\n")
        status = path.stat()
        login = Login.read(workspace)
    except (OSError, ValueError) as error:
        raise WorkspaceError(
            f"{path}, the password of the servers, cannot be used ({reason_of(error)}): delete it, "
            "then make server makes another; a workspace has servers of one user"
        ) from error
    if status.st_mode & 0o077 or status.st_uid != os.getuid():
        if created:
            path.unlink()
            raise WorkspaceError(
                f"{path.parent} does not keep the modes of files, so others could read the "
                "password of the servers: set MEGACORE_WORKSPACE to a file system that does"
            )
        raise WorkspaceError(
            f"{path}, the password of the servers, has mode {status.st_mode & 0o777:04o} and owner "
            f"{status.st_uid}, so others may know it: delete it, then make server makes another"
        )
    return login, created


def write_private(path: Path, text: str) -> None:
    """Replace `path` with `text`, which at no time another user of the host can read."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def protect(workspace: Workspace, prefect_url: str, mlflow_url: str) -> tuple[list[str], bool]:
    """Set the variables by which both servers refuse others, and our clients are admitted.

    Returns the servers with the workspace's generated password, and True if it was made now. What
    the environment sets stays.
    """
    port = prefect_url.rpartition(":")[2]
    os.environ.setdefault(PREFECT_ORIGINS, f"{prefect_url},http://localhost:{port}")
    # Any port, because it may be forwarded from another one. MLflow's default also admits names
    # such as 10.example.org, which its owner can let point to this host.
    os.environ.setdefault(MLFLOW_HOSTS, "127.0.0.1:*,localhost:*")
    generated = [
        server
        for server, variable in (("Prefect", PREFECT_PASSWORD), ("MLflow", MLFLOW_USERS))
        if not os.environ.get(variable)
    ]
    created = False
    if generated:
        login, created = generated_login(workspace)
        if "Prefect" in generated:
            os.environ[PREFECT_PASSWORD] = str(login)
        if "MLflow" in generated:
            _add_user(workspace, login)
            if mlflow_url == os.environ.get("MLFLOW_TRACKING_URI"):
                login.admit_to_mlflow()
    os.environ["PREFECT_API_AUTH_STRING"] = os.environ[PREFECT_PASSWORD]
    return generated, created


def _users_database(workspace: Workspace) -> Path:
    """Return the path of the database of MLflow's users."""
    return workspace.root / "servers" / "mlflow_users.db"


def _add_user(workspace: Workspace, login: Login) -> None:
    """Set the variables of MLflow's users: the only one is the generated login."""
    database = _users_database(workspace)
    database.parent.mkdir(exist_ok=True)
    settings = database.with_suffix(".ini")
    parser = configparser.RawConfigParser()
    parser["mlflow"] = {
        "database_uri": sqlite_url(database).replace("%", "%%"),
        "default_permission": "NO_PERMISSIONS",
        "authorization_function": "mlflow.server.auth:authenticate_request_basic_auth",
        "auth_cache_ttl_seconds": "60",  # a password is checked in tens of milliseconds by design
    }
    with open(settings, "w", encoding="utf-8") as file:
        parser.write(file)
    os.environ.update(
        {
            MLFLOW_USERS: str(settings),
            MLFLOW_ADMIN: login.name,
            MLFLOW_ADMIN_PASSWORD: login.password,
        }
    )
    os.environ.setdefault(MLFLOW_SECRET_KEY, secrets.token_hex(32))


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
        "--app-name",
        "basic-auth",
    ]
    if not runs_use_server():
        store = ["--backend-store-uri", tracking_uri(workspace)]
        return [
            *command,
            "--no-serve-artifacts",
            *store,
            "--default-artifact-root",
            file_location(workspace.mlflow_artifacts),
        ]
    # MLflow itself reads the addresses of the database and the artifacts from the environment.
    return [*command, "--serve-artifacts"]


def environment_of(name: str, workspace: Workspace) -> Mapping[str, str]:
    """Return the environment of the process `name` (prefect, mlflow, deploy or worker)."""
    if name in ("prefect", "mlflow"):
        return {MLFLOW_ARTIFACTS: file_location(workspace.mlflow_artifacts), **os.environ}
    return {
        variable: value for variable, value in os.environ.items() if variable not in SERVER_ONLY
    }
