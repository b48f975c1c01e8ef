"""Tests of the recorder, which writes events, log lines and TensorBoard files."""

import errno
import importlib.util
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacore.errors import ConfigError, MegacoreError, TransientFileError, WorkspaceError
from megacore.observe import recorder as tensorboard
from megacore.observe.recorder import Recorder
from tests.observe.test_logging import REPORT


def record_run(directory: Path, rank: int, *, board: bool = False) -> None:
    with Recorder(directory, attempt=1, rank=rank, tensorboard=board) as recorder:
        recorder.event("start", iteration=0, ranks=2)
        recorder.step(REPORT, {"update": 1.0})
        recorder.evaluation(
            100, {"lm_loss": 5.0}, samples=640, consumed_samples=6400, consumed_tokens=6553600
        )
        recorder.perplexity(
            100, 5.0, samples=64, seconds=1.5, consumed_samples=6400, consumed_tokens=6553600
        )
        recorder.warning("look here")


def test_rank_0_writes_events_and_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "megacore"):
        record_run(tmp_path, 0)
    events = [
        json.loads(line)
        for line in (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [event["kind"] for event in events] == [
        "start",
        "step",
        "evaluation",
        "perplexity",
        "warning",
    ]
    assert events[1]["lr"] == REPORT.lr
    assert "ppl" not in events[2]
    assert events[3]["valid_ppl"] == pytest.approx(148.413, abs=1e-3)
    assert (events[3]["valid_loss"], events[3]["samples"], events[3]["seconds"]) == (5.0, 64, 1.5)
    assert "validation loss at iteration 100" in caplog.text
    assert "valid_ppl at iteration 100: 148.4132" in caplog.text
    assert "look here" in caplog.text


def test_each_further_loss_is_recorded_under_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses = {"lm_loss": 5.0, "sop_loss": 0.5}
    with (
        caplog.at_level(logging.INFO, "megacore"),
        Recorder(tmp_path, attempt=1, rank=0, tensorboard=False) as recorder,
    ):
        recorder.step(replace(REPORT, further_losses={"sop_loss": 0.75}), {})
        recorder.evaluation(100, losses, samples=1, consumed_samples=1, consumed_tokens=1)
    step, evaluation = (
        json.loads(line)
        for line in (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    )
    assert (step["lm_loss"], step["sop_loss"]) == (REPORT.lm_loss, 0.75)
    assert {name: evaluation[name] for name in losses} == losses
    assert "sop loss: 7.500000E-01" in caplog.text
    assert "sop loss value: 5.000000E-01" in caplog.text


def test_other_ranks_write_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "megacore"):
        record_run(tmp_path, 1, board=True)
    assert list(tmp_path.iterdir()) == []
    assert caplog.text == ""


def test_missing_tensorboard_is_refused_with_the_name_of_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"\.\[tensorboard\]"):
        record_run(tmp_path, 0, board=True)


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="the extra tensorboard is not installed"
)
def test_tensorboard_files_contain_the_curves(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record_run(tmp_path, 0, board=True)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert board.Scalars("lm loss")[0].value == pytest.approx(9.44)
    assert board.Scalars("lm loss validation ppl")[0].step == 100


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="the extra tensorboard is not installed"
)
def test_tensorboard_shows_repeated_iterations_of_a_resumed_run_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record_run(tmp_path, 0, board=True)
    time.sleep(1.1)  # the files are named after and read in the order of full seconds
    record_run(tmp_path, 0, board=True)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [scalar.step for scalar in board.Scalars("lm loss")] == [100]


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="the extra tensorboard is not installed"
)
def test_tensorboard_keeps_what_was_written_of_the_iteration_before_a_resume(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record_run(tmp_path, 0, board=True)
    time.sleep(1.1)
    with Recorder(tmp_path, attempt=2, rank=0, tensorboard=True) as recorder:
        recorder.event("start", iteration=100)
        recorder.perplexity(
            100, 5.0, samples=64, seconds=1.5, consumed_samples=6400, consumed_tokens=6553600
        )
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    for tag in ("lm loss", "lm loss validation"):
        assert [scalar.step for scalar in board.Scalars(tag)] == [100]


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="the extra tensorboard is not installed"
)
@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, WorkspaceError), (errno.EIO, TransientFileError)]
)
def test_an_error_of_the_disk_names_the_tensorboard_directory(
    code: int, kind: type[MegacoreError], tmp_path: Path
) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    writer = tensorboard.TensorBoardWriter(tmp_path)
    file: Any = SimpleNamespace(add_scalar=lambda *_: None, flush=fail, close=fail)
    writer._writer = file
    writes: list[Callable[[], None]] = [lambda: writer.scalars({"loss": 1.0}, 1), writer.close]
    for write in writes:
        with pytest.raises(kind, match=f"{tmp_path}.*{os.strerror(code)}"):
            write()
