"""Settings that Prefect and MLflow read when imported: import this module before either."""

import os
import urllib.request

from megacore.artifact import Workspace
from megacore.artifact.files import read_json


def prepare_environment() -> Workspace:
    """Put everything Prefect and MLflow write into the workspace, and keep both off the network.

    What the user or a server has set already (PREFECT_API_URL, MLFLOW_TRACKING_URI, …) stays.
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
    """Address of the MLflow server that `make server` has started and that answers, or None."""
    try:
        address = str(read_json(workspace.root / "servers.json")["mlflow_url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return address if answers(f"{address}/health") else None


def answers(url: str) -> bool:
    """Whether a server answers there with success."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False
