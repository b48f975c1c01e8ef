"""Delivery of events to MLflow: each metric and step exactly once."""

import errno
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tasks._mlflow
import tasks._mlflow_events
from megacore.artifact.files import write_json
from megacore.config import RunConfig
from megacore.errors import DataFormatError, TrackingError, WorkspaceError
from megacore.observe.events import EventReader
from tasks._checkpoint_models import POSITION_PREFIXES
from tasks._mlflow import RunFacts, Tracking
from tasks._mlflow_events import (
    CURVES,
    OFFSET_FILE,
    PREFIXES,
    WITH_TOKENS,
    Deliveries,
    Forwarder,
    next_batch,
    points_of,
)
from tests._limits import HANG
from tests.tasks.conftest import KilledError
from tests.tasks.events import TOKENS_PER_ITERATION, EventLog, sources

MakeForwarder = Callable[[], Forwarder]


@pytest.fixture
def make_forwarder(
    tracking: Tracking, run_directory: Path, config: RunConfig, facts: RunFacts
) -> MakeForwarder:
    """Return a function that builds a forwarder as a new process would."""
    return lambda: Forwarder(
        Tracking(tracking.workspace, "pretrain"), run_directory, config, facts, interval=0.0
    )


def history(tracking: Tracking, run_id: str, key: str = "train/lm_loss") -> dict[int, float]:
    """Return the values by step; fail if a step occurs twice."""
    metrics = tracking.client.get_metric_history(run_id, key)
    assert max(Counter(metric.step for metric in metrics).values(), default=0) <= 1, (
        f"{key} has a step twice"
    )
    return {metric.step: metric.value for metric in metrics}


def check(tracking: Tracking, run_id: str, iterations: list[int]) -> None:
    """Assert that the written curves, of the loss on both axes, have exactly these points."""
    for name in ("train/lm_loss", "train/lr", "vitals/grad_norm"):
        assert sorted(history(tracking, run_id, name)) == iterations
    steps = sorted(history(tracking, run_id, "train/lm_loss_by_tokens"))
    assert steps == [iteration * TOKENS_PER_ITERATION for iteration in iterations]
    assert history(tracking, run_id, "train/lr_by_tokens") == {}


def watch_log_batch(
    monkeypatch: pytest.MonkeyPatch,
    *,
    before: Exception | None = None,
    after: Exception | None = None,
) -> list[int]:
    """Return the iterations whose loss is sent from now on.

    The first batch fails before or after the store accepts it. SQLite drops an exact repetition, so
    the sent values show more than the stored ones.
    """
    from mlflow import MlflowClient

    log_batch_of_mlflow, pending = MlflowClient.log_batch, [before or after]
    sent: list[int] = []

    def log_batch(self: MlflowClient, run_id: str, metrics: Any = (), **rest: Any) -> None:
        error = pending.pop() if metrics and pending else None
        sent.extend(metric.step for metric in metrics if metric.key == "train/lm_loss")
        if error is not None and error is before:
            raise error
        log_batch_of_mlflow(self, run_id, metrics=metrics, **rest)
        if error is not None:
            raise error

    monkeypatch.setattr(MlflowClient, "log_batch", log_batch)
    return sent


def test_sentence_loss_has_separate_curves() -> None:
    event = {
        "kind": "evaluation",
        "time": 1.0,
        "iteration": 3,
        "consumed_tokens": 96,
        "lm_loss": 2.0,
        "sop_loss": 0.5,
    }
    values = {point.key: (point.step, point.value) for point in points_of(event)}
    assert values == {
        "validation/lm_loss": (3, 2.0),
        "validation/lm_loss_by_tokens": (96, 2.0),
        "validation/sop_loss": (3, 0.5),
    }
    assert {point.key for point in points_of(event | {"kind": "step"})} >= {
        "train/lm_loss",
        "train/sop_loss",
    }


def test_fine_tuning_events_give_metrics_and_epoch_seconds() -> None:
    event = {
        "kind": "evaluation",
        "time": 1.0,
        "iteration": 4,
        "consumed_tokens": 64,
        "loss": 0.6,
        "epoch": 1,
    }
    points = list(points_of(event | {"metrics": {"loss": 0.6, "f1": 0.5, "accuracy": None}}))
    assert {point.key: (point.step, point.value) for point in points} == {
        "validation/loss": (4, 0.6),
        "validation/loss_by_tokens": (64, 0.6),
        "validation/f1": (4, 0.5),
    }
    assert len(points) == 3
    points = list(points_of(event | {"metrics": {"loss": 0.6, "ppl": 1.8}}))
    assert [point.value for point in points if point.key == "validation/ppl"] == [1.8]
    epoch = {
        "kind": "epoch",
        "time": 1.0,
        "iteration": 4,
        "epoch": 1,
        "train_seconds": 2.5,
        "evaluation_seconds": 1.0,
    }
    values = {point.key: (point.step, point.value) for point in points_of(epoch)}
    assert values == {
        "vitals/epoch_train_seconds": (4, 2.5),
        "vitals/epoch_evaluation_seconds": (4, 1.0),
    }


def test_curves_are_by_iteration_and_by_tokens(
    tracking: Tracking, log: EventLog, make_forwarder: MakeForwarder
) -> None:
    for iteration in (10, 20, 30):
        log.step(iteration, loss=6 - iteration / 10, mfu=None, **sources({"web": 5.5}))
    log.evaluation(30, loss=3.5, web=3.0, books=None)
    log.perplexity(30, loss=3.25, by_position=[3.5, None, 3.0], web=0.0)
    log.checkpoint(30, loss=3.25)
    run_id = make_forwarder().finish()
    check(tracking, run_id, [10, 20, 30])
    assert history(tracking, run_id, "train/mfu") == {}
    tokens = 30 * TOKENS_PER_ITERATION
    assert history(tracking, run_id, "validation/lm_loss_by_tokens") == {tokens: 3.5}
    assert history(tracking, run_id, "valid_ppl") == {30: pytest.approx(25.790, abs=0.001)}
    assert history(tracking, run_id, "validation/ppl") == history(tracking, run_id, "valid_ppl")
    by_tokens = history(tracking, run_id, "validation/ppl_by_tokens")
    assert by_tokens == {tokens: pytest.approx(25.790, abs=0.001)}
    assert [
        history(tracking, run_id, f"validation/loss_by_position/{start:07d}") for start in (0, 4, 8)
    ] == [{30: 3.5}, {}, {30: 3.0}]
    of_web = {
        name: history(tracking, run_id, f"{name}_by_source/web")
        for name in ("train/loss", "validation/loss", "validation/ppl")
    }
    assert of_web == {
        "train/loss": {10: 5.5, 20: 5.5, 30: 5.5},
        "validation/loss": {30: 3.0},
        "validation/ppl": {30: 1.0},
    }
    assert history(tracking, run_id, "validation/loss_by_source/books") == {}
    tags = tracking.client.get_run(run_id).data.tags
    assert (tags["step"], tags["tokens"]) == ("30", str(tokens))
    (first, *_) = tracking.client.get_metric_history(run_id, "train/lm_loss")
    assert first.timestamp == 1_700_000_001_000
    assert tracking.client.get_run(run_id).info.status == "FINISHED"


def test_losses_rate_throughput_and_perplexity_are_the_first_charts() -> None:
    groups = {name.rpartition("/")[0] for fields in CURVES.values() for name in fields.values()}
    prefixes = (*PREFIXES.values(), *POSITION_PREFIXES.values())
    groups |= {prefix.rpartition("/")[0] for prefix in prefixes}
    # MLflow shows groups by name, then the metrics without one.
    assert sorted(groups - {""})[:2] == ["train", "validation"]
    assert {name for fields in CURVES.values() for name in fields.values()} >= WITH_TOKENS


def test_events_sent_under_other_names_are_sent_again(
    tracking: Tracking,
    log: EventLog,
    run_directory: Path,
    make_forwarder: MakeForwarder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log.step(10)
    log.step(20)
    run_id = make_forwarder().flush()
    state = json.loads((run_directory / OFFSET_FILE).read_text())
    del state["names"]  # as it was before there was a version
    (run_directory / OFFSET_FILE).write_text(json.dumps(state))
    sent = watch_log_batch(monkeypatch)
    fields = dict(CURVES["step"], grad_norm="vitals/norm_of_gradient")
    monkeypatch.setattr(tasks._mlflow_events, "CURVES", {**CURVES, "step": fields})
    assert make_forwarder().flush() == run_id
    assert sent == []
    assert history(tracking, run_id, "vitals/norm_of_gradient") == {10: 1.0, 20: 1.0}
    check(tracking, run_id, [10, 20])


def test_repeated_iterations_keep_the_first_value(
    tracking: Tracking, log: EventLog, make_forwarder: MakeForwarder
) -> None:
    for iteration in (10, 20, 30):
        log.step(iteration, loss=1.0)
    first = make_forwarder()
    run_id = first.flush()
    log.attempt = 2
    for iteration in (20, 25, 30, 40):
        log.step(iteration, loss=2.0)
    assert first.flush() == run_id
    log.attempt = 3
    log.step(40, loss=3.0)
    log.step(50, loss=3.0)
    assert make_forwarder().flush() == run_id
    check(tracking, run_id, [10, 20, 25, 30, 40, 50])
    assert history(tracking, run_id) == {10: 1.0, 20: 1.0, 25: 2.0, 30: 1.0, 40: 2.0, 50: 3.0}


def test_kill_between_batch_and_commit_sends_nothing_twice(
    tracking: Tracking,
    log: EventLog,
    make_forwarder: MakeForwarder,
    monkeypatch: pytest.MonkeyPatch,
    crash: Callable[..., None],
) -> None:
    log.step(10)
    forwarder = make_forwarder()
    forwarder.deliver()
    log.step(20)
    log.checkpoint(20)
    with monkeypatch.context() as patch:
        patch.setattr(tasks._mlflow_events, "write_json", crash)
        with pytest.raises(KilledError):
            forwarder.deliver()
    assert forwarder.run_id is not None
    check(tracking, forwarder.run_id, [10, 20])
    log.step(30)
    sent = watch_log_batch(monkeypatch)
    run_id = make_forwarder().flush()
    assert sent == [30]
    check(tracking, run_id, [10, 20, 30])
    assert len(tracking.client.search_logged_models([tracking.experiment_id])) == 1


def test_two_processes_deliver_the_events_of_a_run_one_after_another(
    tracking: Tracking,
    log: EventLog,
    make_forwarder: MakeForwarder,
    monkeypatch: pytest.MonkeyPatch,
    run_directory: Path,
) -> None:
    """A publication sends what an extension of the run, which trains meanwhile, sends as well."""
    from mlflow import MlflowClient

    training, publication = make_forwarder(), make_forwarder()
    log.step(10)
    training.deliver()
    log.checkpoint(10)
    search, threads = MlflowClient.search_logged_models, list[threading.Thread]()

    def search_while_the_other_delivers(self: MlflowClient, *args: Any, **named: Any) -> Any:
        models = search(self, *args, **named)
        if not threads:
            threads.append(threading.Thread(target=training.deliver))
            threads[0].start()
            threads[0].join(1.0)
        return models

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "search_logged_models", search_while_the_other_delivers)
        publication.deliver()
    threads[0].join()
    assert len(tracking.client.search_logged_models([tracking.experiment_id])) == 1
    log.step(20)
    sent = watch_log_batch(monkeypatch)
    publication.deliver()
    training.deliver()
    assert sent == [20]
    offset = json.loads((run_directory / OFFSET_FILE).read_text())["offset"]
    assert offset == log.path.stat().st_size


@pytest.mark.parametrize(("moment", "expected"), [("before", [20, 20, 30]), ("after", [20, 30])])
def test_outage_before_or_after_a_batch_loses_and_repeats_nothing(
    tracking: Tracking,
    log: EventLog,
    make_forwarder: MakeForwarder,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    expected: list[int],
) -> None:
    from mlflow.exceptions import MlflowException

    log.step(10)
    forwarder = make_forwarder()
    run_id = forwarder.flush()
    log.step(20)
    sent = watch_log_batch(monkeypatch, **{moment: MlflowException("connection reset")})
    with pytest.raises(TrackingError, match="connection reset"):
        forwarder.deliver()
    log.step(20, loss=9.0)
    log.step(30)
    assert forwarder.flush() == run_id
    assert sent == expected
    check(tracking, run_id, [10, 20, 30])
    assert history(tracking, run_id)[20] == 5.0


def test_flush_retries_and_then_raises(
    log: EventLog, make_forwarder: MakeForwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.step(10)
    forwarder = make_forwarder()
    attempts: list[float] = []
    now = 0.0

    def failing(*_: object) -> str:
        attempts.append(now)
        raise TrackingError("the server is down")

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    with monkeypatch.context() as patch:
        patch.setattr(tasks._mlflow_events, "ensure_run", failing)
        patch.setattr(tasks._mlflow_events, "time", clock)
        with pytest.raises(TrackingError, match="not all in MLflow: the server is down"):
            forwarder.flush(timeout=30.0)
    assert attempts == [0.0, 1.0, 3.0, 7.0, 15.0]
    assert forwarder.flush()


def test_the_pause_stays_finite_after_many_failures(
    make_forwarder: MakeForwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwarder = make_forwarder()

    def fail() -> None:
        raise TrackingError("the server is down")

    monkeypatch.setattr(forwarder, "deliver", fail)
    monkeypatch.setattr(tasks._mlflow_events, "time", SimpleNamespace(monotonic=lambda: 5.0))
    forwarder._deliveries.failures = 2000
    forwarder._attempt()
    assert forwarder._deliveries.due == 65.0


def test_full_disk_ends_the_flush_at_once_and_the_next_one_sends_the_rest(
    log: EventLog, make_forwarder: MakeForwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.step(10)
    forwarder = make_forwarder()

    def failing(*_: object) -> str:
        raise WorkspaceError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(tasks._mlflow_events, "ensure_run", failing)
        with pytest.raises(WorkspaceError, match=r"^the disk is full$"):
            forwarder.flush()
    assert forwarder.flush()


@pytest.mark.parametrize("damaged", [False, True])
def test_run_ends_also_if_this_host_cannot_send_its_events(
    tracking: Tracking,
    log: EventLog,
    make_forwarder: MakeForwarder,
    monkeypatch: pytest.MonkeyPatch,
    damaged: bool,
) -> None:
    log.step(10)
    forwarder = make_forwarder()
    run_id = forwarder.flush()
    log.step(20)
    error: type[Exception] = DataFormatError if damaged else WorkspaceError
    if damaged:
        log.write("checkpoint", 20)

    def full(*_: object) -> None:
        raise WorkspaceError("the disk is full")

    monkeypatch.setattr(tasks._mlflow_events, "write_json", full)
    with pytest.raises(error):
        forwarder.finish("FAILED")
    assert tracking.client.get_run(run_id).info.status == "FAILED"


def test_batch_whose_offset_was_not_written_is_not_sent_twice(
    log: EventLog, make_forwarder: MakeForwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = watch_log_batch(monkeypatch)
    log.step(10)
    forwarder = make_forwarder()

    def full(*_: object) -> None:
        raise WorkspaceError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(tasks._mlflow_events, "write_json", full)
        with pytest.raises(WorkspaceError):
            forwarder.flush()
    forwarder.flush()
    assert sent == [10]


def test_hanging_store_blocks_neither_polls_nor_flush(
    tracking: Tracking,
    log: EventLog,
    make_forwarder: MakeForwarder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log.step(10)
    forwarder = make_forwarder()
    ensure_run = tasks._mlflow_events.ensure_run

    answers = threading.Event()

    def hang(*args: Any) -> str:
        answers.wait(2 * HANG)
        return ensure_run(*args)

    monkeypatch.setattr(tasks._mlflow_events, "ensure_run", hang)
    started = time.monotonic()
    for _ in range(10):
        forwarder.poll()
    with pytest.raises(TrackingError, match=r"no events for 0\.3 s"):
        forwarder.flush(timeout=0.3)
    assert time.monotonic() - started < 120
    answers.set()
    check(tracking, forwarder.flush(timeout=HANG), [10])


def test_polls_deliver_in_the_background(
    tracking: Tracking, log: EventLog, make_forwarder: MakeForwarder
) -> None:
    forwarder = make_forwarder()
    for iteration in range(1, 6):
        log.step(iteration)
        forwarder.poll()
        time.sleep(0.05)
    deadline = time.monotonic() + HANG
    run_id = None
    while time.monotonic() < deadline and (run_id is None or len(history(tracking, run_id)) < 5):
        forwarder.poll()
        time.sleep(0.05)
        run_id = forwarder.run_id
    assert run_id is not None
    check(tracking, run_id, [1, 2, 3, 4, 5])


def test_deleted_run_gets_all_events_again(
    tracking: Tracking, log: EventLog, make_forwarder: MakeForwarder, run_directory: Path
) -> None:
    log.step(10)
    forwarder = make_forwarder()
    first = forwarder.flush()
    tracking.client.delete_run(first)
    log.step(20)
    log.checkpoint(20)
    second = forwarder.flush()
    assert second != first
    check(tracking, second, [10, 20])
    assert json.loads((run_directory / OFFSET_FILE).read_text()) == {
        "run_id": second,
        "names": 2,
        "offset": log.path.stat().st_size,
    }


def test_lost_offset_is_restored_from_the_store(
    tracking: Tracking, log: EventLog, make_forwarder: MakeForwarder, run_directory: Path
) -> None:
    for iteration in range(1, 401):
        log.step(iteration)
    run_id = make_forwarder().flush()
    (run_directory / OFFSET_FILE).unlink()
    assert make_forwarder().flush() == run_id
    check(tracking, run_id, list(range(1, 401)))


def test_batches_contain_complete_events(log: EventLog) -> None:
    for iteration in range(1, 401):
        log.step(iteration, mfu=0.5, tflops=1.0)
    seen: set[tuple[str, int]] = set()
    sizes, offset = [], 0
    while (batch := next_batch(log.path, offset, seen)).end > offset:
        sizes.append(len(batch.points))
        offset = batch.end
        seen |= batch.seen
    assert sizes == [996, 996, 408]
    assert offset == log.path.stat().st_size


def test_incomplete_line_is_delivered_once_complete(
    tracking: Tracking, log: EventLog, make_forwarder: MakeForwarder
) -> None:
    log.step(10)
    log.step(20)
    content = log.path.read_bytes()
    log.path.write_bytes(content[:-7])
    forwarder = make_forwarder()
    check(tracking, forwarder.flush(), [10])
    log.path.write_bytes(content)
    check(tracking, forwarder.flush(), [10, 20])


def test_damaged_event_is_refused(log: EventLog, make_forwarder: MakeForwarder) -> None:
    log.path.write_text("not an event\n")
    forwarder = make_forwarder()
    forwarder.poll()
    with pytest.raises(DataFormatError, match="no event"):
        forwarder.flush()


def test_deleted_run_directory_starts_a_new_run(
    tracking: Tracking, log: EventLog, make_forwarder: MakeForwarder, run_directory: Path
) -> None:
    log.step(10, loss=1.0)
    first = make_forwarder().flush()
    shutil.rmtree(run_directory)
    run_directory.mkdir()
    log.step(10, loss=2.0)
    second = make_forwarder().flush()
    assert (history(tracking, first), history(tracking, second)) == ({10: 1.0}, {10: 2.0})


def test_profiles_become_artifacts_of_the_run(
    tracking: Tracking, log: EventLog, run_directory: Path, make_forwarder: MakeForwarder
) -> None:
    (run_directory / "profile").mkdir()
    names = ["profile/rank_0.json.gz", "profile/rank_0_memory.svg"]
    for name in names:
        (run_directory / name).write_text(f"content of {name}")
    log.step(10)
    log.write("profile", 12, first=10, last=12, files=[*names, "profile/rank_1.json.gz"])
    log.step(20)
    run_id = make_forwarder().finish()
    assert sorted(file.path for file in tracking.client.list_artifacts(run_id, "profile")) == names
    fetched = Path(tracking.client.download_artifacts(run_id, names[1]))
    assert fetched.read_text() == f"content of {names[1]}"
    check(tracking, run_id, [10, 20])


def test_damaged_profile_event_is_refused(log: EventLog) -> None:
    log.write("profile", 12, files="profile/rank_0.json.gz")
    with pytest.raises(DataFormatError, match="it lacks files"):
        next_batch(log.path, 0, set())


def test_table_of_answers_is_replaced_and_shown_as_a_table(
    tracking: Tracking,
    log: EventLog,
    run_directory: Path,
    make_forwarder: MakeForwarder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = run_directory / "answers.json"
    for iteration in (0, 10):
        table.write_text(f'{{"columns": ["step"], "data": [[{iteration}]]}}')
        log.write("answers", iteration, epoch=0, file="answers.json")
        run_id = make_forwarder().finish()
    (run_directory / OFFSET_FILE).unlink()
    assert make_forwarder().finish() == run_id
    assert [file.path for file in tracking.client.list_artifacts(run_id)].count("answers.json") == 1
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.uri)  # load_table ignores its client's
    frame = tracking.client.load_table(
        tracking.experiment_id, artifact_file="answers.json", run_ids=[run_id]
    )
    assert frame.to_dict("list") == {"step": [10]}


def test_damaged_answers_event_is_refused(log: EventLog) -> None:
    log.write("answers", 12)
    with pytest.raises(DataFormatError, match="it lacks file"):
        next_batch(log.path, 0, set())


def test_long_history_of_a_store_that_answers_is_no_outage(
    tracking: Tracking,
    log: EventLog,
    make_forwarder: MakeForwarder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each lookup takes less than the time limit, and all of them more."""
    log.step(10)
    make_forwarder().flush()
    log.step(20)  # of a flow that was killed before it sent this
    stored_steps = tasks._mlflow_events.stored_steps
    looked_up, checked = threading.Semaphore(0), threading.Semaphore(0)
    now = 0.0

    def look_up(*arguments: Any) -> Any:
        nonlocal now
        now += 50.0
        looked_up.release()
        assert checked.acquire(timeout=HANG)
        return stored_steps(*arguments)

    def join(deliveries: Deliveries, timeout: float) -> None:
        """Return after each lookup, as if it had taken that long, or at the end."""
        checked.release()
        while deliveries.busy and not looked_up.acquire(timeout=0.01):
            pass

    clock = SimpleNamespace(monotonic=lambda: now)
    with monkeypatch.context() as patch:
        patch.setattr(tasks._mlflow_events, "stored_steps", look_up)
        patch.setattr(tasks._mlflow_events, "time", clock)
        patch.setattr(Deliveries, "join", join)
        run_id = make_forwarder().flush(timeout=120.0)
    assert now > 120.0
    check(tracking, run_id, [10, 20])


def test_events_in_doubt_are_looked_up_without_the_whole_history(
    tracking: Tracking,
    log: EventLog,
    make_forwarder: MakeForwarder,
    run_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mlflow import MlflowClient

    def refuse(*_: object) -> None:
        raise AssertionError("the whole history of a month takes minutes and gigabytes")

    for iteration in range(1, 301):
        log.step(iteration)
    run_id = make_forwarder().flush()
    offset = next(end for event, end in EventReader(log.path) if event["iteration"] == 200)
    # A flow that was killed after the store had more than the offset says, and before the rest.
    write_json(run_directory / OFFSET_FILE, {"run_id": run_id, "offset": offset, "names": 2})
    for iteration in range(301, 321):
        log.step(iteration)
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "get_metric_history", refuse)
        make_forwarder().flush()
    check(tracking, run_id, list(range(1, 321)))


def test_steps_that_are_too_many_for_one_answer_are_not_a_sample(
    tracking: Tracking,
    log: EventLog,
    make_forwarder: MakeForwarder,
    run_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for iteration in range(1, 61):
        log.step(iteration)
    run_id = make_forwarder().flush()
    (run_directory / OFFSET_FILE).unlink()
    monkeypatch.setattr(tasks._mlflow, "_MOST_STEPS", 20)
    make_forwarder().flush()
    check(tracking, run_id, list(range(1, 61)))


def test_a_server_that_cannot_be_asked_for_steps_is_asked_for_histories(
    tracking: Tracking,
    log: EventLog,
    make_forwarder: MakeForwarder,
    run_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*_: object) -> None:
        """Answer as an old server, which does not know the request."""

    monkeypatch.setattr(tasks._mlflow_events, "stored_steps", unknown)
    log.step(1)
    run_id = make_forwarder().flush()
    (run_directory / OFFSET_FILE).unlink()
    log.evaluation(1)  # the store has no history of its metrics
    log.step(2)
    make_forwarder().flush()
    check(tracking, run_id, [1, 2])


def test_poll_never_raises(
    log: EventLog, make_forwarder: MakeForwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.step(10)
    forwarder = make_forwarder()
    forwarder.flush()
    forwarder._deliveries.due = 0.0

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", fail)
        forwarder.poll()
