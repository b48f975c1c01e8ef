"""The whole flow, killed in one stage after another of one workspace until it is done."""

import json
import random
import shutil
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megacore.artifact import open_artifact
from megacore.artifact.manifest import MANIFEST_NAME
from megacore.artifact.workspace import FOLDERS
from megacore.checkpoint.format import checkpoint_directories, verify
from megacore.errors import MegacoreError
from megacore.jobs.run import TrainJob
from megacore.observe.events import EventReader
from megacore.ranks.pretrain import pretrain
from tests._limits import HANG
from tests.faults._cases import GRACE, Outcome
from tests.faults._processes import Child, Nursery
from tests.faults._training import tensor_digests
from tests.flows.conftest import tiny_config, write_corpus

STOP_GRACE = 2.0
STAGES: dict[str, tuple[str, float]] = {
    "data": ("corpora/*", 1.5),
    "train": ("runs/*/run.json", 5.0),
    "evaluate": ("runs/*/manifest.json", 4.0),
    "convert": ("evaluations/[!.]*/manifest.json", 6.0),
    "publish": ("exports/[!.]*/manifest.json", 3.0),
}
"""Path that shows the start of each stage, and its approximate seconds; in order."""


def write_conf(directory: Path, **train: Any) -> Path:
    """Write a generated source tree and the configuration of a training of 12 iterations."""
    write_corpus(directory / "corpus", files=30)
    config = tiny_config(directory / "corpus")
    config["train"] |= {"train_iters": 12, "eval_interval": 6} | train
    config["optim"] = {"lr": 1e-3, "lr_decay_iters": 12}
    config["checkpoint"] = {"save_interval": 3, "keep_last": 2}
    config["launch"] |= {"stop_grace": STOP_GRACE}
    path = directory / "flow-test.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def start_flow(
    nursery: Nursery, conf: Path, workspace: Path, api: str | None, **environment: str
) -> Child:
    """Start `python -m flows.pretrain`; without `api` the flow starts its own server."""
    values = {
        "MEGACORE_WORKSPACE": str(workspace),
        "MLFLOW_TRACKING_URI": f"sqlite:///{workspace / 'mlflow.db'}",
        "PREFECT_HOME": str(workspace / "prefect"),
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(workspace / "prefect" / "results"),
        **({} if api is None else {"PREFECT_API_URL": f"{api}/api"}),
        **environment,
    }
    return nursery.program([sys.executable, "-m", "flows.pretrain", "--conf", str(conf)], values)


def run_chain(
    directory: Path,
    nursery: Nursery,
    api: str | None,
    seed: int,
    stages: Sequence[str],
    store: Path | None = None,
) -> list[Outcome]:
    """Kill the flow once in each of `stages`, then run it to its end and compare.

    Return one outcome for each kill. `store` is a migrated, empty mlflow.db, which saves a few
    seconds.
    """
    place = directory / f"flow-{seed}"
    workspace = place / "workspace"
    workspace.mkdir(parents=True)
    if store is not None:
        shutil.copy(store, workspace / "mlflow.db")
    conf = write_conf(place)
    draw = random.Random(f"flow-{seed}")
    outcomes = []
    for stage in stages:
        outcome = _kill_in(stage, draw, seed, start_flow(nursery, conf, workspace, api), workspace)
        outcome.faults += visible(workspace)
        outcomes.append(outcome)
    last = outcomes[-1]
    try:
        last.faults += finish(start_flow(nursery, conf, workspace, api), nursery, workspace)
    except AssertionError as error:
        last.faults.append(f"{type(error).__name__}: {error}")
    if not any(outcome.faults for outcome in outcomes):
        shutil.rmtree(place)
    return outcomes


def _kill_in(stage: str, draw: random.Random, seed: int, flow: Child, workspace: Path) -> Outcome:
    pattern, seconds = STAGES[stage]
    outcome = Outcome("flow", seed, draw.uniform(0, seconds), f"flow in {stage}")
    started = time.monotonic()
    while flow.wait(0.05) is None and not any(workspace.glob(pattern)):
        if time.monotonic() - started > HANG:
            outcome.faults.append(f"{stage} did not begin within {HANG:.0f} s: {flow.log_end()}")
            break
    outcome.hit = flow.wait(outcome.moment) is None
    flow.kill_process()
    flow.wait(HANG)
    if not outcome.hit and flow.wait(0) != 0:
        outcome.faults.append(f"the flow failed by itself: {flow.log_end()}")
    outcome.faults += flow.none_left(STOP_GRACE + GRACE)
    outcome.seconds = round(time.monotonic() - started, 2)
    return outcome


def visible(workspace: Path) -> list[str]:
    """Return the problems of artifacts and checkpoints that look complete and are not."""
    problems = []
    for folder in sorted({workspace / name for name in FOLDERS.values()}):
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            if path.name.startswith(".") or ".tmp-" in path.name or not path.is_dir():
                continue
            try:
                if folder.name != FOLDERS["train"] or (path / MANIFEST_NAME).exists():
                    open_artifact(path, "full")
                for checkpoint in checkpoint_directories(path / "checkpoints"):
                    verify(checkpoint, "full")
            except MegacoreError as error:
                problems.append(str(error))
    return problems


def finish(flow: Child, nursery: Nursery, workspace: Path) -> list[str]:
    """Wait for the flow's end; return leftovers and differences."""
    flow.value(HANG)
    faults = flow.none_left(STOP_GRACE + GRACE) + visible(workspace)
    faults += [f"{path} is left over" for path in workspace.glob("*/*.tmp-*")]
    (run,) = (path.parent for path in workspace.glob("runs/*/run.json"))
    faults += [f"{path} is left over" for path in run.rglob("*.tmp-*")]
    faults += tracking_problems(workspace / "mlflow.db", run)
    if not nursery.call(same_as_undisturbed, run, workspace.parent / "undisturbed"):
        faults.append("the weights differ from those of an undisturbed training")
    return faults


def same_as_undisturbed(run: Path, place: Path) -> bool:
    """Train again in another directory without a break.

    Return True if all final tensors are the same.
    """
    job = TrainJob.read(run / "run.json")
    paths = {"run_directory": str(place), "exit_directory": str(place / "exit"), "attempt": 1}
    pretrain(job.model_copy(update=paths))
    name = f"iter_{job.config.train.train_iters:07d}"
    return tensor_digests(place / "checkpoints" / name) == tensor_digests(
        run / "checkpoints" / name
    )


def tracking_problems(database: Path, run: Path) -> list[str]:
    """Return the problems of MLflow's tables.

    There must be one run, and in each curve each step of the events exactly once.
    """
    from tasks._checkpoint_models import POSITION_PREFIXES
    from tasks._mlflow_events import CURVES, points_of

    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:
        (run_ids,) = (
            connection.execute(
                "select run_uuid from runs where lifecycle_stage = 'active'"
            ).fetchall(),
        )
        rows = connection.execute("select key, step from metrics").fetchall()
    finally:
        connection.close()
    problems = [] if len(run_ids) == 1 else [f"MLflow has {len(run_ids)} runs of one training"]
    curves = ("train/", "validation/", "vitals/", "valid_")
    evaluated = POSITION_PREFIXES["test"]  # the stage evaluate measures them, not the training
    counts = Counter(
        (key, step)
        for key, step in rows
        if key.startswith(curves) and not key.startswith(evaluated)
    )
    problems += [
        f"MLflow has {key} of step {step} {count} times"
        for (key, step), count in counts.items()
        if count > 1
    ]
    expected_points = set()
    for event, _ in EventReader(run / "events.jsonl"):
        if event["kind"] in CURVES:
            expected_points |= {(point.key, point.step) for point in points_of(event)}
        if event["kind"] == "perplexity":  # by iteration they come with the checkpoint
            expected_points |= {(key, event["iteration"]) for key in ("valid_ppl", "valid_loss")}
    missing, surplus = expected_points - set(counts), set(counts) - expected_points
    problems += [f"MLflow lacks {len(missing)} points, {min(missing)} first"] if missing else []
    problems += (
        [f"MLflow has {len(surplus)} points that no event says, {min(surplus)} first"]
        if surplus
        else []
    )
    iterations = {step for key, step in counts if key == "train/lm_loss"}
    expected = set(
        range(1, json.loads((run / "run.json").read_text())["config"]["train"]["train_iters"] + 1)
    )
    return problems + (
        [] if iterations == expected else [f"train/lm_loss has the iterations {sorted(iterations)}"]
    )
