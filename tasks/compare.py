"""Task `compare`: the comparison of two models or runs, as a table in Prefect and in MLflow."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact

from megacore.artifact import Workspace
from megacore.redact import redact
from tasks._environment import prepare_environment
from tasks._mlflow import STORE_ERRORS, Tracking, end_run

EXPERIMENT = "comparisons"
"""Experiment of MLflow with one run per comparison."""
REPORT = "compare.json"
_KEY = "comparison"
_TAG_LENGTH = 250


@task(name="compare")
def compare(a: str, b: str, kind: str | None = None) -> dict[str, Any]:
    """Compare two models or runs, show the differences, and log the report to MLflow.

    Returns the report as values of JSON. Raises MegacoreError if they cannot be compared.
    """
    from megacore.compare import compare_paths

    prepare_environment()
    report = compare_paths(a, b, kind=kind).to_json()
    get_run_logger().info(report["verdict"])
    create_table_artifact(table(report), key=_KEY, description=report["verdict"])
    log_report(Tracking(Workspace.of(), EXPERIMENT), report)
    return report


def table(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the differences, or the remarks of equal sides, as rows of a table."""
    findings = report["findings"]
    chosen = [each for each in findings if each["differs"]] or findings
    return [
        {
            "of": each["subject"],
            "cause": each["cause"].replace("_", " "),
            "difference": each["sentence"],
            "correction explains": each["explains"],
        }
        for each in chosen
    ]


def log_report(tracking: Tracking, report: dict[str, Any]) -> str:
    """Log a report as a run of MLflow with tags and the file compare.json; return the run's id.

    Raises TrackingError.
    """
    names = [Path(report[side]["path"]).name for side in ("a", "b")]
    tags = {
        "megacore.compare.a": redact(str(report["a"]["path"]))[-_TAG_LENGTH:],
        "megacore.compare.b": redact(str(report["b"]["path"]))[-_TAG_LENGTH:],
        "megacore.compare.equal": str(report["equal"]).lower(),
        "megacore.compare.causes": ", ".join(report["causes"])[:_TAG_LENGTH],
        "mlflow.note.content": report["verdict"],
    }
    experiment = tracking.experiment_id
    with tracking.errors("take the report of a comparison"):
        run = tracking.client.create_run(experiment, run_name=" and ".join(names), tags=tags)
    try:
        with tracking.errors("take the report of a comparison"):
            text = json.dumps(report, indent=2, default=str)
            tracking.client.log_text(run.info.run_id, redact(text), REPORT)
    except STORE_ERRORS:
        with suppress(*STORE_ERRORS):
            end_run(tracking, run.info.run_id, "FAILED")
        raise
    end_run(tracking, run.info.run_id)
    return str(run.info.run_id)
