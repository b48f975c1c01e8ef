"""Retries of a training: unlimited with progress, else `launch.retries` times."""

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.states import Failed

from megacore.checkpoint.format import Marker, directory_name
from megacore.config.launch import LaunchConfig
from megacore.errors import (
    ConfigError,
    DataFormatError,
    FileAccessError,
    LossError,
    MegacoreError,
    MemoryExhaustedError,
    PreemptedError,
    RankLostError,
    RankStalledError,
    StageTimeoutError,
    TrainingStoppedError,
    TransientFileError,
    WorkspaceError,
)
from tasks import _logging, _retry, _stage_runner
from tasks._logging import CountedRetries, SentenceFilter
from tasks._retry import (
    FAILURES_FILE,
    Failures,
    counted_failures,
    retry_delays,
    wait_to_retry,
)
from tasks.collect import collect
from tasks.evaluate import evaluate
from tasks.finetune import finetune
from tasks.index import RunData
from tasks.train import train
from tests.finetune._tiny_models import tiny_config
from tests.tasks.conftest import make_config

may_retry: Any = train.retry_condition_fn


class FakeRun:
    """A training of 100 iterations whose attempts end as the test requests.

    Each outcome is the number of saved iterations and the raised error.
    """

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, retries: int = 2) -> None:
        self.directory = directory
        self.newest = 0
        self.warnings: list[str] = []
        config = make_config()
        launch = config.launch.model_copy(update={"retries": retries})
        self.config = config.model_copy(update={"launch": launch})
        log = SimpleNamespace(
            info=lambda text: None,
            warning=lambda text, *values: self.warnings.append(text % values),
        )
        inputs = {"config": self.config, "data": RunData(None, None, None)}
        monkeypatch.setattr(_retry, "get_run_logger", lambda: log)
        monkeypatch.setattr(_retry, "newest_iteration", lambda directory: self.newest)
        self.task, self.task_run = SimpleNamespace(), SimpleNamespace()
        context = SimpleNamespace(parameters=inputs, task=self.task, task_run=self.task_run)
        monkeypatch.setattr(_retry, "TaskRunContext", SimpleNamespace(get=lambda: context))
        monkeypatch.setattr("tasks.train.run_directory", lambda *inputs: directory)

    def attempts(
        self, outcomes: list[tuple[int, MegacoreError]], task_run: str = "a"
    ) -> MegacoreError:
        """Fail as Prefect runs a task until it gives up; all outcomes must be needed."""
        self.task.retries = CountedRetries(self.config.launch.retries)
        for left, (saved, error) in enumerate(outcomes, start=1):
            self.task_run.run_count = left
            with pytest.raises(type(error)) as caught:
                self.attempt(saved, error, task_run)
            state: Any = Failed(data=caught.value)
            more = left - 1 < self.task.retries
            if not more or not may_retry(train, SimpleNamespace(id=task_run), state):
                assert left == len(outcomes), f"given up after {left} attempts"
                return caught.value
        raise AssertionError("it would be tried once more")

    def attempt(self, saved: int, error: MegacoreError, task_run: str) -> None:
        """Fail after `saved` iterations."""
        with counted_failures(self.directory, task_run, self.config.launch):
            self.newest += saved
            raise error


class FakeClock:
    """A clock that only `time.sleep` of the module moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1e9
        self.slept = 0.0
        self._events: list[tuple[float, Callable[[], None]]] = []
        functions = SimpleNamespace(
            time=lambda: self.now, monotonic=lambda: self.slept, sleep=self._sleep
        )
        monkeypatch.setattr(_retry, "time", functions)

    def at(self, moment: float, event: Callable[[], None]) -> None:
        """Call `event` when the clock has reached `moment`."""
        self._events.append((moment, event))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds
        for moment, event in self._events:
            if self.now >= moment:
                event()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    return FakeRun(tmp_path, monkeypatch)


LOST = RankLostError("rank 1 was ended by SIGKILL")


def test_retries_without_progress_are_limited(run: FakeRun) -> None:
    error = run.attempts([(0, LOST)] * 3)
    assert str(error).startswith(
        "rank 1 was ended by SIGKILL; given up after 3 attempts without progress"
    )
    assert "launch.retries = 2" in str(error)
    assert [line.partition("; ")[2] for line in run.warnings] == [
        "retry 1 of at most 2 in a row without progress starts from the beginning in 5 s",
        "retry 2 of at most 2 in a row without progress starts from the beginning in 10 s",
    ]
    assert run.warnings[0].startswith("RankLostError: rank 1 was ended by SIGKILL; ")


def test_retries_with_progress_are_unlimited(run: FakeRun) -> None:
    error = run.attempts([(10, LOST)] * 30 + [(0, RankStalledError("stuck"))] * 2)
    assert "given up after 3 attempts" in str(error)
    assert str(error).endswith("the same command resumes from iteration 300")
    assert run.warnings[29].endswith(
        "retry 1 of at most 2 in a row without progress resumes from iteration 300 in 5 s"
    )


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_prefect_shows_launch_retries_until_progress_earns_more(run: FakeRun, lost: int) -> None:
    run.attempts([(0, LOST)] * 3)
    assert run.task.retries == run.config.launch.retries
    run.attempts([(5, LOST)] * lost + [(0, LOST)] * 2, task_run="b")
    assert run.task.retries == lost + 1, "the last attempt is the third without progress"


def test_waits_double_in_a_row_without_progress(run: FakeRun) -> None:
    run.attempts([(5, LOST)] * 4 + [(0, LOST)] * 2)
    waits = [line.rpartition(" in ")[2] for line in run.warnings]
    assert waits == ["5 s"] * 4 + ["10 s"]


def test_only_an_attempt_after_a_failure_of_its_task_run_waits(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(monkeypatch)
    launch = run.config.launch
    wait_to_retry(run.directory, "a", launch)
    assert clock.slept == 0
    for number in (1, 2):
        run.task_run.run_count = number
        with pytest.raises(RankLostError):
            run.attempt(0, LOST, "a")
    wait_to_retry(run.directory, "b", launch)
    assert clock.slept == 0
    clock.now += 3  # Prefect may take some time to begin the retry
    wait_to_retry(run.directory, "a", launch)
    assert clock.slept == pytest.approx(10 - 3)
    wait_to_retry(run.directory, "a", launch)
    assert clock.slept == pytest.approx(10 - 3)


def test_a_task_run_that_was_given_up_is_repeated_at_once(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(monkeypatch)
    run.attempts([(0, LOST)] * 3)
    wait_to_retry(run.directory, "a", run.config.launch)
    assert clock.slept == 0


def test_a_clock_that_is_set_back_does_not_lengthen_a_wait(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(monkeypatch)
    Failures("a", 1, 0, retry_at=clock.now + 1e6).write(run.directory)
    wait_to_retry(run.directory, "a", run.config.launch)
    assert clock.slept == pytest.approx(5)


@pytest.mark.parametrize("saved", [0, 40])
def test_a_wait_ends_at_the_stop_file(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch, saved: int
) -> None:
    clock = FakeClock(monkeypatch)
    stop = run.directory / "stop"
    clock.at(clock.now + 2, stop.touch)
    Failures("a", 2, saved, retry_at=clock.now + 10).write(run.directory)
    with pytest.raises(TrainingStoppedError) as caught:
        wait_to_retry(run.directory, "a", run.config.launch)
    place = "resumes from iteration 40" if saved else "starts from the beginning"
    assert str(caught.value) == (
        f"training stopped before retry 2 since {stop} was there (it is removed now): the same "
        f"command {place}"
    )
    assert clock.slept == pytest.approx(2)
    assert not stop.exists()


def test_default_waits_outlast_the_restart_of_a_host() -> None:
    delays = retry_delays(LaunchConfig())
    assert delays == [5, 10, 20, 40, 80, 160]
    assert sum(delays) > 300


def test_waits_are_bounded_in_length_and_number() -> None:
    assert retry_delays(LaunchConfig(retries=8, retry_delay=60))[-4:] == [300] * 4
    assert retry_delays(LaunchConfig(retries=2, retry_delay=900)) == [900, 900]
    assert retry_delays(LaunchConfig(retry_delay=0)) == []
    many = retry_delays(LaunchConfig(retries=10**9, retry_delay=1e308))
    assert collect.with_options(retry_delay_seconds=many).retry_delay_seconds == many


def test_progress_resets_the_count(run: FakeRun) -> None:
    run.attempts([(0, LOST), (0, LOST), (5, LOST), (0, LOST), (0, LOST)])


def test_another_flow_run_starts_a_new_count(run: FakeRun) -> None:
    run.attempts([(0, LOST)] * 3, task_run="a")
    run.attempts([(0, LOST)] * 3, task_run="b")


def test_zero_retries_disable_retrying_despite_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun(tmp_path, monkeypatch, retries=0)
    assert run.attempts([(10, LOST)]) is LOST
    assert run.warnings == []


def test_preemption_is_retried(run: FakeRun) -> None:
    error = run.attempts([(0, PreemptedError("SIGTERM"))] * 3)
    assert isinstance(error, PreemptedError)


def test_a_passing_failure_of_the_disk_is_retried_within_the_limit(run: FakeRun) -> None:
    error = TransientFileError("rank 0: cannot read or write events.jsonl (Input/output error)")
    last = run.attempts([(10, error)] * 5 + [(0, error)] * 2)
    assert isinstance(last, TransientFileError)
    assert "given up after 3 attempts without progress" in str(last)


def test_an_error_of_the_disk_in_this_process_counts_too(run: FakeRun) -> None:
    run.task_run.run_count = 1
    with (
        pytest.raises(TransientFileError, match=r"events\.jsonl"),
        counted_failures(run.directory, "a", run.config.launch),
    ):
        raise OSError(errno.EIO, "Input/output error", "events.jsonl")
    assert Failures.read(run.directory, "a").count == 1


@pytest.mark.parametrize(
    ("module", "calls"),
    [
        (
            "train",
            [
                "lock",
                "training_problem",
                "wait_to_retry",
                "_refuse_to_shorten",
                "_refuse_other_order",
                "open_artifact",
            ],
        ),
        ("finetune", ["lock", "artifact_problem", "wait_to_retry", "open_artifact"]),
    ],
)
def test_an_error_of_the_disk_before_and_after_the_ranks_counts_too(
    module: str, calls: list[str], run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = {"train": train, "finetune": finetune}[module]
    shared = {name: f"tasks._retry.{name}" for name in ("holder_name", "lock", "wait_to_retry")}
    done: dict[str, Any] = {
        "holder_name": lambda: "",
        "lock": lambda *arguments, **options: nullcontext(3),
        "devices": lambda *arguments, **options: nullcontext(),
        "_run": lambda *arguments: None,
        f"{module}_key": lambda *arguments: None,
        {"train": "training_problem", "finetune": "artifact_problem"}[module]: (
            lambda *arguments: "it is new"
        ),
        **{name: lambda *arguments: None for name in calls if name.startswith(("_refuse", "wait"))},
        **({"artifact_directory": lambda key: run.directory} if module == "finetune" else {}),
    }
    for name, function in done.items():
        monkeypatch.setattr(shared.get(name, f"tasks.{module}.{name}"), function)

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", "manifest.json")

    @contextmanager
    def failing_lock(*arguments: object, **options: object) -> Iterator[int]:
        fail()
        yield 3

    inputs = [RunData(None, None, None)] if module == "train" else [None, None]
    for number, name in enumerate(calls, start=1):
        run.task_run.run_count = number
        with monkeypatch.context() as patch:
            place = shared.get(name, f"tasks.{module}.{name}")
            patch.setattr(place, failing_lock if name == "lock" else fail)
            with pytest.raises(TransientFileError, match="Stale file handle"):
                task.fn(run.config, *inputs)
        assert Failures.read(run.directory, "None").count == number, name


def test_checkpoints_that_cannot_be_listed_at_the_start_are_no_progress(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = iter([True, False] * 2)

    def newest(directory: Path) -> int:
        if next(fails):
            raise TransientFileError("cannot read complete.json (Stale file handle)")
        return 7

    monkeypatch.setattr(_retry, "newest_iteration", newest)
    for number in (1, 2):
        run.task_run.run_count = number
        with (
            pytest.raises(TransientFileError),
            counted_failures(run.directory, "a", run.config.launch),
        ):
            raise AssertionError("the attempt must not start")
        failures = Failures.read(run.directory, "a")
        assert (failures.count, failures.iteration) == (number, 7)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("x"),
        DataFormatError("x"),
        MemoryExhaustedError("x"),
        LossError("x"),
        TrainingStoppedError("x"),
        StageTimeoutError("x"),
        FileAccessError("x"),
        WorkspaceError("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_permanent_errors_are_not_retried(run: FakeRun, error: MegacoreError) -> None:
    assert run.attempts([(10, error)]) is error
    assert not (run.directory / FAILURES_FILE).exists()


def test_errors_outside_of_the_training_are_not_retried(run: FakeRun) -> None:
    state: Any = Failed(data=ConnectionError())
    assert not may_retry(train, SimpleNamespace(id="a"), state)


@pytest.mark.parametrize("content", ["", "[]", '{"task_run": "a"}'])
def test_damaged_record_resets_the_count(run: FakeRun, content: str) -> None:
    (run.directory / FAILURES_FILE).write_text(content)
    run.attempts([(0, LOST)] * 3)


def test_uncountable_failure_is_not_retried(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_retry, "write_json", fail)
    assert run.attempts([(0, LOST)]) is LOST
    assert "cannot be counted" in run.warnings[0]


def test_a_failure_is_retried_if_the_checkpoints_cannot_be_listed(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([4])

    def newest(directory: Path) -> int:
        for iteration in answers:
            return iteration
        raise FileAccessError("cannot read complete.json (Stale file handle)")

    monkeypatch.setattr(_retry, "newest_iteration", newest)
    run.task_run.run_count = 1
    with (
        pytest.raises(RankLostError, match="rank 1 was ended by SIGKILL"),
        counted_failures(run.directory, "a", run.config.launch),
    ):
        raise LOST
    failures = Failures.read(run.directory, "a")
    assert (failures.count, failures.iteration) == (1, 4)
    assert "retry 1 of at most 2" in run.warnings[0]


def test_prefects_retry_line_does_not_apply_to_training() -> None:
    assert isinstance(train.retries, CountedRetries)
    text = "Task run failed with %s: %r - Retry %s/%s will start %s"
    values = ("exception", LOST, 1, CountedRetries(2), "immediately")
    record = logging.LogRecord("prefect.task_runs", logging.INFO, __file__, 1, text, values, None)
    assert not SentenceFilter().filter(record)
    record.args = ("exception", LOST, 1, 2, "immediately")
    assert SentenceFilter().filter(record)


class FakeTask:
    """A task that fails with a given error and notes its options."""

    def __init__(self, error: MegacoreError, retries: int = 0) -> None:
        self.name, self.retries, self.error = "train", retries, error
        self.options: dict[str, Any] = {}

    def with_options(self, **options: Any) -> "FakeTask":
        self.options = options
        return self

    def __call__(self, *inputs: Any, return_state: bool) -> Any:
        return Failed(data=self.error)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Return the rows of the flow's table, as they are added."""
    reported: list[dict[str, str]] = []
    monkeypatch.setattr(
        _stage_runner, "create_table_artifact", lambda table, **values: reported.extend(table)
    )
    return reported


def test_requested_stop_has_a_separate_state(rows: list[dict[str, str]], run: FakeRun) -> None:
    error = TrainingStoppedError("training stopped at iteration 40 of 100")
    task: Any = FakeTask(error, retries=CountedRetries(0))
    with _stage_runner.StageRunner(run.config) as pipeline:
        pipeline.stage(task)
    assert [row["outcome"] for row in rows] == ["stopped"]
    assert task.options["retries"] == run.config.launch.retries
    assert isinstance(task.options["retries"], CountedRetries)
    assert task.options["retry_delay_seconds"] == [], "the attempt waits, where it can be stopped"
    assert pipeline.ended is not None
    assert pipeline.ended.type.value == "CANCELLED"
    assert pipeline.ended.name == "Stopped"
    assert pipeline.ended.data is error
    assert "iteration 40" in str(pipeline.ended.message)


def test_server_that_is_down_hides_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, run: FakeRun
) -> None:
    def fail(*values: object, **options: object) -> None:
        raise ConnectionError("no server")

    monkeypatch.setattr(_stage_runner, "create_table_artifact", fail)
    monkeypatch.setattr("prefect.get_run_logger", lambda: logging.getLogger("test"))
    with pytest.raises(RankLostError), _stage_runner.StageRunner(run.config) as pipeline:
        pipeline.stage(FakeTask(LOST))  # type: ignore[arg-type]
    with _stage_runner.StageRunner(run.config) as pipeline:
        pipeline.stage(FakeTask(TrainingStoppedError("at 40")))  # type: ignore[arg-type]
    assert pipeline.ended is not None
    assert caplog.messages == ["the table of stages was not stored: no server"] * 2


def test_failure_remains_a_failure(rows: list[dict[str, str]], run: FakeRun) -> None:
    task: Any = FakeTask(LOST)
    with pytest.raises(RankLostError), _stage_runner.StageRunner(run.config) as pipeline:
        pipeline.stage(task)
    assert [row["outcome"] for row in rows] == ["failed"]
    assert task.options["retries"] == run.config.launch.retries
    assert task.options["retry_delay_seconds"] == retry_delays(run.config.launch)
    assert pipeline.ended is None


def test_resume_command_is_quoted_and_has_no_secret(
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
    monkeypatch.setattr(_stage_runner, "FlowRunContext", SimpleNamespace(get=lambda: context))
    command = _stage_runner.resume_command(make_config())
    assert command == (
        "python -m flows.pretrain --conf 'my conf.yaml' -o train.train_iters=50 -o "
        '\'data.source.files=[{"url": "https://***@host/a.jsonl"}]\''
    )


def test_resume_command_names_the_version_that_an_alias_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameters = {"conf": "bert-tiny", "overrides": {"seed": 3}}
    context = SimpleNamespace(flow=SimpleNamespace(name="finetune"), parameters=parameters)
    monkeypatch.setattr(_stage_runner, "FlowRunContext", SimpleNamespace(get=lambda: context))
    pinned = tiny_config("models:/bert-tiny/3", Path("data"), "classification")
    assert _stage_runner.resume_command(pinned) == (
        "python -m flows.finetune --conf bert-tiny -o seed=3 -o model.path=models:/bert-tiny/3"
    )


def test_only_complete_checkpoints_count_as_progress(tmp_path: Path) -> None:
    assert _retry.newest_iteration(tmp_path) == 0
    (tmp_path / "checkpoints" / "iter_0000010").mkdir(parents=True)
    assert _retry.newest_iteration(tmp_path) == 0, "it has no completion marker"


def test_a_new_checkpoint_below_a_damaged_one_is_progress(run: FakeRun) -> None:
    def save(iteration: int) -> None:
        directory = run.directory / "checkpoints" / directory_name(iteration)
        directory.mkdir(parents=True)
        Marker(iteration, None, {}).write(directory)

    def fail(saved: int | None) -> None:
        if saved is not None:
            save(saved)
        raise LOST

    save(237)
    (marker,) = run.directory.glob("checkpoints/*/complete.json")
    os.utime(marker, (1, 1))
    run.newest = 237  # passed over, since its content differs
    for number, (saved, count) in enumerate(((None, 1), (None, 2), (210, 1), (None, 2)), 1):
        run.task_run.run_count = number
        with (
            pytest.raises(RankLostError, match="ended by SIGKILL"),
            counted_failures(run.directory, "a", run.config.launch),
        ):
            fail(saved)
        assert Failures.read(run.directory, "a").count == count


def test_other_stages_have_a_fixed_number_of_retries() -> None:
    assert collect.retries == evaluate.retries == 0, "the flow sets launch.retries"


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (
            OSError(errno.EIO, "Input/output error", "a.bin"),
            "TransientFileError: cannot read or write",
        ),
        (OSError(errno.ENOENT, "No such file", "a.bin"), "failed"),
    ],
)
def test_a_failing_disk_is_logged_without_a_traceback(error: OSError, shown: str) -> None:
    record = logging.LogRecord("x", logging.ERROR, "", 0, "failed", (), (OSError, error, None))
    assert SentenceFilter().filter(record)
    assert record.getMessage().startswith(shown)
    assert (record.exc_info is None) == (shown != "failed")


@pytest.mark.parametrize("problem", [None, "its database is full"])
def test_server_error_has_a_traceback_unless_its_database_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, problem: str | None
) -> None:
    class PrefectHTTPStatusError(Exception):
        pass

    monkeypatch.setattr(_logging, "database_problem", lambda: problem)
    error = PrefectHTTPStatusError("Server error '500 Internal Server Error'")
    info = (PrefectHTTPStatusError, error, None)
    record = logging.LogRecord("x", logging.ERROR, "", 0, "failed", (), info)
    assert SentenceFilter().filter(record)
    assert (record.exc_info is None) == (problem is not None)


def test_a_failing_disk_ends_a_flow_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.ESTALE, "Stale file handle", "run.json")

    monkeypatch.setattr(_stage_runner, "get_run_logger", lambda: logging.getLogger("x"))
    monkeypatch.setattr(_stage_runner, "_send_logs", lambda: None)
    state = _stage_runner.sentence_state(fail)()
    assert state is not None
    assert str(state.message).startswith("TransientFileError: cannot read or write run.json (Stale")
