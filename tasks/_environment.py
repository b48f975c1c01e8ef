"""Settings that Prefect and MLflow read when imported: import this module before either."""

import contextlib
import os
import re
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from megacore.artifact import Workspace
from megacore.artifact.files import read_json
from megacore.artifact.workspace import require_working_directory
from megacore.errors import ConfigError
from megacore.redact import redact

PREFECT_DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
_PREFECT_DATABASES = {
    PREFECT_DATABASE,
    "PREFECT_API_DATABASE_CONNECTION_URL",
    "PREFECT_SERVER_DATABASE_DRIVER",
    "PREFECT_API_DATABASE_DRIVER",
}
"""Variables by which a user chooses Prefect's database."""
_LOOPBACK = ("127.0.0.1", "localhost")
_PLAIN_SQLITE = re.compile(r"sqlite(?:\+pysqlite)?:///(/[^?%:]+)")
"""URL of an absolute path without characters that have a meaning in URLs."""


def prepare_environment() -> Workspace:
    """Direct all files of Prefect and MLflow into the workspace, and keep both off the network.

    Variables that the user or a server has set (PREFECT_API_URL, MLFLOW_TRACKING_URI, …) stay.
    Raises WorkspaceError when the workspace cannot be written or the working directory is gone.
    """
    require_working_directory()
    workspace = Workspace.of()
    home = workspace.prefect_home
    settings = {
        "MEGACORE_WORKSPACE": str(workspace.root),
        "PREFECT_HOME": str(home),
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "results"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "DO_NOT_TRACK": "true",
        "MLFLOW_TRACKING_URI": tracking_uri(workspace),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    if _is_quoted(home) and not os.environ.keys() & _PREFECT_DATABASES:
        # Prefect would put the path into its URL without quoting it.
        settings[PREFECT_DATABASE] = sqlite_url(home / "prefect.db", "aiosqlite")
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    _reach_loopback_directly()
    address = _mlflow_address(workspace)
    if address and _same_server(os.environ["MLFLOW_TRACKING_URI"], address):
        with contextlib.suppress(OSError, ValueError):  # the servers' user has set another login
            Login.read(workspace).admit_to_mlflow()
    return workspace


def _reach_loopback_directly() -> None:
    """Except the servers on this host from the proxies of the environment.

    Clients would otherwise ask the proxy for 127.0.0.1, which is another host there.
    """
    exceptions = os.environ.get("no_proxy", os.environ.get("NO_PROXY", "")).strip()
    if exceptions != "*":  # which excepts all hosts, but not as one of several
        names = list(filter(None, map(str.strip, exceptions.split(","))))
        missing = [name for name in _LOOPBACK if name not in names]
        exceptions = ",".join([*names, *missing])
    os.environ.update(dict.fromkeys(("no_proxy", "NO_PROXY"), exceptions))


def check_proxies() -> None:
    """Raise ConfigError if Prefect's HTTP client cannot use a proxy of the environment.

    The client is made with all of them, also for servers that it reaches directly.
    """
    from httpx import Client

    try:
        Client(verify=False).close()
    except (ImportError, ValueError) as error:
        proxies = urllib.request.getproxies()
        named = [name for name in ("http", "https", "all") if proxies.get(name)]
        remedy = "correct it or unset it"
        if isinstance(error, ImportError):
            named = [name for name in named if proxies[name].startswith("socks")]
            remedy = "install socksio (`pip install 'httpx[socks]'`), or unset it"
        listed = ", ".join(f"{name}_proxy is {redact(proxies[name])}" for name in named)
        raise ConfigError(
            f"{listed} in the environment, and Prefect's HTTP client cannot use such a proxy: "
            f"{remedy}"
        ) from error


def tracking_uri(workspace: Workspace) -> str:
    """Return the URI of MLflow's SQLite store in the workspace."""
    return sqlite_url(workspace.root / "mlflow.db")


def sqlite_url(path: Path, driver: str = "pysqlite") -> str:
    """Return the URL of a SQLite file, quoted if its path has characters with a meaning in URLs.

    A quoted URL names the driver: MLflow creates the directory of a path after `sqlite:///`, and
    takes it as it is written there, quoted.
    """
    if not _is_quoted(path):
        return f"sqlite{'' if driver == 'pysqlite' else f'+{driver}'}:///{path}"
    from sqlalchemy.engine import URL

    return URL.create(f"sqlite+{driver}", database=str(path)).render_as_string()


def sqlite_file(url: str) -> Path | None:
    """Return the file of a SQLite URL, or None for another database or one in memory."""
    if not url.startswith("sqlite"):
        return None
    plain = _PLAIN_SQLITE.fullmatch(url)
    if plain is not None:  # without the import of sqlalchemy
        return Path(plain[1])
    from sqlalchemy.engine import make_url

    database = make_url(url).database
    return Path(database) if database and not database.startswith((":memory:", "file:")) else None


def file_location(path: Path) -> str:
    """Return `path`, or its URI if it has characters with a meaning in URIs, as MLflow reads it."""
    return path.as_uri() if _is_quoted(path) or "#" in str(path) else str(path)


def _is_quoted(path: Path) -> bool:
    """Return True if the URL of a database needs the path quoted."""
    return "%" in str(path) or "?" in str(path)


@dataclass(frozen=True)
class Login:
    """User and password of the servers of `make server`."""

    name: str
    password: str

    @classmethod
    def read(cls, workspace: Workspace) -> "Login":
        """Read the generated password. Raises OSError or ValueError."""
        name, colon, password = (
            password_file(workspace).read_text(encoding="utf-8").strip().partition(":")
        )
        if not (name and colon and password):
            raise ValueError("it is not name:password")
        return cls(name, password)

    def __str__(self) -> str:
        """Return the login as Prefect takes it."""
        return f"{self.name}:{self.password}"

    def admit_to_mlflow(self) -> None:
        """Let this process's requests to MLflow's server use it, unless the user set another."""
        if "MLFLOW_TRACKING_USERNAME" not in os.environ:
            os.environ["MLFLOW_TRACKING_USERNAME"] = self.name
            os.environ["MLFLOW_TRACKING_PASSWORD"] = self.password


def password_file(workspace: Workspace) -> Path:
    """Return the path of the generated password, `name:password`."""
    return workspace.root / "servers.password"


def mlflow_server(workspace: Workspace) -> str | None:
    """Return the address of the MLflow server of `make server`, or None if it does not answer."""
    address = _mlflow_address(workspace)
    return address if address and answers(f"{address}/health") else None


def _mlflow_address(workspace: Workspace) -> str | None:
    """Return the recorded address of the MLflow server of `make server`."""
    try:
        return str(read_json(workspace.root / "servers.json")["mlflow_url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _same_server(url: str, address: str) -> bool:
    """Return True if both name one server of this host, which has several names for itself."""
    try:
        parts, other = urlsplit(url), urlsplit(address)
        names = {other.hostname, "127.0.0.1", "localhost"}
        return (parts.scheme, parts.port) == (other.scheme, other.port) and parts.hostname in names
    except ValueError:
        return False


def answers(url: str) -> bool:
    """Return True if a server answers at `url` with status 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False
