"""Trainings that are asked to stop, reported by the flow and resumed by the same command."""

import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megacore.artifact import Workspace
from megacore.cli.workspace import stop
from megacore.config.load import parse_config
from megacore.errors import RankLostError
from megacore.observe.runs import runs
from megacore.ranks import stages
from tasks._retry import FAILURES_FILE
from tests._limits import HANG
from tests.flows.conftest import Bench, tiny_config
from tests.flows.test_supervision import events_of, start, wait_for

ITERATIONS = 500
"""Enough to send a signal before the last one."""


@pytest.fixture
def conf(tmp_path: Path, bench: Bench) -> Path:
    """Write a configuration of one rank and one checkpoint at the end."""
    config = tiny_config(bench.corpus)
    config["name"] = "stopped"
    config["train"] |= {"train_iters": ITERATIONS, "eval_interval": ITERATIONS, "log_interval": 1}
    config["checkpoint"] = {"save_interval": ITERATIONS, "keep_last": 9}
    config["launch"] |= {"retries": 1, "retry_delay": 0}
    config["evaluate"] = {"max_samples": 2}
    parse_config(config, origin="test")
    path = tmp_path / "stopped.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def exits(workspace: Path) -> list[tuple[str, int]]:
    return [
        (event["reason"], event["iteration"])
        for event in events_of(workspace)
        if event["kind"] == "exit"
    ]


def last_iteration(workspace: Path) -> int:
    return max(
        (event["iteration"] for event in events_of(workspace) if event["kind"] == "step"), default=0
    )


def wait_for_end(flow: "subprocess.Popen[bytes]", workspace: Path) -> tuple[int, str]:
    """Wait for the flow; return its exit code and log."""
    code = flow.wait(timeout=HANG)
    return code, workspace.with_suffix(".log").read_text()


@pytest.mark.slow
def test_stopped_and_preempted_flow_is_resumed_to_the_end(
    conf: Path, tmp_path: Path, empty_store: Path
) -> None:
    """Stop by an interval, then by SIGUSR1 to the flow, whose retry resumes to the end."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    shutil.copy(empty_store, workspace / "mlflow.db")
    code, log = wait_for_end(start(conf, workspace, "train.exit_interval=10"), workspace)
    assert code == 75, log[-3000:]
    assert (
        f"training stopped at iteration 10 of {ITERATIONS} since train.exit_interval is 10" in log
    )
    assert "Traceback" not in log
    assert "error: " not in log
    assert exits(workspace) == [("exit_interval", 10)]

    flow = start(conf, workspace)
    try:
        wait_for(
            "some iterations",
            lambda: last_iteration(workspace) > 20 or flow.poll() is not None,
            HANG,
        )
        os.kill(flow.pid, signal.SIGUSR1)
        code, log = wait_for_end(flow, workspace)
    finally:
        flow.kill()
    assert code == 0, log[-3000:]
    reason, stopped_at = exits(workspace)[1]
    assert reason == "signal"
    assert 20 < stopped_at < ITERATIONS
    assert exits(workspace)[2:] == [("finished", ITERATIONS)]
    steps = [event["iteration"] for event in events_of(workspace) if event["kind"] == "step"]
    assert steps == list(range(1, ITERATIONS + 1))
    starts = [event["resumed_from"] for event in events_of(workspace) if event["kind"] == "start"]
    assert starts == [None, 10, stopped_at]
    assert "test PPL" in log


@pytest.mark.slow
def test_stopped_flow_run_has_a_separate_state(bench: Bench, tmp_path: Path) -> None:
    from flows.pretrain import pretrain

    overrides: dict[str, Any] = {"train.exit_interval": 1, "seed": 75}
    state = pretrain(str(bench.conf), overrides, return_state=True)
    assert (state.name, state.type.value) == ("Stopped", "CANCELLED")
    assert "training stopped at iteration 1 of 3" in str(state.message)
    assert "python -m flows.pretrain --conf" in str(state.message)
    resumed = bench.pretrain(seed=75)
    assert resumed.error is None
    assert "train" in resumed.stages("ran")


@pytest.mark.slow
def test_flow_is_stopped_while_it_waits_before_a_retry(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.pretrain import pretrain

    def lose(*arguments: object, **options: object) -> None:
        raise RankLostError("rank 0 was ended by SIGKILL")

    def waiting() -> list[str]:
        running = [run["path"] for run in runs(Workspace.of()) if run["state"] == "running"]
        return [path for path in running if Path(path, FAILURES_FILE).exists()]

    def stop_once_it_waits() -> None:
        wait_for("a failed attempt", waiting, HANG)
        time.sleep(1.5)  # the first check for the stop file is over
        stop("flow-test")

    monkeypatch.setattr(stages, "supervise", lose)
    stopper = threading.Thread(target=stop_once_it_waits)
    stopper.start()
    overrides = {"seed": 77, "launch.retries": 1, "launch.retry_delay": HANG}
    state = pretrain(str(bench.conf), overrides, return_state=True)
    stopper.join()
    assert (state.name, state.type.value) == ("Stopped", "CANCELLED")
    assert "training stopped before retry 1 since" in str(state.message)
    assert "the same command starts from the beginning" in str(state.message)
    assert not list(bench.workspace.glob("runs/*/stop"))
