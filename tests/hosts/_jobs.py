"""A small training on hosts with separate workspaces, whose stages run on host a."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megacore.artifact.build import StageKey, seal
from megacore.config.run import RunConfig
from megacore.jobs.run import TrainJob
from tests._limits import HANG
from tests.hosts._rig import Rig
from tests.train import _runs

PREPARE = """
import sys
import time
from collections.abc import Callable
from pathlib import Path
from megacore.errors import MegacoreError
from megacore.jobs.run import TrainJob
from megacore.cluster.placement.prepare import prepare_hosts

job = TrainJob.read(Path(sys.argv[1]))
try:
    prepare_hosts(job, job.config.launch)
except MegacoreError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
"""Program that prepares the hosts like a stage; its last line is the error."""


def config(
    rig: Rig, engine: str = "native", *, launch: dict[str, Any] | None = None, **sections: Any
) -> RunConfig:
    """Return a run with one rank on each of two hosts with separate workspaces."""
    defaults = {
        "hostfile": str(rig.hostfile()),
        "ssh_config": str(rig.ssh_config),
        "data_placement": "node_local",
        "nproc_per_node": "auto",
    }
    return _runs.config(engine, launch=defaults | (launch or {}), **sections)


def write_data(disk: Path) -> None:
    """Write token files, index maps and a tokenizer as artifacts below a host's workspace."""
    _runs.write_data(disk / "data", _runs.config())
    (disk / "index").mkdir()
    (disk / "data" / "index").rename(disk / "index" / "maps")
    (disk / "tokenizer").mkdir()
    (disk / "tokenizer" / "tokenizer.json").write_text("{}")
    for directory in (disk / "data", disk / "index" / "maps", disk / "tokenizer"):
        seal(directory, StageKey("index", 1, {"of": directory.name}, {}), {}, 0.0)


def job(rig: Rig, run: RunConfig, name: str, root: Path | None = None, **changes: Any) -> TrainJob:
    """Return a training whose files are below the hosts' workspaces, or below `root`."""
    place = root or rig.workspace
    run_directory = Path(changes.pop("run_directory", place / "runs" / name))
    directories = {
        "index_directory": str(place / "index" / "maps"),
        "tokenizer_directory": str(place / "tokenizer"),
        "token_prefixes": [str(place / "data" / "tokens_text_document")],
    }
    return _runs.job(run, place, run_directory, **{"ranks": 2, **directories, **changes})


def write_job(rig: Rig, train_job: TrainJob) -> Path:
    """Write the job file to its run directory on host a; return its path there."""
    path = Path(train_job.run_directory) / "run.json"
    outside = as_seen_outside(rig, path)
    outside.parent.mkdir(parents=True, exist_ok=True)
    train_job.write(outside)
    return path


def as_seen_outside(rig: Rig, path: Path, host: str = "a") -> Path:
    """Return the path, for this process, of a path of a host."""
    return (
        rig.disk(host) / path.relative_to(rig.workspace)
        if path.is_relative_to(rig.workspace)
        else path
    )


def prepare(rig: Rig, train_job: TrainJob, host: str = "a") -> str:
    """Prepare the hosts for a job from one of them; return the error, or ""."""
    path = write_job(rig, train_job)
    result = rig.run(host, [sys.executable, "-c", PREPARE, str(path)], timeout=HANG)
    assert result.returncode in (0, 1), result
    return result.stderr.splitlines()[-1] if result.returncode else ""


def digests(directory: Path) -> dict[str, Any]:
    """Return the content of all files below a directory, without the marks of copies."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != "copied")
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in sorted(files)}


def events(run_directory: Path) -> list[dict[str, Any]]:
    """Return the events a run reported so far."""
    path = run_directory / "events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for(condition: Callable[[], bool], seconds: float, event: str) -> float:
    """Wait for a condition and return the seconds; fail after `seconds`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"{event}: not within {seconds} s"
        time.sleep(0.05)
    return time.monotonic() - started


class Attempt:
    """An attempt of a run on host a."""

    def __init__(self, rig: Rig, job: TrainJob, logs: Path) -> None:
        self.rig, self.run = rig, as_seen_outside(rig, Path(job.run_directory))
        self._attempt = job.attempt
        self._outcome = logs / f"attempt-{job.attempt}.json"
        words = [
            sys.executable,
            "-m",
            "tests.hosts._train",
            str(write_job(rig, job)),
            str(self._outcome),
        ]
        self.process: subprocess.Popen[bytes] = rig.start(
            "a", words, logs / f"attempt-{job.attempt}.log"
        )

    def until_saved(self) -> int:
        """Wait until this attempt saved a checkpoint and both hosts train; return its iteration."""
        iterations: list[int] = []

        def saved() -> bool:
            assert self.process.poll() is None, f"it ended: {self._outcome.read_text()}"
            # This attempt may report a checkpoint of an earlier one, without its times.
            iterations[:] = [
                event["iteration"]
                for event in events(self.run)
                if event["kind"] == "checkpoint"
                and event["attempt"] == self._attempt
                and event["seconds"] is not None
            ]
            return bool(iterations)

        wait_for(saved, HANG, f"a checkpoint of attempt {self._attempt}")
        assert self.rig.ranks("a")
        assert self.rig.ranks("b")
        return max(iterations)

    def outcome(self, seconds: float) -> dict[str, Any]:
        """Wait at most `seconds` for the end of the run; return its error and time."""
        wait_for(self._outcome.exists, seconds, "the end of the run on host a")
        self.process.wait(timeout=HANG)
        outcome: dict[str, Any] = json.loads(self._outcome.read_text())
        return outcome
