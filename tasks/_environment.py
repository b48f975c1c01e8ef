"""Settings that Prefect and MLflow read when imported: import this module before either."""

import os
import urllib.request

from megacore.artifact import Workspace
from megacore.artifact.files import read_json


def prepare_environment() -> Workspace:
    """Direct all files of Prefect and MLflow into the workspace, and keep both off the network.

    Variables that the user or a server has set (PREFECT_API_URL, MLFLOW_TRACKING_URI, …) stay.
    Raises WorkspaceError when the workspace cannot be written.
    """
    workspace = Workspace.of()
    home = workspace.prefect_home
    settings = {
        "MEGACORE_WORKSPACE": str(workspace.root),
        "PREFECT_HOME": str(home),
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "results"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "DO_NOT_TRACK": "true",
        "MLFLOW_TRACKING_URI": workspace.tracking_uri,
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    return workspace


def mlflow_server(workspace: Workspace) -> str | None:
    """Return the address of the MLflow server of `make server`, or None if it does not answer."""
    try:
        address = str(read_json(workspace.root / "servers.json")["mlflow_url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return address if answers(f"{address}/health") else None


def answers(url: str) -> bool:
    """Return True if a server answers at `url` with status 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False
