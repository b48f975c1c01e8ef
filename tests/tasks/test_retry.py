"""A training is retried as long as it gets further, and else `launch.retries` times."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.states import Failed

from megacore.errors import (
    ConfigError,
    DataFormatError,
    LossError,
    MegacoreError,
    MemoryExhaustedError,
    PreemptedError,
    RankLostError,
    RankStalledError,
    StageTimeoutError,
    TrainingStoppedError,
)
from tasks import _pipeline, _retry
from tasks._attempt import exit_reason
from tasks._logging import UNLIMITED_RETRIES, SentenceFilter
from tasks._retry import FAILURES_FILE, counted_failures, training_may_pass
from tasks.download import download
from tasks.evaluate import evaluate
from tasks.train import train
from tests.tasks.conftest import make_config
from tests.tasks.events import EventLog


class FakeRun:
    """A training of 100 iterations whose attempts end as they are told: (saved iterations, what it
    raises)."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, retries: int = 2) -> None:
        self.directory = directory
        self.newest = 0
        self.warnings: list[str] = []
        config = make_config()
        launch = config.launch.model_copy(update={"retries": retries})
        self.config = config.model_copy(update={"launch": launch})
        log = SimpleNamespace(warning=lambda text, *values: self.warnings.append(text % values))
        inputs = {"config": self.config, "tokens": None, "tokenizer": None, "index": None}
        monkeypatch.setattr(_retry, "get_run_logger", lambda: log)
        monkeypatch.setattr(_retry, "newest_iteration", lambda directory: self.newest)
        context = SimpleNamespace(get=lambda: SimpleNamespace(parameters=inputs))
        monkeypatch.setattr(_retry, "TaskRunContext", context)
        monkeypatch.setattr("tasks.train.run_directory", lambda *inputs: directory)

    def attempts(
        self, outcomes: list[tuple[int, MegacoreError]], task_run: str = "a"
    ) -> MegacoreError:
        """Fail as Prefect runs a task, until the condition says no; all outcomes must be needed."""
        for left, (saved, error) in enumerate(outcomes, start=1):
            with pytest.raises(type(error)) as caught:
                self.attempt(saved, error, task_run)
            state: Any = Failed(data=caught.value)
            if not training_may_pass(train, SimpleNamespace(id=task_run), state):
                assert left == len(outcomes), f"given up after {left} attempts"
                return caught.value
        raise AssertionError("it would be tried once more")

    def attempt(self, saved: int, error: MegacoreError, task_run: str) -> None:
        """Fail after `saved` iterations."""
        with counted_failures(self.directory, task_run, self.config.launch.retries):
            self.newest += saved
            raise error


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    return FakeRun(tmp_path, monkeypatch)


LOST = RankLostError("rank 1 was ended by SIGKILL")


def test_without_progress_it_is_retried_a_few_times(run: FakeRun) -> None:
    error = run.attempts([(0, LOST)] * 3)
    assert str(error).startswith(
        "rank 1 was ended by SIGKILL; given up after 3 attempts without progress"
    )
    assert "launch.retries = 2" in str(error)
    assert [line.partition("; ")[2] for line in run.warnings] == [
        "retry 1 of at most 2 in a row without progress goes on from the beginning",
        "retry 2 of at most 2 in a row without progress goes on from the beginning",
    ]
    assert run.warnings[0].startswith("RankLostError: rank 1 was ended by SIGKILL; ")


def test_a_run_that_loses_a_rank_every_day_for_a_month_goes_on(run: FakeRun) -> None:
    error = run.attempts([(10, LOST)] * 30 + [(0, RankStalledError("stuck"))] * 2)
    assert "given up after 3 attempts" in str(error)
    assert str(error).endswith("the same command goes on from iteration 300")
    assert run.warnings[29].endswith(
        "retry 1 of at most 2 in a row without progress goes on from iteration 300"
    )


def test_progress_in_between_starts_the_count_anew(run: FakeRun) -> None:
    run.attempts([(0, LOST), (0, LOST), (5, LOST), (0, LOST), (0, LOST)])


def test_another_flow_run_has_all_its_retries(run: FakeRun) -> None:
    run.attempts([(0, LOST)] * 3, task_run="a")
    run.attempts([(0, LOST)] * 3, task_run="b")


def test_zero_retries_are_none_even_with_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun(tmp_path, monkeypatch, retries=0)
    assert run.attempts([(10, LOST)]) is LOST
    assert run.warnings == []


def test_a_signal_is_retried(run: FakeRun) -> None:
    error = run.attempts([(0, PreemptedError("SIGTERM"))] * 3)
    assert isinstance(error, PreemptedError)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("x"),
        DataFormatError("x"),
        MemoryExhaustedError("x"),
        LossError("x"),
        TrainingStoppedError("x"),
        StageTimeoutError("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_would_fail_again_is_not_retried(run: FakeRun, error: MegacoreError) -> None:
    assert run.attempts([(10, error)]) is error
    assert not (run.directory / FAILURES_FILE).exists()


def test_what_is_no_failure_of_the_training_is_not_retried(run: FakeRun) -> None:
    state: Any = Failed(data=ConnectionError())
    assert not training_may_pass(train, SimpleNamespace(id="a"), state)


@pytest.mark.parametrize("content", ["", "[]", '{"task_run": "a"}'])
def test_a_damaged_record_counts_from_the_start(run: FakeRun, content: str) -> None:
    (run.directory / FAILURES_FILE).write_text(content)
    run.attempts([(0, LOST)] * 3)


def test_what_cannot_be_counted_is_not_retried(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_retry, "write_json", full)
    assert run.attempts([(0, LOST)]) is LOST
    assert "cannot be counted" in run.warnings[0]


def test_prefect_does_not_limit_the_training_and_its_own_line_is_not_shown() -> None:
    assert train.retries == UNLIMITED_RETRIES
    assert train.retry_condition_fn is training_may_pass
    text = "Task run failed with %s: %r - Retry %s/%s will start %s"
    values = ("exception", LOST, 1, UNLIMITED_RETRIES, "immediately")
    record = logging.LogRecord("prefect.task_runs", logging.INFO, __file__, 1, text, values, None)
    assert not SentenceFilter().filter(record)
    record.args = ("exception", LOST, 1, 2, "immediately")
    assert SentenceFilter().filter(record)


class FakeTask:
    """Ends as it is told, and notes the options that it was given."""

    def __init__(self, error: MegacoreError, retries: int = 0) -> None:
        self.name, self.retries, self.error = "train", retries, error
        self.options: dict[str, Any] = {}

    def with_options(self, **options: Any) -> "FakeTask":
        self.options = options
        return self

    def __call__(self, *inputs: Any, return_state: bool) -> Any:
        return Failed(data=self.error)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    monkeypatch.setattr(
        _pipeline, "create_table_artifact", lambda table, **values: rows.extend(table)
    )
    return rows


def test_a_stop_on_request_is_a_state_of_its_own(
    reported: list[dict[str, str]], run: FakeRun
) -> None:
    error = TrainingStoppedError("training stopped at iteration 40 of 100")
    task: Any = FakeTask(error, retries=UNLIMITED_RETRIES)
    with _pipeline.StageRunner(run.config) as pipeline:
        pipeline.stage(task)
    assert [row["outcome"] for row in reported] == ["stopped"]
    assert task.options["retries"] == UNLIMITED_RETRIES
    assert pipeline.ended is not None
    assert pipeline.ended.type.value == "CANCELLED"
    assert pipeline.ended.name == "Stopped"
    assert pipeline.ended.data is error
    assert "iteration 40" in str(pipeline.ended.message)


def test_a_failure_stays_one(reported: list[dict[str, str]], run: FakeRun) -> None:
    task: Any = FakeTask(LOST)
    with pytest.raises(RankLostError), _pipeline.StageRunner(run.config) as pipeline:
        pipeline.stage(task)
    assert [row["outcome"] for row in reported] == ["failed"]
    assert task.options["retries"] == run.config.launch.retries
    assert pipeline.ended is None


def test_the_command_that_goes_on_is_quoted_and_has_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameters = {
        "conf": "my conf.yaml",
        "overrides": {
            "train.train_iters": 50,
            "data.source.files": [{"url": "https://me:hunter2@host/a.jsonl"}],
        },
    }
    context = SimpleNamespace(flow=SimpleNamespace(name="pretrain"), parameters=parameters)
    monkeypatch.setattr(_pipeline, "FlowRunContext", SimpleNamespace(get=lambda: context))
    command = _pipeline.resume_command()
    assert command == (
        "python -m flows.pretrain --conf 'my conf.yaml' -o train.train_iters=50 -o "
        '\'data.source.files=[{"url": "https://***@host/a.jsonl"}]\''
    )


def test_why_an_attempt_ended(log: EventLog) -> None:
    path = log.path
    assert exit_reason(path, 1, None) == "finished"
    events = [
        {"kind": "exit", "attempt": 1, "reason": "signal"},
        {"kind": "exit", "attempt": 2, "reason": "stop_file"},
    ]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert exit_reason(path, 1, PreemptedError("x")) == "signal"
    assert exit_reason(path, 2, TrainingStoppedError("x")) == "stop_file"
    assert exit_reason(path, 3, TrainingStoppedError("x")) == "TrainingStoppedError"
    assert exit_reason(path, 2, LOST) == "RankLostError"
    assert exit_reason(path, 1, KeyboardInterrupt()) == "signal", "they saved in the grace"
    assert exit_reason(path, 3, KeyboardInterrupt()) == "KeyboardInterrupt", "they did not"


def test_the_newest_complete_checkpoint_is_progress(tmp_path: Path) -> None:
    assert _retry.newest_iteration(tmp_path) == 0
    (tmp_path / "checkpoints" / "iter_0000010").mkdir(parents=True)
    assert _retry.newest_iteration(tmp_path) == 0, "it has no completion marker"


def test_other_stages_keep_a_fixed_number() -> None:
    assert download.retries == evaluate.retries == 0, "the flow sets launch.retries"
