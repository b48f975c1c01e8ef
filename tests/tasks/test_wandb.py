"""Delivery of events to Weights & Biases: each row exactly once, without delaying training."""

import importlib.util
import json
import logging
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacore.config import RunConfig
from megacore.config.train import WandbConfig
from megacore.errors import ConfigError
from megacore.observe import events
from tasks import _mlflow_events, _wandb
from tasks._live_run import LiveRun
from tasks._mlflow import Tracking
from tasks._mlflow_events import Forwarder, points_of
from tasks._wandb import STATE_FILE, WandbRun, row_of
from tests._limits import HANG
from tests.tasks.events import EventLog

KEY = "0123456789abcdef0123456789abcdef01234567"
installed = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="the extra wandb is not installed"
)


class Server:
    """A stand-in for the package and its server, which keeps rows by run id and step."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, dict[str, Any]]] = {}
        self.calls: list[dict[str, Any]] = []
        self.exits: list[int] = []
        self.key = True
        self.fail: Exception | None = None
        self.hang = threading.Event()
        self.hang.set()

    Settings = SimpleNamespace

    def login(self, *, prompt: bool) -> bool:
        assert not prompt
        return self.key

    def init(self, **call: Any) -> Any:
        self.hang.wait(2 * HANG)
        if self.fail is not None:
            raise self.fail
        self.calls.append(call)
        rows = self.rows.setdefault(call["id"], {})

        def log(row: dict[str, Any], *, step: int, commit: bool) -> None:
            assert commit
            assert step == max(rows, default=-1) + 1, "a step twice or left out"
            rows[step] = row

        return SimpleNamespace(
            id=call["id"],
            step=max(rows, default=-1) + 1,
            log=log,
            define_metric=lambda *names, **options: None,
            finish=lambda exit_code: self.exits.append(exit_code),
        )

    @property
    def iterations(self) -> list[tuple[str, int]]:
        """Name of the first metric and iteration of each row of the only run."""
        (rows,) = self.rows.values()
        return [(list(row)[2].partition("/")[0], row["iteration"]) for row in rows.values()]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setitem(sys.modules, "wandb", server)
    monkeypatch.setattr(_wandb, "_LONGEST_STOP", HANG)
    return server


def sender(run_directory: Path, config: RunConfig, **settings: Any) -> WandbRun:
    """Return a sender as a new process would."""
    return WandbRun(WandbConfig(**settings), run_directory, config, interval=0.0)


def test_rows_have_the_names_and_numbers_of_mlflow(log: EventLog) -> None:
    log.step(10, mfu=None)
    log.evaluation(10, 4.0)
    log.start(10)
    step, evaluation, start = map(json.loads, log.path.read_text().splitlines())
    assert row_of(start) == {}
    assert row_of(evaluation) == {
        "iteration": 10,
        "consumed_tokens": 320,
        "validation/lm_loss": 4.0,
    }
    by_iteration = {point.key: point.value for point in points_of(step) if point.step == 10}
    assert row_of(step) == {"iteration": 10, "consumed_tokens": 320} | by_iteration


def test_a_start_reads_only_the_heads_of_steps_that_were_sent(
    server: Server,
    run_directory: Path,
    config: RunConfig,
    log: EventLog,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for iteration in range(1, 50):
        log.step(iteration)
    log.evaluation(49)
    sender(run_directory, config).finish(failed=True)
    log.step(50)
    parsed: list[bytes] = []
    parse = events._parse
    monkeypatch.setattr(events, "_parse", lambda *line: parsed.append(line[0]) or parse(*line))
    sender(run_directory, config).finish()
    assert server.iterations[-3:] == [("train", 49), ("validation", 49), ("train", 50)]
    assert len(parsed) == 2, "the evaluation and the new step"


def test_repeated_iterations_of_a_resumed_run_are_sent_once(
    server: Server, run_directory: Path, config: RunConfig, log: EventLog
) -> None:
    log.step(10)
    log.step(20)
    log.evaluation(20)
    sender(run_directory, config).finish(failed=True)
    log.attempt = 2
    log.evaluation(10)  # missed by the first attempt
    log.step(20, 4.0)
    log.step(30)
    sender(run_directory, config).finish()
    sender(run_directory, config).finish()
    train, valid = "train", "validation"
    assert server.iterations == [
        *((train, 10), (train, 20), (valid, 20)),
        *((valid, 10), (train, 30)),
    ]
    assert server.exits == [1, 0, 0]
    assert len({call["id"] for call in server.calls}) == 1
    assert {call["resume"] for call in server.calls} == {"allow"}


def test_rows_that_the_server_lacks_are_sent_again(
    server: Server, run_directory: Path, config: RunConfig, log: EventLog
) -> None:
    for iteration in (10, 20, 30):
        log.step(iteration)
    sender(run_directory, config).finish()
    (rows,) = server.rows.values()
    del rows[2]  # a kill before wandb had uploaded it
    sender(run_directory, config).finish()
    assert server.iterations == [("train", 10), ("train", 20), ("train", 30)]


def test_the_configuration_names_the_run_and_is_attached_without_secrets(
    server: Server, run_directory: Path, config: RunConfig, log: EventLog
) -> None:
    url = "https://user:hidden-word@example.com/a.jsonl"
    source = {"kind": "http", "files": ({"url": url, "sha256": "0" * 64},)}
    values = config.model_dump() | {"data": config.data.model_dump() | {"source": source}}
    values["tracking"] = {"experiment": "mine", "system_metrics": False}
    secret = RunConfig.model_validate(values)
    log.step(10)
    sender(run_directory, secret, entity="team", tags=["a", "b"]).finish()
    (call,) = server.calls
    assert (call["project"], call["entity"], call["tags"]) == ("mine", "team", ["a", "b"])
    assert call["name"] == f"{config.name}-{run_directory.name[:8]}"
    assert call["config"]["train"]["train_iters"] == 100
    assert "hidden-word" not in json.dumps(call["config"])
    assert call["settings"].x_disable_stats


def test_a_failing_wandb_gives_one_warning_and_gets_the_rows_later(
    server: Server,
    run_directory: Path,
    config: RunConfig,
    log: EventLog,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_wandb, "_FIRST_BACKOFF", 0.0)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    server.fail = RuntimeError(f"refused {KEY}")
    run = sender(run_directory, config)
    log.step(10)
    with caplog.at_level(logging.WARNING, "prefect.megacore"):
        while run._deliveries.failures < 3:
            run.poll()
            time.sleep(0.005)
        server.fail = None
        run.finish()
    assert [record.getMessage() for record in caplog.records] == [
        "wandb: RuntimeError: refused ***; training continues, and rows are sent later"
    ]
    assert server.iterations == [("train", 10)]


def test_the_pause_stays_finite_after_many_failures(
    server: Server, run_directory: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    server.fail = RuntimeError("refused")
    run = sender(run_directory, config)
    monkeypatch.setattr(_mlflow_events, "time", SimpleNamespace(monotonic=lambda: 5.0))
    run._deliveries.failures = 2000
    run._attempt()
    assert run._deliveries.due == 305.0


def test_the_end_without_a_thread_is_a_warning(
    server: Server,
    run_directory: Path,
    config: RunConfig,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    run = sender(run_directory, config)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        run.poll()  # LiveRun warns, and polls again
    with caplog.at_level(logging.WARNING, "prefect.megacore"):
        run.finish()
    assert [record.getMessage() for record in caplog.records] == [
        "wandb: can't start new thread; training continues, and rows are sent later"
    ]


def test_without_a_key_no_run_begins(
    server: Server,
    run_directory: Path,
    config: RunConfig,
    log: EventLog,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.key = False
    log.step(10)
    sender(run_directory, config).finish()
    assert "there is no API key: set WANDB_API_KEY" in caplog.text
    assert server.calls == []


def test_a_hanging_wandb_holds_up_neither_polls_nor_the_end(
    server: Server,
    run_directory: Path,
    config: RunConfig,
    log: EventLog,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_wandb, "_LONGEST_STOP", 0.2)
    server.hang.clear()
    log.step(10)
    run = sender(run_directory, config)
    started = time.monotonic()
    for _ in range(100):
        run.poll()
    run.finish()
    assert time.monotonic() - started < 120, "the server hangs for longer"
    assert "did not take the last rows in time" in caplog.text
    server.hang.set()


def test_a_live_run_sends_to_both_and_needs_the_package(
    server: Server,
    tracking: Tracking,
    run_directory: Path,
    config: RunConfig,
    facts: Any,
    log: EventLog,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {"system_metrics": False, "wandb": {"project": "p"}}
    chosen = RunConfig.model_validate(config.model_dump() | {"tracking": values})
    forwarder = Forwarder(tracking, run_directory, chosen, facts, interval=0.0)
    log.step(10)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"wandb is not installed.*\.\[wandb\]"):
            LiveRun(forwarder, 1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with LiveRun(forwarder, 1) as live:
        live.poll()
    assert server.iterations == [("train", 10)]
    forwarder.finish()


def history(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows in wandb's files, records of protobuf in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted(directory.rglob("*.wandb")):
        data, place, part = path.read_bytes(), 7, b""
        while place < len(data):
            room = 32768 - place % 32768
            if room < 7:
                place += room
                continue
            _, size, kind = struct.unpack("<IHB", data[place : place + 7])
            part += data[place + 7 : place + 7 + size]
            place += 7 + size
            if kind in (1, 4):  # a whole record, or the last part of one
                record = wandb_internal_pb2.Record.FromString(part)
                part = b""
                if record.WhichOneof("record_type") == "history":
                    yield {
                        item.key or ".".join(item.nested_key): json.loads(item.value_json)
                        for item in record.history.item
                    }


@installed
def test_an_offline_run_has_each_row_once_in_its_files_and_no_key(
    run_directory: Path, config: RunConfig, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr(_wandb, "_LONGEST_STOP", HANG)  # wandb starts a process
    log.step(10, 5.5)
    log.evaluation(10)
    sender(run_directory, config, mode="offline").finish(failed=True)
    log.step(10, 9.0)
    log.step(20, 4.5)
    sender(run_directory, config, mode="offline").finish()
    rows = list(history(run_directory))
    assert [row["_step"] for row in rows] == [0, 1, 2]
    assert [row["iteration"] for row in rows] == [10, 10, 20]
    assert [row.get("train/lm_loss") for row in rows] == [5.5, None, 4.5]
    assert [row.get("validation/lm_loss") for row in rows] == [None, 5.0, None]
    state = json.loads((run_directory / STATE_FILE).read_text())
    files = {path.name for path in run_directory.rglob("*.wandb")}
    assert files == {f"run-{state['run_id']}.wandb"}
    assert state["rows"] == 3
    paths = [path for path in run_directory.rglob("*") if path.is_file()]
    assert not any(KEY.encode() in path.read_bytes() for path in paths)
