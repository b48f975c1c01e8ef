"""Servers that are killed and restarted while a training runs."""

import os
import random
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacore.artifact import Workspace
from megacore.jobs.run import TrainJob
from megacore.observe.events import EventReader
from megacore.observe.recorder import Recorder
from megacore.ranks.pretrain import pretrain
from tests._limits import HANG
from tests.faults import _flow
from tests.faults._cases import Outcome
from tests.faults._processes import Child, Nursery
from tests.faults._servers import address, mlflow_server, prefect_server, running
from tests.train import _runs

ITERATIONS = 40
PACE = 0.15
"""Delay of each iteration in seconds, so that a server can be restarted before the end."""


def mlflow_outage(directory: Path, nursery: Nursery, seed: int) -> Outcome:
    """Kill MLflow's server during a forwarded training and restart it before or after the end."""
    draw = random.Random(f"mlflow-{seed}")
    down, up = draw.randrange(3, ITERATIONS // 2), draw.randrange(ITERATIONS // 2 + 5, ITERATIONS)
    outcome = Outcome(
        "mlflow", seed, float(down), f"MLflow's server at iteration {down}, back at {up}", hit=True
    )
    place = directory / f"mlflow-{seed}"
    run = place / "run"
    run.mkdir(parents=True)
    started = time.monotonic()
    try:
        with running(mlflow_server(place, place)) as server:
            training = nursery.start(slow_training, place, run)
            forwarding = nursery.start(
                forward, place, run, environment={"MLFLOW_TRACKING_URI": address(server)}
            )
            _wait(
                f"iteration {down} in MLflow", lambda: _sent(place) >= down, (training, forwarding)
            )
            server.kill()
            _wait(f"iteration {up}", lambda: _reached(run) >= up, (training, forwarding))
            server.start()
            training.value(HANG)
            if forwarding.value(HANG):
                outcome.faults.append("a poll asked MLflow itself: training would wait for it")
        outcome.faults += _flow.tracking_problems(place / "mlflow.db", run)
    except AssertionError as error:
        outcome.faults.append(f"{type(error).__name__}: {error}")
    outcome.seconds = round(time.monotonic() - started, 2)
    if not outcome.faults:
        shutil.rmtree(place)
    return outcome


def slow_training(place: Path, run: Path) -> None:
    """Train one rank with delayed iterations."""
    config = _runs.config(
        optim={"lr_decay_iters": ITERATIONS},
        train={"train_iters": ITERATIONS, "eval_interval": 10},
        checkpoint={"save_interval": 10, "keep_last": 2},
    )
    _runs.write_data(place / "data", config)
    job = _runs.job(config, place / "data", run)
    step = Recorder.step

    def slowed(self: Recorder, *values: Any) -> None:
        time.sleep(PACE)
        step(self, *values)

    Recorder.step = slowed  # type: ignore[method-assign]
    job.write(run / "run.json")
    pretrain(job)


def forward(place: Path, run: Path) -> bool:
    """Poll like the train task, then finish; return True if this thread asked MLflow."""
    from requests import Session

    from tasks._mlflow import RunFacts, Tracking
    from tasks._mlflow_events import Forwarder

    while not (run / "run.json").exists():
        time.sleep(0.05)
    config = TrainJob.read(run / "run.json").config
    assert os.environ["MLFLOW_TRACKING_URI"].startswith("http://")
    forwarder = Forwarder(
        Tracking(Workspace(place), "outage"), run, config, RunFacts("0" * 16), interval=0.3
    )
    send, asking = Session.send, set[str]()

    def send_and_note(*arguments: Any, **options: Any) -> Any:
        asking.add(threading.current_thread().name)
        return send(*arguments, **options)

    Session.send = send_and_note  # type: ignore[method-assign]
    while not any(event["kind"] == "exit" for event, _ in EventReader(run / "events.jsonl")):
        forwarder.poll()
        time.sleep(0.1)
    assert asking
    asked = threading.main_thread().name in asking
    forwarder.finish(timeout=HANG)
    return asked


def prefect_outage(directory: Path, nursery: Nursery, seed: int) -> Outcome:
    """Kill Prefect's server during a flow's training and restart it seconds later.

    The training itself must continue. If the flow cannot report its state, it may fail: then the
    same command finishes.
    """
    draw = random.Random(f"prefect-{seed}")
    place = directory / f"prefect-{seed}"
    workspace = place / "workspace"
    workspace.mkdir(parents=True)
    conf = _flow.write_conf(place)
    outcome = Outcome("prefect", seed, draw.uniform(0, 3), "Prefect's server in train", hit=True)
    started = time.monotonic()
    try:
        with running(prefect_server(place / "server", place)) as server:
            flow = _flow.start_flow(nursery, conf, workspace, address(server))
            _wait("the training", lambda: any(workspace.glob("runs/*/run.json")), (flow,))
            time.sleep(outcome.moment)
            server.kill()
            _wait(
                "the end of the training",
                lambda: any(map(_exits, workspace.glob("runs/*/events.jsonl"))),
                (flow,),
            )
            server.start()
            server.wait()
            answer = flow.finish(HANG)
            outcome.error = answer.get("error", "")
            if outcome.error:
                flow = _flow.start_flow(nursery, conf, workspace, address(server))
            outcome.faults += _flow.finish(flow, nursery, workspace)
    except AssertionError as error:
        outcome.faults.append(f"{type(error).__name__}: {error}")
    outcome.seconds = round(time.monotonic() - started, 2)
    if not outcome.faults:
        shutil.rmtree(place)
    return outcome


def _exits(events: Path) -> bool:
    return any(event["kind"] == "exit" for event, _ in EventReader(events))


def _reached(run: Path) -> int:
    steps = (
        event["iteration"]
        for event, _ in EventReader(run / "events.jsonl")
        if event["kind"] == "step"
    )
    return max(steps, default=0)


def _sent(place: Path) -> int:
    """Return the last iteration in MLflow's tables."""
    try:
        connection = sqlite3.connect(f"file:{place / 'mlflow.db'}?mode=ro", uri=True)
        iteration = connection.execute(
            "select max(step) from metrics where key = 'train/lm_loss'"
        ).fetchone()[0]
        connection.close()
    except sqlite3.Error:
        return 0
    return int(iteration or 0)


def _wait(event: str, condition: Callable[[], bool], processes: tuple[Child, ...]) -> None:
    deadline = time.monotonic() + HANG
    while not condition():
        for process in processes:
            code = process.wait(0)
            assert code in (None, 0), (
                f"a process ended with {code} before {event}: {process.log_end()}"
            )
        assert time.monotonic() < deadline, f"{event} did not come within {HANG:.0f} s"
        time.sleep(0.05)
