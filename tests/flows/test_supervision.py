"""Flows that are stopped or killed during a training: no rank outlives them and a rerun resumes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megacore.errors import DataFormatError, StageTimeoutError
from megacore.ranks import stages
from tests._limits import HANG
from tests.flows.conftest import ROOT, Bench, server_environment, tiny_config

STOP_GRACE = 3.0
GRACE = 60.0
"""Seconds within which the ranks must be gone then; they would train for longer."""
UNREACHED_ITERATIONS = 100_000
"""A number of iterations that no test reaches."""


def events_of(workspace: Path) -> list[dict[str, Any]]:
    """Return the events of the only run in a workspace, without an incomplete last line."""
    lines = [
        line
        for path in workspace.glob("runs/*/events.jsonl")
        for line in path.read_text().splitlines(True)
    ]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def ranks_of(workspace: Path) -> list[psutil.Process]:
    """Return all processes whose command line names this workspace: guard, launcher and ranks."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(workspace) in part for part in process.info["cmdline"] or [])
    ]


def wait_for(event: str, condition: Any, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{event} did not happen within {timeout} s"
        time.sleep(0.1)


@pytest.fixture
def conf(tmp_path: Path, bench: Bench) -> Path:
    """Write a configuration of two ranks that train endlessly with frequent checkpoints."""
    config = tiny_config(bench.corpus)
    config["name"] = "endless"
    config["train"] |= {
        "train_iters": UNREACHED_ITERATIONS,
        "eval_interval": UNREACHED_ITERATIONS,
        "global_batch_size": 4,
        "log_interval": 10,
    }
    # With a constant learning rate, fewer iterations give the same run.
    config["optim"] = {"lr": 1e-3, "lr_decay_style": "constant"}
    config["checkpoint"] = {"save_interval": 10, "keep_last": 2}
    config["launch"] |= {"nproc_per_node": 2, "stop_grace": STOP_GRACE}
    path = tmp_path / "endless.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def start(conf: Path, workspace: Path, *overrides: str) -> "subprocess.Popen[bytes]":
    """Start `python -m flows.pretrain` in a separate workspace on the session's Prefect server."""
    environment = os.environ | server_environment(workspace)
    command = [sys.executable, "-m", "flows.pretrain", "--conf", str(conf)]
    for override in overrides:
        command += ["-o", override]
    log = open(workspace.with_suffix(".log"), "ab")  # noqa: SIM115 - open as long as the process
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=log, preexec_fn=enable_interrupts
    )


def enable_interrupts() -> None:
    """Restore SIGINT, which processes of a shell's background jobs ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def last_checkpoint(workspace: Path) -> int:
    return max(
        (event["iteration"] for event in events_of(workspace) if event["kind"] == "checkpoint"),
        default=0,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "signal_number",
    [signal.SIGKILL, signal.SIGTERM, signal.SIGINT],
    ids=lambda number: number.name,
)
def test_no_rank_outlives_the_flow_and_a_rerun_resumes(
    conf: Path, tmp_path: Path, empty_store: Path, signal_number: signal.Signals
) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    shutil.copy(empty_store, workspace / "mlflow.db")
    flow = start(conf, workspace)
    try:
        wait_for(
            "a checkpoint", lambda: last_checkpoint(workspace) > 0 or flow.poll() is not None, HANG
        )
        assert flow.poll() is None, workspace.with_suffix(".log").read_text()[-3000:]
        assert len(ranks_of(workspace)) >= 3
        flow.send_signal(signal_number)
        flow.wait(timeout=HANG)
        wait_for("the end of every rank", lambda: not ranks_of(workspace), STOP_GRACE + GRACE)
    finally:
        flow.kill()
    last_saved = last_checkpoint(workspace)
    assert last_saved > 0
    assert flow.returncode != 0
    if signal_number is not signal.SIGKILL:
        return
    target = last_saved + 3
    rerun = start(conf, workspace, f"train.train_iters={target}", "train.global_batch_size=4")
    assert rerun.wait(timeout=HANG) == 0, workspace.with_suffix(".log").read_text()[-3000:]
    starts = [event for event in events_of(workspace) if event["kind"] == "start"]
    assert starts[-1]["resumed_from"] == last_saved
    assert [event["attempt"] for event in starts] == [1, 2]
    assert last_checkpoint(workspace) == target


@pytest.mark.slow
def test_timeout_ends_all_ranks_with_a_timeout_error(bench: Bench, conf: Path) -> None:
    from flows.pretrain import pretrain

    with pytest.raises(StageTimeoutError, match=r"launch\.timeout_minutes"):
        pretrain(str(conf), {"launch.timeout_minutes": 0.1, "seed": 7})
    # The command lines of this process's other children (the server) do not name the job file.
    wait_for(
        "the end of every rank",
        lambda: not list(filter(is_rank, ranks_of(bench.workspace))),
        STOP_GRACE + GRACE,
    )


def is_rank(process: psutil.Process) -> bool:
    return any("megacore.ranks" in part for part in process.info["cmdline"] or [])


@pytest.mark.slow
@pytest.mark.usefixtures("lost_rank")
def test_retry_after_a_lost_rank_resumes(
    bench: Bench, conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's retry resumes from the last complete checkpoint."""
    from flows.pretrain import pretrain

    def end_flow(*args: Any, **kwargs: Any) -> None:
        raise DataFormatError("no stage after the training is examined")

    monkeypatch.setattr(stages, "evaluate", end_flow)
    before = {path for path in bench.workspace.glob("runs/*") if path.is_dir()}

    overrides = {"seed": 8, "train.train_iters": 100, "launch.retries": 1, "launch.retry_delay": 0}
    with pytest.raises(DataFormatError, match="no stage after the training"):
        pretrain(str(conf), overrides)
    (directory,) = (
        path for path in bench.workspace.glob("runs/*") if path.is_dir() and path not in before
    )
    events = [*map(json.loads, (directory / "events.jsonl").read_text().splitlines())]
    starts = [event for event in events if event["kind"] == "start"]
    assert [event["attempt"] for event in starts] == [1, 2]
    assert starts[1]["resumed_from"] == 10
    assert max(event["iteration"] for event in events if event["kind"] == "step") == 100
