"""Overhead of the flow: a tiny `pretrain` from nothing, and again with every stage cached.

    python -m benchmarks.orchestration [--cached 4]

Each run is a separate process, started like `make pretrain`, in a new workspace. Work is the sum of
the durations in the stages' manifests; the rest is imports, Prefect's server, tasks, supervision
and MLflow's tables. The same training is then started without the flow, as a launcher starts a
rank, to see how long a process takes to its first step. Python keeps compiled modules, as it does
by default.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks._verdict import Check, table, verdict

ROOT = Path(__file__).parents[1]
OVERHEAD_GOAL, CACHED_GOAL, FIRST_STEP_GOAL = 45.0, 5.0, 1.8
"""Most seconds in addition to the work of the first run, of a run in which everything is cached,
and from the start of a rank's process to the end of its first step."""
TIMEOUT = 240.0
_ROW = re.compile(r"^[│|]\s*(\w[\w ]*?)\s*[│|]\s*(ran|cached)\s*[│|]\s*([\d.]+)\s*[│|]")
"""Row of the flow's final table: stage, outcome, seconds."""


def configuration(corpus: Path) -> dict[str, Any]:
    """Return the configuration of a few steps of a two-layer model."""
    return {
        "name": "orchestration",
        "data": {
            "source": {"kind": "source_tree", "path": str(corpus)},
            "tokenizer": {"kind": "train-bpe", "vocab_size": 320},
            "split": "80,10,10",
            "seq_length": 32,
        },
        "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2},
        "optim": {"lr": 1e-3},
        "train": {"micro_batch_size": 2, "global_batch_size": 2, "train_iters": 3, "eval_iters": 2},
        "checkpoint": {"save_interval": 2},
        "evaluate": {"max_samples": 8},
        "export": {"parity_samples": 2, "sample_tokens": 8},
        "launch": {"nproc_per_node": 1, "retries": 0},
    }


def write_corpus(directory: Path) -> None:
    """Write Python source, different in every file."""
    directory.mkdir()
    for number in range(60):
        lines = [
            f"def function_{number}_{line}(value):\n    return value * {line} + {number}\n"
            for line in range(30)
        ]
        (directory / f"module_{number:03d}.py").write_text("\n".join(lines), encoding="utf-8")


def environment() -> dict[str, str]:
    """Return the variables of a process: without servers, and with compiled modules."""
    left_out = ("PREFECT_", "MLFLOW_", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if not name.startswith(left_out)}


@contextmanager
def started(module: str, conf: Path, workspace: Path) -> "Iterator[subprocess.Popen[str]]":
    """Start a flow as `python -m MODULE --conf CONF`, with its output in a pipe.

    What still runs at the end is killed.
    """
    variables = environment() | {"MEGACORE_WORKSPACE": str(workspace), "COLUMNS": "200"}
    command = [sys.executable, "-m", module, "--conf", str(conf)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    flow = subprocess.Popen(command, cwd=ROOT, env=variables, start_new_session=True, **pipes)
    try:
        yield flow
    finally:
        if flow.poll() is None:
            os.killpg(flow.pid, signal.SIGKILL)
            flow.wait()


def run(conf: Path, workspace: Path) -> tuple[float, dict[str, tuple[str, float]]]:
    """Run the flow once; return its seconds, and outcome and seconds of each stage's task."""
    start = time.monotonic()
    with started("flows.pretrain", conf, workspace) as flow:
        output, _ = flow.communicate(timeout=TIMEOUT)
    seconds = time.monotonic() - start
    rows = (_ROW.match(line) for line in output.splitlines())
    stages = {row[1]: (row[2], float(row[3])) for row in rows if row}
    if flow.returncode or not stages:
        raise SystemExit(f"the flow ended with {flow.returncode}:\n{output[-3000:]}")
    return seconds, stages


def work_seconds(workspace: Path) -> float:
    """Return the sum of the durations in the stages' manifests."""
    manifests = workspace.glob("*/*/manifest.json")
    return sum(
        float(json.loads(path.read_text(encoding="utf-8"))["duration"]) for path in manifests
    )


def first_step_seconds(workspace: Path, directory: Path) -> float:
    """Start the training of `workspace` without a flow; return the seconds to its first step.

    The run's directory is `directory`. The seconds begin before the process is started and end
    with the event of iteration 1.
    """
    [job_file] = (workspace / "runs").glob("*/run.json")
    job = json.loads(job_file.read_text(encoding="utf-8"))
    job |= {"run_directory": str(directory), "exit_directory": str(directory / "exit")}
    job["config"]["train"] |= {"train_iters": 1, "log_interval": 1}
    directory.mkdir()
    path = directory / "run.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    command = [sys.executable, "-m", "megacore.ranks.pretrain", "--config", str(path)]
    started = time.time()
    subprocess.run(
        command,
        cwd=ROOT,
        env=environment() | {"OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        timeout=TIMEOUT,
    )
    events = (directory / "events.jsonl").read_text(encoding="utf-8").splitlines()
    [step] = (event for event in map(json.loads, events) if event["kind"] == "step")
    return float(step["time"]) - started


def main() -> int:
    """Run the flow from nothing, then with everything cached, then the training without a flow."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cached", type=int, default=4, help="runs that find everything")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="orchestration-") as name:
        directory = Path(name)
        write_corpus(directory / "corpus")
        conf, workspace = directory / "conf.yaml", directory / "workspace"
        conf.write_text(yaml.safe_dump(configuration(directory / "corpus")), encoding="utf-8")
        first, stages = run(conf, workspace)
        work = work_seconds(workspace)
        cached_runs = [run(conf, workspace) for _ in range(options.cached)]
        first_step = statistics.median(
            first_step_seconds(workspace, directory / f"run-{number}")
            for number in range(options.cached)
        )
    rerun = [
        stage
        for _, outcomes in cached_runs
        for stage, (outcome, _) in outcomes.items()
        if outcome != "cached"
    ]
    if rerun or any(outcome != "ran" for outcome, _ in stages.values()):
        raise SystemExit(
            f"from nothing {stages}, and then {rerun} ran again: this compares something else"
        )
    cached = statistics.median(seconds for seconds, _ in cached_runs)
    within = [
        sum(seconds for _, seconds in outcomes.values())
        for outcomes in (stages, cached_runs[-1][1])
    ]
    header = [
        "run",
        "all (s)",
        "the stages' work (s)",
        "stages as tasks (s)",
        "overhead (s)",
    ]
    rows = [
        ["from nothing", f"{first:.1f}", f"{work:.1f}", f"{within[0]:.1f}", f"{first - work:.1f}"],
        ["all cached", f"{cached:.1f}", "0.0", f"{within[1]:.1f}", f"{cached:.1f}"],
        ["a rank to its first step", f"{first_step:.2f}", "", "", ""],
    ]
    sys.stdout.write(table(header, rows))
    checks = [
        Check(
            "overhead of a run from nothing",
            first - work,
            OVERHEAD_GOAL,
            at_most=True,
            unit="s",
        ),
        Check("a run with all cached", cached, CACHED_GOAL, at_most=True, unit="s"),
        Check("a rank to its first step", first_step, FIRST_STEP_GOAL, at_most=True, unit="s"),
    ]
    return verdict("orchestration", checks)


if __name__ == "__main__":
    sys.exit(main())
