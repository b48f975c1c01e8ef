"""Publication as a stage, of pretrainings and fine-tunings.

The run and its model in MLflow, and a receipt for it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacore.artifact import StageKey, Workspace
from megacore.artifact.files import read_json, write_json
from tasks._cache import StageResult, artifact_directory, artifact_problem, build
from tasks._environment import mlflow_server
from tasks._flow_config import FlowConfig
from tasks._forward import Forwarder, RunFacts
from tasks._mlflow import Tracking, end_run
from tasks._registry import published_exists

RECEIPT = "receipt.json"
"""File of a publication's artifact: what was published."""


def read_receipt(directory: Path) -> dict[str, str]:
    """What was published: model_name, version, uri, model_id, run_id, digest."""
    receipt: dict[str, str] = read_json(directory / RECEIPT)
    return receipt


def tracking_of(config: FlowConfig) -> Tracking:
    """The MLflow store of a run, and its experiment."""
    return Tracking(Workspace.of(), config.tracking.experiment)


def receipt_problem(config: FlowConfig, key: StageKey) -> str | None:
    """Why the model must be published (again).

    None when the registry still has what the receipt says.
    """
    problem = artifact_problem(key, config)
    if problem is None and not published_exists(
        tracking_of(config), read_receipt(artifact_directory(key))
    ):
        return "the model registry no longer has it"
    return problem


def build_publication(
    config: FlowConfig,
    key: StageKey,
    run_directory: Path,
    facts: Callable[[], RunFacts],
    send: Callable[[Tracking, str], dict[str, str]],
) -> StageResult:
    """Publish a run, unless its receipt is there and still holds; the artifact holds the receipt.

    Args:
        config: of the run.
        key: of the publication.
        run_directory: of the run; MLflow gets what it lacks of its events.
        facts: what MLflow records of the run beside its configuration.
        send: given the store and the MLflow run, registers the exported model and returns the
            receipt.

    Raises TrackingError, ConversionError.
    """

    def fill(directory: Path) -> dict[str, Any]:
        tracking = tracking_of(config)
        run_id = Forwarder(tracking, run_directory, config, facts()).flush()
        try:
            receipt = send(tracking, run_id)
        finally:
            # The training is finished whatever becomes of its publication.
            end_run(tracking, run_id)
        write_json(directory / RECEIPT, receipt)
        return {
            "model": receipt["model_name"],
            "version": receipt["version"],
            "run_id": receipt["run_id"],
        }

    if receipt_problem(config, key) is not None:
        # A receipt for what is no longer there counts for nothing.
        (artifact_directory(key) / RECEIPT).unlink(missing_ok=True)
    return build(config, key, fill)


def places(
    tracking: Tracking, run_directory: Path, export_directory: Path, published: Path
) -> list[str]:
    """Where the model, the run and their pages in MLflow are, as lines of markdown."""
    return [
        f"- transformers model: `{export_directory / 'model'}`",
        f"- run: `{run_directory}`",
        *mlflow_places(tracking, read_receipt(published)),
        "",
    ]


def mlflow_places(tracking: Tracking, receipt: dict[str, str]) -> list[str]:
    """Links where a server shows the store, else how to start one, as lines of markdown."""
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
    return (
        mlflow_server(tracking.workspace)
        if tracking.uri == tracking.workspace.tracking_uri
        else None
    )


def run_url(tracking: Tracking, server: str, run_id: str) -> str:
    """Where a server shows a run, of whichever experiment."""
    with tracking.errors(f"look up run {run_id}"):
        experiment = tracking.client.get_run(run_id).info.experiment_id
    return f"{server}/#/experiments/{experiment}/runs/{run_id}"
