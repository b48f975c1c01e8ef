"""What a publication left: a receipt in its artifact, and where MLflow shows it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacore.artifact import StageKey
from megacore.artifact.files import write_json
from tasks._cache import StageResult, artifact_directory, artifact_problem, build
from tasks._environment import mlflow_server
from tasks._flow_config import FlowConfig
from tasks._mlflow import Tracking

RECEIPT = "receipt.json"


def read_receipt(directory: Path) -> dict[str, str]:
    """What was published: model_name, version, uri, model_id, run_id, digest."""
    receipt: dict[str, str] = json.loads((directory / RECEIPT).read_text(encoding="utf-8"))
    return receipt


def receipt_problem(config: FlowConfig, key: StageKey, tracking: Tracking) -> str | None:
    """Why the model must be published (again); None when the registry still has what the receipt says."""
    from tasks._registry import published_exists

    problem = artifact_problem(key, config)
    if problem is None and not published_exists(tracking, read_receipt(artifact_directory(key))):
        return "the model registry no longer has it"
    return problem


def build_publication(
    config: FlowConfig, key: StageKey, tracking: Tracking, publish: Callable[[], dict[str, str]]
) -> StageResult:
    """The artifact of a publication: what `publish` returns is its receipt, unless one is there that still holds."""

    def fill(directory: Path) -> dict[str, Any]:
        receipt = publish()
        write_json(directory / RECEIPT, receipt)
        return {"model": receipt["model_name"], "version": receipt["version"], "run_id": receipt["run_id"]}

    if receipt_problem(config, key, tracking) is not None:
        # A receipt for what is no longer there counts for nothing.
        (artifact_directory(key) / RECEIPT).unlink(missing_ok=True)
    return build(config, key, fill)


def mlflow_places(tracking: Tracking, receipt: dict[str, str]) -> list[str]:
    """Links where a server shows the store, else names and how to start one, as lines of markdown."""
    server = shown_by(tracking)
    if server is None:
        return [
            f"- registered: `{receipt['uri']}` (alias candidate)",
            f"- MLflow run `{receipt['run_id']}`: `make server` shows it in a browser",
        ]
    model = f"{server}/#/models/{receipt['model_name']}/versions/{receipt['version']}"
    return [
        f"- registered: [{receipt['uri']}]({model}) (alias candidate)",
        f"- MLflow run: [{receipt['run_id']}]({run_url(tracking, server, receipt['run_id'])})",
    ]


def shown_by(tracking: Tracking) -> str | None:
    """Address of the server that shows the store; None without one."""
    if tracking.uri.startswith("http"):
        return tracking.uri
    return mlflow_server(tracking.workspace) if tracking.uri == tracking.workspace.tracking_uri else None


def run_url(tracking: Tracking, server: str, run_id: str) -> str:
    """Where a server shows a run, of whichever experiment."""
    with tracking.errors(f"look up run {run_id}"):
        experiment = tracking.client.get_run(run_id).info.experiment_id
    return f"{server}/#/experiments/{experiment}/runs/{run_id}"
