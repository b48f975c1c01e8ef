"""Publication stage of pretrainings and fine-tunings.

It sends the run and its model to MLflow and writes a receipt.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from prefect import get_run_logger

from megacore.artifact import StageKey, lock
from megacore.artifact.files import read_object, workspace_errors, write_json
from megacore.paths import is_file
from megacore.redact import page_address
from tasks._aliases import alias_problem, standing
from tasks._cache import (
    KeyFunction,
    StageResult,
    artifact_directory,
    artifact_problem,
    build,
    holder_name,
)
from tasks._environment import mlflow_server, tracking_uri
from tasks._flow_config import FlowConfig
from tasks._mlflow import STORE_ERRORS, RunFacts, Tracking, end_trained_run, page_url, runs_url
from tasks._mlflow_events import Forwarder
from tasks._registry import REPORT_FOLDER, published_exists
from tasks._run_page import describe_model, update_run_page

RECEIPT = "receipt.json"
"""Name of the file in a publication's artifact that records what was published."""

REPORT = "report.html"
"""Name of a pretraining's report in its run directory."""
_PUBLICATION = "publication"
"""Name in a run's directory that is locked while the run is published."""


def read_receipt(directory: Path) -> dict[str, str]:
    """Read a receipt: model_name, version, uri, model_id, run_id, digest, model_digest."""
    receipt: dict[str, str] = read_object(directory / RECEIPT)
    return receipt


def receipt_problem(config: FlowConfig, key: StageKey) -> str | None:
    """Return why the model must be published (again).

    None if the registry still has the version named in the receipt, and the alias `candidate` need
    not move.
    """
    problem = artifact_problem(key, config)
    if problem is not None:
        return problem
    tracking, receipt = Tracking.of(config), read_receipt(artifact_directory(key))
    if not published_exists(tracking, receipt):
        return "the model registry no longer has it"
    name, force = receipt["model_name"], config.tracking.force_alias
    return alias_problem(tracking, name, receipt["version"], force=force)


def publication_check(key_of: KeyFunction) -> Callable[..., str | None]:
    """Return the `check` of a publication stage with this key function."""

    def check(config: FlowConfig, *inputs: Any, **named: Any) -> str | None:
        return receipt_problem(config, key_of(config, *inputs, **named))

    return check


def build_publication(
    config: FlowConfig,
    key: StageKey,
    run_directory: Path,
    facts: Callable[[], RunFacts],
    send: Callable[[Tracking, str], dict[str, str]],
) -> StageResult:
    """Publish a run and write its receipt, unless a valid receipt exists.

    The missing events in `run_directory` are sent to MLflow with the `facts`. `send` registers the
    exported model, given the store and the id of the MLflow run, and returns the receipt.

    Raises TrackingError, ConversionError.
    """

    def fill(directory: Path) -> dict[str, Any]:
        tracking, log = Tracking.of(config), get_run_logger()
        # Of two flows that publish a run with different scores, the second finds the first's model.
        with lock(run_directory / _PUBLICATION, holder=holder_name(), on_wait=log.info):
            run_facts = facts()
            run_id = Forwarder(tracking, run_directory, config, run_facts).flush()
            try:
                receipt = send(tracking, run_id)
                results = describe_model(tracking, run_facts, receipt)
                update_run_page(tracking, run_id, run_directory, run_facts, results=results)
            finally:
                # The training is finished even if its publication fails.
                end_trained_run(tracking, run_id, run_directory)
        log.info(
            "registered as version %s; %s",
            receipt["version"],
            standing(tracking, receipt["model_name"], receipt["version"]),
        )
        write_json(directory / RECEIPT, receipt)
        return {
            "model": receipt["model_name"],
            "version": receipt["version"],
            "run_id": receipt["run_id"],
        }

    if receipt_problem(config, key) is not None:
        # A receipt is invalid if its model no longer exists or must get the alias.
        receipt_file = artifact_directory(key) / RECEIPT
        with workspace_errors(receipt_file):
            receipt_file.unlink(missing_ok=True)
    result = build(config, key, fill)
    if Tracking.of(config).keeps_answers:  # to the next run's questions, while mlflow is imported
        with suppress(*STORE_ERRORS):  # it is published
            receipt_problem(config, key)
    return result


def result_lines(
    tracking: Tracking, run_directory: Path, export_directory: Path, published: Path
) -> list[str]:
    """Return markdown lines with the locations of the model, the run and their MLflow pages.

    They include the run's report if it has one.
    """
    receipt, report = read_receipt(published), run_directory / REPORT
    lines = [
        f"- transformers model: `{export_directory / 'model'}`",
        f"- run: `{run_directory}`",
        *mlflow_lines(tracking, receipt),
    ]
    if is_file(report):
        lines.append(f"- report: `{report}`")
        server = shown_by(tracking)
        if server is not None:
            page = run_url(tracking, server, receipt["run_id"], f"{REPORT_FOLDER}/{REPORT}")
            lines.append(f"- report in MLflow: [{REPORT}]({page})")
    return [*lines, ""]


def mlflow_lines(tracking: Tracking, receipt: dict[str, str]) -> list[str]:
    """Return markdown lines with links to a server that shows the store, or how to start one."""
    server = shown_by(tracking)
    alias = standing(tracking, receipt["model_name"], receipt["version"])
    if server is None:
        return [
            f"- registered: `{receipt['uri']}` ({alias})",
            f"- MLflow run `{receipt['run_id']}`: `make server` shows it in a browser",
        ]
    name = quote(receipt["model_name"])  # a space or a bracket would end the link
    model = page_url(server, f"models/{name}/versions/{receipt['version']}")
    return [
        f"- registered: [{receipt['uri']}]({model}) ({alias})",
        f"- MLflow run: [{receipt['run_id']}]({run_url(tracking, server, receipt['run_id'])})",
        f"- all runs by PPL: [{tracking.experiment}]({runs_url(server, tracking.experiment_id)})",
    ]


def shown_by(tracking: Tracking) -> str | None:
    """Return the address of the server that shows the store, or None without one.

    It is for links: it has no credentials.
    """
    if tracking.uri.startswith("http"):
        return page_address(tracking.uri)
    return (
        mlflow_server(tracking.workspace)
        if tracking.uri == tracking_uri(tracking.workspace)
        else None
    )


def run_url(tracking: Tracking, server: str, run_id: str, file: str | None = None) -> str:
    """Return the address of a run's page on a server, in any experiment.

    With `file`, the page shows this artifact of the run.
    """
    experiment = tracking.experiment_of(run_id)
    shown = "" if file is None else f"/artifacts/{file}"
    return page_url(server, f"experiments/{experiment}/runs/{run_id}{shown}")
