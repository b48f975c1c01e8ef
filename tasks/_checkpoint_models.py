"""Kept checkpoints as MLflow LoggedModels.

MLflow's table, sorted by a metric, shows the best checkpoint. A LoggedModel refers to a
checkpoint's directory; no file is copied. When retention deletes the directory, the LoggedModel
stays, tagged `checkpoint_state=deleted`.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megacore.observe.logging import PPL_TOLERANCE, perplexity
from tasks._mlflow import Dataset, Tracking

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel, Metric

Datasets = Mapping[str, Dataset]
"""Data sets of a run by role; the held-out splits are `valid` and `test`."""
STATE_TAG = "checkpoint_state"
"""Tag with the value `kept` or `deleted`."""
MODEL_TYPE = "checkpoint"
POSITION_PREFIXES = {
    "valid": "validation/loss_by_position/",
    "test": "validation/test_loss_by_position/",
}
"""Prefixes of the metrics of a run's losses by position, by split; the first position follows.

MLflow sorts groups by name: these many charts are behind those of `train` and `validation`.
"""


def ensure_checkpoint_model(
    tracking: Tracking,
    run_id: str,
    run_name: str,
    event: Mapping[str, Any],
    run_directory: Path,
    datasets: Datasets,
) -> str:
    """Return the id of the LoggedModel of a `checkpoint` event, creating it if absent.

    Its metrics refer to the data sets of the run, `datasets` by split. Replaying the event changes
    nothing.
    """
    client, iteration = tracking.client, int(event["iteration"])
    path = run_directory / event["path"]
    tags = {
        "path": str(path),
        "uri": path.as_uri(),
        "size_bytes": str(event["size_bytes"]),
        STATE_TAG: "kept",
    }
    model = _find(tracking, run_id, iteration)
    if model is None:
        model = client.create_logged_model(
            tracking.experiment_of(run_id),
            name=f"{run_name}-iter_{iteration:07d}".replace(".", "-"),
            source_run_id=run_id,
            tags=tags,
            params={"step": str(iteration), "consumed_tokens": str(event["consumed_tokens"])},
            model_type=MODEL_TYPE,
        )
    elif any(model.tags.get(name) != value for name, value in tags.items()):
        client.set_logged_model_tags(model.model_id, tags)
    link_model(tracking, run_id, model.model_id, iteration)
    log_model_metrics(
        tracking,
        run_id,
        model,
        _validation_metrics(event),
        datasets=datasets,
        step=iteration,
        timestamp_ms=round(1000 * event["time"]),
    )
    if model.status != "READY":
        client.finalize_logged_model(model.model_id, "READY")
    return str(model.model_id)


def _validation_metrics(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the validation metrics of a checkpoint event.

    A fine-tuning's event has its metrics by name, a pretraining's event has loss and perplexity.
    """
    loss, metrics = event.get("validation_loss"), event.get("metrics")
    if metrics is not None:
        values = {"loss": loss, **metrics}
        return {
            f"valid_{name}": float(value) for name, value in values.items() if value is not None
        }
    return {} if loss is None else {"valid_ppl": perplexity(float(loss)), "valid_loss": float(loss)}


def log_checkpoint_perplexity(
    tracking: Tracking, run_id: str, event: Mapping[str, Any], datasets: Datasets
) -> None:
    """Log a `perplexity` event to the LoggedModel of its checkpoint, if that is already recorded.

    A checkpoint that is saved after the event brings the same values itself.
    """
    iteration = int(event["iteration"])
    model = _find(tracking, run_id, iteration)
    if model is not None:
        log_model_metrics(
            tracking,
            run_id,
            model,
            {name: event[name] for name in ("valid_ppl", "valid_loss") if event[name] is not None},
            datasets=datasets,
            step=iteration,
            timestamp_ms=round(1000 * event["time"]),
        )


def mark_deleted(tracking: Tracking, run_id: str, iteration: int) -> None:
    """Tag the LoggedModel of a checkpoint whose files retention deleted."""
    model = _find(tracking, run_id, iteration)
    if model is not None and model.tags.get(STATE_TAG) != "deleted":
        tracking.client.set_logged_model_tags(model.model_id, {STATE_TAG: "deleted"})


def log_perplexities(
    tracking: Tracking,
    run_id: str,
    perplexities: Mapping[int, Mapping[str, float]],
    *,
    datasets: Datasets,
    timestamp_ms: int,
) -> None:
    """Log evaluated perplexities by name to the LoggedModels of the checkpoints, by iteration.

    A logged value that differs gets a successor, such as after a change of
    `evaluate.max_samples`. Raises TrackingError.
    """
    with tracking.errors("take the perplexities"):
        for iteration, values in perplexities.items():
            model = _find(tracking, run_id, iteration)
            if model is not None:
                log_model_metrics(
                    tracking,
                    run_id,
                    model,
                    values,
                    datasets=datasets,
                    step=iteration,
                    timestamp_ms=timestamp_ms,
                )


def log_losses_by_position(
    tracking: Tracking, run_id: str, rows: Iterable[Mapping[str, Any]], *, timestamp_ms: int
) -> None:
    """Log the losses by position of evaluated checkpoints to their run, which may have them.

    Those of the validation split have the metrics that training has logged. Raises TrackingError.
    """
    from mlflow.entities import Metric

    with tracking.errors("take the losses by position"):
        for row in rows:
            for split, prefix in POSITION_PREFIXES.items():
                step = int(row["iteration"])
                metrics = [
                    Metric(name, value, timestamp_ms, step)
                    for name, value in position_metrics(prefix, row[f"{split}_by_position"]).items()
                ]
                if metrics and not logged_point(
                    tracking, run_id, metrics[0].key, metrics[0].value, step
                ):
                    tracking.client.log_batch(run_id, metrics=metrics)


def position_metrics(prefix: str, rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the losses of ranges of positions by metric, without those that are null."""
    # Equal widths of the numbers keep the charts in the order of the positions.
    return {
        f"{prefix}{each['start']:07d}": float(each["loss"])
        for each in rows
        if each["loss"] is not None
    }


def logged_point(
    tracking: Tracking, run_id: str, name: str, value: float, step: int
) -> "Metric | None":
    """Return the newest point of a run's metric at a step if it agrees with `value`, or None."""
    history = tracking.client.get_metric_history(run_id, name)
    points = [point for point in history if point.step == step]
    newest = max(points, key=lambda point: point.timestamp, default=None)
    agrees = newest is not None and math.isclose(value, newest.value, rel_tol=PPL_TOLERANCE)
    return newest if agrees else None


def log_scores(
    tracking: Tracking,
    run_id: str,
    iteration: int,
    scores: Mapping[str, float],
    *,
    timestamp_ms: int,
) -> None:
    """Log scores to the run and to the LoggedModel of the checkpoint at `iteration`, if it has one.

    Raises TrackingError.
    """
    with tracking.errors("take the scores"):
        model = _find(tracking, run_id, iteration)
        if model is None:  # the run has the record of what was logged
            scores = {
                name: value
                for name, value in scores.items()
                if logged_point(tracking, run_id, name, value, iteration) is None
            }
        log_model_metrics(
            tracking, run_id, model, scores, step=iteration, timestamp_ms=timestamp_ms
        )


def log_model_metrics(
    tracking: Tracking,
    run_id: str,
    model: "LoggedModel | None",
    metrics: Mapping[str, float],
    *,
    datasets: Datasets | None = None,
    step: int,
    timestamp_ms: int,
) -> None:
    """Log the metrics that the model lacks, or has with an older, different value.

    They are logged for the model and its run. A replayed event therefore never replaces a later
    measurement, and a measurement that agrees with an earlier one adds nothing. A metric such as
    `valid_ppl` refers to the data set `valid` of `datasets`.
    """
    from mlflow.entities import Metric

    logged = newest_metrics(model)
    values = [
        Metric(
            name,
            value,
            timestamp_ms,
            step,
            model_id=None if model is None else model.model_id,
            run_id=run_id,
            **_reference((datasets or {}).get(name.partition("_")[0])),
        )
        for name, value in metrics.items()
        if name not in logged
        or (
            logged[name].timestamp < timestamp_ms
            and not math.isclose(value, logged[name].value, rel_tol=PPL_TOLERANCE)
        )
    ]
    if values:
        tracking.client.log_batch(run_id, metrics=values)


def _reference(dataset: Dataset | None) -> dict[str, str]:
    """Return the fields with which a metric refers to the data set that it was measured on."""
    if dataset is None:
        return {}
    return {"dataset_name": dataset.name, "dataset_digest": dataset.recorded_digest}


def newest_metrics(model: "LoggedModel | None") -> "dict[str, Metric]":
    """Return the newest measurement of each metric of a model."""
    metrics = (model.metrics or []) if model is not None else []
    return {metric.key: metric for metric in sorted(metrics, key=lambda metric: metric.timestamp)}


def _find(tracking: Tracking, run_id: str, iteration: int) -> "LoggedModel | None":
    models = tracking.client.search_logged_models(
        [tracking.experiment_of(run_id)],
        f"source_run_id = '{run_id}' AND model_type = '{MODEL_TYPE}' AND params.step = "
        f"'{iteration}'",
        max_results=1,
    )
    return models[0] if models else None


def link_model(tracking: Tracking, run_id: str, model_id: str, step: int) -> None:
    """List the model among the run's outputs, once: MLflow would show a second link again."""
    from mlflow.entities import LoggedModelOutput

    outputs = tracking.client.get_run(run_id).outputs
    linked = {output.model_id for output in outputs.model_outputs} if outputs else set()
    if model_id not in linked:
        tracking.client.log_outputs(run_id, [LoggedModelOutput(model_id, step)])
