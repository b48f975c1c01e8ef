"""Log lines, summaries and progress that a task shows of its processes."""

import errno
import json
import logging
import os
import pty
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacore.config import RunConfig
from megacore.observe.events import EventWriter
from tasks import _monitor, _stage_runner
from tasks._monitor import LogTail
from tasks._stage_runner import StageRow, StageRunner
from tests._limits import HANG


def test_log_tail_emits_complete_lines_once(tmp_path: Path) -> None:
    path, lines = tmp_path / "log", []
    tail = LogTail(path, lines.append)
    tail.poll()
    path.write_bytes(b"first\nsec")
    tail.poll()
    assert lines == ["first"]
    with path.open("ab") as file:
        file.write("ond\n\nthird é\n".encode())
    tail.poll()
    tail.poll()
    assert lines == ["first", "second", "third é"]


def test_log_tail_starts_at_the_end_of_the_existing_log(tmp_path: Path) -> None:
    path, lines = tmp_path / "log", []
    path.write_text("old\n")
    tail = LogTail(path, lines.append)
    with path.open("a") as file:
        file.write("new\n")
    tail.poll()
    assert lines == ["new"]


def test_stage_row_is_formatted_as_text() -> None:
    row = StageRow("collect", "cached", 0.04, "abc", {"documents": 3})
    assert row.cells() == {
        "stage": "collect",
        "outcome": "cached",
        "seconds": "0.0",
        "key": "abc",
        "counts": "3 documents",
    }


def test_progress_shows_an_event_without_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fp16 skips its first iterations while the loss scale falls."""
    shown: list[str] = []
    monkeypatch.setattr(_monitor, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(
        _monitor, "create_progress_artifact", lambda **values: shown.append(values["description"])
    )
    monkeypatch.setattr(
        _monitor, "update_progress_artifact", lambda **values: shown.append(values["description"])
    )
    events = tmp_path / "events.jsonl"
    events.write_text('{"kind": "start", "iteration": 0}\n{"kind": "st')
    with _monitor.TrainingMonitor(tmp_path / "log", events, 20, lambda: None) as monitor:
        # The writer removes the incomplete line before it continues.
        step = (
            '{"kind": "step", "time": 1.0, "iteration": 10, "consumed_tokens": 320, "lm_loss": '
            "null}"
        )
        events.write_text(f'{{"kind": "start", "iteration": 0}}\n{step}\n')
        monitor.poll()
    assert shown == ["iteration 10 of 20, lm loss -, unknown left"]


def test_prefect_stores_some_lines_of_a_long_training_and_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr(_monitor, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(_monitor, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(_monitor, "STORED_LINES", 10)
    log = tmp_path / "log"
    log.touch()
    monitor = _monitor.TrainingMonitor(log, tmp_path / "events.jsonl", None, lambda: None)
    with caplog.at_level(logging.INFO, "test"):
        for step in range(120):  # one a second
            now += 1.0
            with log.open("a") as file:
                file.write(f" [12:00:00] iteration {step} | lm loss: 4.0 |\ntime (ms) | all: 9.0\n")
                file.write("saved checkpoint\n" * (step == 100))
            monitor.poll()
    stored = [
        record.getMessage() for record in caplog.records if vars(record).get("send_to_api", True)
    ]
    assert len(caplog.records) == 242, "the terminal and handlers of the user have all lines"
    assert "saved checkpoint" in stored
    assert f"from here on; all are in {log}" in stored[10]
    steps = [int(line.split()[2]) for line in stored if "iteration" in line]
    assert steps == [0, 1, 2, 3, 4, 59, 60, 119]


def test_an_unreadable_file_is_one_warning_and_the_display_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_monitor, "get_run_logger", lambda: logging.getLogger("test"))
    (tmp_path / "log").touch()
    polls: list[int] = []
    monitor = _monitor.TrainingMonitor(
        tmp_path / "log", tmp_path / "events.jsonl", 20, lambda: polls.append(1)
    )
    read = LogTail.poll

    def fail(tail: LogTail) -> None:
        raise OSError(errno.EIO, "Input/output error", str(tail.path))

    with caplog.at_level(logging.INFO, "test"):
        monkeypatch.setattr(LogTail, "poll", fail)
        monitor.poll()
        monitor.poll()
        monkeypatch.setattr(LogTail, "poll", read)
        (tmp_path / "log").write_text("step\n")
        monitor.poll()
    warning, line = (record.getMessage() for record in caplog.records)
    assert "Input/output error" in warning
    assert line == "step"
    assert len(polls) == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_closed_terminal_fails_no_training_and_no_flow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: RunConfig
) -> None:
    monkeypatch.setattr(_monitor, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(_monitor, "console_handler", lambda: None)
    for name in ("create_table_artifact", "create_markdown_artifact"):
        monkeypatch.setattr(_stage_runner, name, lambda *args, **named: shown.append(named["key"]))
    master, slave = pty.openpty()
    terminal = open(slave, "w", encoding="utf-8")  # noqa: SIM115 - its end cannot be written
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    shown: list[str] = []
    with _monitor.TrainingMonitor(tmp_path / "log", tmp_path / "events.jsonl", 20, lambda: None):
        os.close(master)
        with pytest.raises(OSError, match="Input/output error"):
            print("line", file=terminal, flush=True)
    with StageRunner(config, [StageRow("train", "ran", 1.0, "key", {})], "a summary"):
        pass
    assert shown == ["stages", "summary"]
    with suppress(OSError):
        terminal.close()


def test_progress_names_loss_perplexity_and_tokens_per_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: dict[str, str] = {}
    monkeypatch.setattr(_monitor, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(_monitor, "create_progress_artifact", lambda **values: shown.update(values))
    monkeypatch.setattr(_monitor.PerplexityTable, "measured", lambda self, event: None)
    events = tmp_path / "events.jsonl"
    with _monitor.TrainingMonitor(tmp_path / "log", events, 20, lambda: None) as monitor:
        events.write_text(
            '{"kind": "perplexity", "time": 1.0, "iteration": 10, "valid_ppl": 77.9}\n'
            '{"kind": "step", "time": 1.0, "iteration": 10, "lm_loss": 4.5, "lr": 0.00015, '
            '"tokens_per_second": 12345.6}\n'
        )
        monitor.poll()
    assert shown["description"] == (
        "iteration 10 of 20, lm loss 4.500, valid_ppl 77.90, lr 1.50e-04, 12,346 tokens/s, "
        "unknown left"
    )
    assert shown["description"] == f"iteration 10 of 20, {monitor._bar.tasks[0].fields['note']}"


def test_the_last_progress_has_the_perplexity_that_is_measured_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def show(**values: Any) -> str:
        shown.append(values["description"])
        return "id"

    monkeypatch.setattr(_monitor, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(_monitor, "create_progress_artifact", show)
    monkeypatch.setattr(_monitor, "update_progress_artifact", show)
    monkeypatch.setattr(_monitor.PerplexityTable, "measured", lambda *_: None)
    events = tmp_path / "events.jsonl"
    with _monitor.TrainingMonitor(tmp_path / "log", events, 20, lambda: None) as monitor:
        with EventWriter(events, 1) as writer:
            writer.write("perplexity", iteration=10, valid_ppl=99.0)
            writer.write("step", iteration=20, lm_loss=4.0)
            writer.write("perplexity", iteration=20, valid_ppl=77.9)
        monitor.poll()
    assert shown[-1] == "iteration 20 of 20, lm loss 4.000, valid_ppl 77.90, 0.0 min left"


def test_progress_of_a_fine_tuning_uses_the_length_in_its_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: dict[str, str] = {}
    monkeypatch.setattr(_monitor, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(_monitor, "create_progress_artifact", lambda **values: shown.update(values))
    events = tmp_path / "events.jsonl"
    with _monitor.TrainingMonitor(
        tmp_path / "log", events, None, lambda: None, label="fine-tuning"
    ) as monitor:
        events.write_text(
            '{"kind": "step", "time": 1.0, "iteration": 4, "total_iterations": 16, "loss": 0.5, '
            '"consumed_tokens": 9}\n'
        )
        monitor.poll()
    assert (shown["key"], shown["progress"]) == ("fine-tuning", 25.0)
    assert shown["description"] == "iteration 4 of 16, loss 0.500, unknown left"


def test_a_server_that_does_not_answer_holds_up_no_poll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervision of the ranks waits for the poll."""
    monkeypatch.setattr(_monitor, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(_monitor, "ARTIFACT_INTERVAL", 0.0)
    monkeypatch.setattr(_monitor, "_LONGEST_STOP", 0.2)
    frozen = threading.Event()
    monkeypatch.setattr(
        _monitor, "create_progress_artifact", lambda **values: frozen.wait(2 * HANG)
    )
    monkeypatch.setattr(_monitor.PerplexityTable, "measured", lambda *_: frozen.wait(2 * HANG))
    events = tmp_path / "events.jsonl"
    started = time.monotonic()
    with _monitor.TrainingMonitor(tmp_path / "log", events, 20, lambda: None) as monitor:
        for iteration in range(1, 6):
            with events.open("a") as file:
                for kind in ("perplexity", "step"):
                    event = {"kind": kind, "time": 1.0, "iteration": iteration, "valid_ppl": 2.0}
                    file.write(json.dumps(event) + "\n")
            monitor.poll()
    assert time.monotonic() - started < 120
    frozen.set()
