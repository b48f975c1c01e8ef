"""Checkpoints as MLflow's LoggedModels."""

from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow.entities import LoggedModel

from megacore.config import RunConfig
from tasks._checkpoint_models import log_losses_by_position, log_perplexities
from tasks._mlflow import RunFacts, Tracking
from tasks._mlflow_events import OFFSET_FILE, Forwarder
from tests.tasks.events import EventLog


@pytest.fixture
def forward(
    tracking: Tracking, run_directory: Path, config: RunConfig, facts: RunFacts
) -> Callable[[], str]:
    """Return a function that delivers all events as a new process."""
    return lambda: Forwarder(tracking, run_directory, config, facts).flush()


def kept_models(tracking: Tracking, run_id: str, order_by: str = "valid_ppl") -> list[LoggedModel]:
    """Return the LoggedModels of a run's kept checkpoints, the lowest metric first."""
    return list(
        tracking.client.search_logged_models(
            [tracking.experiment_id],
            f"source_run_id = '{run_id}' AND model_type = 'checkpoint' AND tags.checkpoint_state = "
            "'kept'",
            order_by=[{"field_name": f"metrics.{order_by}", "ascending": True}],
        )
    )


def iterations(models: list[LoggedModel]) -> list[int]:
    return [int(model.params["step"]) for model in models]


def metric(model: LoggedModel, name: str) -> float:
    (value,) = (metric.value for metric in model.metrics if metric.key == name)
    return float(value)


def test_best_checkpoint_comes_first(
    tracking: Tracking, log: EventLog, forward: Callable[[], str], run_directory: Path
) -> None:
    for iteration, loss in ((100, 3.0), (200, 1.0), (300, 2.0)):
        log.checkpoint(iteration, loss)
    run_id = forward()
    table = kept_models(tracking, run_id)
    assert iterations(table) == [200, 300, 100]
    assert metric(table[0], "valid_ppl") == pytest.approx(2.71828, abs=1e-4)
    assert table[0].tags["path"] == str(run_directory / "checkpoints" / "iter_0000200")
    assert table[0].tags["size_bytes"] == "1200"
    test = {100: 5.0, 200: 7.0, 300: 6.0, 999: 1.0}
    for timestamp in (1, 2):
        values = {iteration: {"test_ppl": ppl} for iteration, ppl in test.items()}
        log_perplexities(tracking, run_id, values, datasets={}, timestamp_ms=timestamp)
    by_test = kept_models(tracking, run_id, "test_ppl")
    assert iterations(by_test) == [100, 300, 200]
    assert [metric(model, "test_ppl") for model in by_test] == [5.0, 6.0, 7.0]
    assert len(tracking.client.get_metric_history(run_id, "test_ppl")) == 3
    outputs = tracking.client.get_run(run_id).outputs.model_outputs
    assert sorted(output.step for output in outputs) == [100, 200, 300]


def test_perplexity_measured_after_the_save_reaches_the_checkpoint(
    tracking: Tracking, log: EventLog, forward: Callable[[], str]
) -> None:
    log.checkpoint(100, loss=None)
    log.perplexity(100, loss=1.0)
    log.perplexity(200, loss=0.5)
    run_id = forward()
    (model,) = kept_models(tracking, run_id)
    assert metric(model, "valid_ppl") == pytest.approx(2.71828, abs=1e-4)
    assert metric(model, "valid_loss") == 1.0
    assert [point.step for point in tracking.client.get_metric_history(run_id, "valid_ppl")] == [
        100
    ]


def test_evaluation_replaces_only_a_perplexity_that_disagrees(
    tracking: Tracking, log: EventLog, forward: Callable[[], str]
) -> None:
    log.checkpoint(100, loss=1.0)
    run_id = forward()
    for ppl in (2.71829, 3.0, 3.0):
        log_perplexities(
            tracking, run_id, {100: {"valid_ppl": ppl}}, datasets={}, timestamp_ms=2 * 10**12
        )
    history = tracking.client.get_metric_history(run_id, "valid_ppl")
    assert [point.value for point in history] == pytest.approx([2.71828, 3.0], abs=1e-5)


def test_repeated_delivery_changes_nothing(
    tracking: Tracking, log: EventLog, forward: Callable[[], str], run_directory: Path
) -> None:
    log.checkpoint(100)
    log.checkpoint(200, loss=None)
    log.deleted(100)
    run_id = forward()
    (run_directory / OFFSET_FILE).unlink()
    assert forward() == run_id
    models = tracking.client.search_logged_models([tracking.experiment_id])
    states = {model.params["step"]: model.tags["checkpoint_state"] for model in models}
    assert states == {"100": "deleted", "200": "kept"}
    assert {model.status for model in models} == {"READY"}
    assert len(tracking.client.get_run(run_id).outputs.model_outputs) == 2
    assert len(tracking.client.get_metric_history(run_id, "valid_ppl")) == 1


def test_deleted_checkpoints_disappear_until_saved_again(
    tracking: Tracking, log: EventLog, forward: Callable[[], str]
) -> None:
    log.checkpoint(100, loss=1.0)
    log.checkpoint(200, loss=2.0)
    log.deleted(100)
    run_id = forward()
    assert iterations(kept_models(tracking, run_id)) == [200]
    log.attempt = 2
    log.checkpoint(100, loss=1.0)
    assert forward() == run_id
    assert iterations(kept_models(tracking, run_id)) == [100, 200]


def test_checkpoint_files_are_not_copied(
    tracking: Tracking, log: EventLog, forward: Callable[[], str], run_directory: Path
) -> None:
    checkpoint = run_directory / "checkpoints" / "iter_0000100"
    checkpoint.mkdir(parents=True)
    (checkpoint / "shard.distcp").write_bytes(b"x" * 4096)
    log.checkpoint(100)
    forward()
    assert list(tracking.workspace.mlflow_artifacts.rglob("*.distcp")) == []


def test_losses_by_position_are_logged_once_and_agree_with_those_of_training(
    tracking: Tracking, log: EventLog, forward: Callable[[], str]
) -> None:
    log.perplexity(100, loss=3.0, by_position=[4.0, 2.0])
    log.checkpoint(100, 3.0)
    run_id = forward()

    def rows(*losses: float | None) -> list[dict[str, float | None]]:
        return [{"start": 4 * place, "loss": loss} for place, loss in enumerate(losses)]

    def history(name: str) -> list[tuple[float, int]]:
        metrics = tracking.client.get_metric_history(run_id, name)
        return [(metric.value, metric.step) for metric in metrics]

    row = {
        "iteration": 100,
        "valid_by_position": rows(4.0, 2.0),
        "test_by_position": rows(5.0, None, 1.0),
    }
    for moment in (1, 2):
        log_losses_by_position(tracking, run_id, [row], timestamp_ms=moment)
    assert history("validation/loss_by_position/0000000") == [(4.0, 100)]
    tests = [history(f"validation/test_loss_by_position/{start:07d}") for start in (0, 4, 8)]
    assert tests == [[(5.0, 100)], [], [(1.0, 100)]]
    changed = row | {"valid_by_position": rows(3.5, 2.5)}
    later = 2 * 10**12
    log_losses_by_position(tracking, run_id, [changed], timestamp_ms=later)
    log_losses_by_position(tracking, run_id, [changed], timestamp_ms=later + 1)
    assert history("validation/loss_by_position/0000000") == [(4.0, 100), (3.5, 100)]
    assert history("validation/loss_by_position/0000004") == [(2.0, 100), (2.5, 100)]


def test_models_stay_in_the_experiment_of_a_continued_run(
    tracking: Tracking,
    log: EventLog,
    run_directory: Path,
    config: RunConfig,
    facts: RunFacts,
    forward: Callable[[], str],
) -> None:
    log.checkpoint(100, 3.0)
    run_id = forward()
    log.checkpoint(200, 1.0)
    other = Tracking(tracking.workspace, "other")
    assert Forwarder(other, run_directory, config, facts).flush() == run_id
    log_perplexities(other, run_id, {100: {"test_ppl": 5.0}}, datasets={}, timestamp_ms=1)
    table = kept_models(tracking, run_id)
    assert iterations(table) == [200, 100]
    assert metric(table[1], "test_ppl") == 5.0
