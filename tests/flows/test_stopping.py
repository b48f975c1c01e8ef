"""A training that is asked to stop.

The flow says so, and the same command goes on as if nothing had been.
"""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from megacore.config.load import parse_config
from tests.flows.conftest import Bench, tiny_config
from tests.flows.test_supervision import events_of, start, wait_for

ITERATIONS = 1000


@pytest.fixture
def conf(tmp_path: Path, bench: Bench) -> Path:
    """One rank; no checkpoint is due before the last iteration."""
    config = tiny_config(bench.corpus)
    config["name"] = "stopped"
    config["train"] |= {"train_iters": ITERATIONS, "eval_interval": 1000, "log_interval": 1}
    config["checkpoint"] = {"save_interval": 1000, "keep_last": 9}
    config["launch"] |= {"retries": 1, "retry_delay": 0}
    config["evaluate"] = {"max_samples": 2}
    parse_config(config, origin="test")
    path = tmp_path / "stopped.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def ended(workspace: Path) -> list[tuple[str, int]]:
    return [
        (event["reason"], event["iteration"])
        for event in events_of(workspace)
        if event["kind"] == "exit"
    ]


def reached(workspace: Path) -> int:
    return max(
        (event["iteration"] for event in events_of(workspace) if event["kind"] == "step"), default=0
    )


def finished(flow: "subprocess.Popen[bytes]", workspace: Path) -> tuple[int, str]:
    """Exit code and log."""
    code = flow.wait(timeout=180)
    return code, workspace.with_suffix(".log").read_text()


def test_stop_preempt_and_go_on_to_the_end(conf: Path, tmp_path: Path) -> None:
    """Stopped by an interval.

    Then SIGUSR1 to the flow, whose retry goes on by itself to the end.
    """
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    code, log = finished(start(conf, workspace, "train.exit_interval=10"), workspace)
    assert code == 75, log[-3000:]
    assert (
        f"training stopped at iteration 10 of {ITERATIONS} since train.exit_interval is 10" in log
    )
    assert "Traceback" not in log
    assert "error: " not in log
    assert ended(workspace) == [("exit_interval", 10)]

    flow = start(conf, workspace)
    try:
        wait_for("some iterations", lambda: reached(workspace) > 20 or flow.poll() is not None, 120)
        os.kill(flow.pid, signal.SIGUSR1)
        code, log = finished(flow, workspace)
    finally:
        flow.kill()
    assert code == 0, log[-3000:]
    reason, stopped_at = ended(workspace)[1]
    assert reason == "signal"
    assert 20 < stopped_at < ITERATIONS
    assert ended(workspace)[2:] == [("finished", ITERATIONS)]
    steps = [event["iteration"] for event in events_of(workspace) if event["kind"] == "step"]
    assert steps == list(range(1, ITERATIONS + 1))
    starts = [event["resumed_from"] for event in events_of(workspace) if event["kind"] == "start"]
    assert starts == [None, 10, stopped_at]
    assert "test PPL" in log


def test_a_flow_run_that_is_stopped_ends_in_a_state_of_its_own(
    bench: Bench, tmp_path: Path
) -> None:
    from flows.pretrain import pretrain

    overrides: dict[str, Any] = {"train.exit_interval": 1, "seed": 75}
    state = pretrain(str(bench.conf), overrides, return_state=True)
    assert (state.name, state.type.value) == ("Stopped", "CANCELLED")
    assert "training stopped at iteration 1 of 3" in str(state.message)
    assert "python -m flows.pretrain --conf" in str(state.message)
    del overrides["train.exit_interval"]
    assert pretrain(str(bench.conf), overrides, return_state=True).is_completed()
