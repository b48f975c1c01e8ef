"""Helpers that start fake ranks and observe the processes of a job."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests._limits import HANG

FAKE_RANKS = str(Path(__file__).with_name("_fake_ranks.py"))
REPOSITORY = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """Return an environment in which a script in any directory can import megacore."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])}


def fake_ranks(directory: Path, behaviour: str, ranks: int = 2) -> list[str]:
    """Return the command that starts fake ranks."""
    return [sys.executable, FAKE_RANKS, str(directory), behaviour, str(ranks)]


def gloo_job(directory: Path, behaviour: str) -> Path:
    """Write the job of the ranks of `tests.launch._gloo_rank` and return its path."""
    values = {
        "behaviour": behaviour,
        "directory": str(directory),
        "exit_directory": str(directory / "exit"),
    }
    path = directory / "run.json"
    path.write_text(json.dumps(values))
    return path


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait for a condition and return the seconds until then; fail after `seconds`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"{what}: not within {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - started


def alive(pid: int) -> bool:
    """Return True if a process runs; a zombie does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def rank_pids(directory: Path, ranks: int = 2) -> list[int]:
    """Wait until all fake ranks have written their process ids, and return the ids."""
    files = [directory / f"rank_{rank}.pid" for rank in range(ranks)]
    wait_until(lambda: all(file.exists() for file in files), HANG, "ranks started")
    return [int(file.read_text()) for file in files]


def none_alive(pids: list[int], seconds: float) -> float:
    """Wait until all processes have ended and return the seconds until then."""
    return wait_until(
        lambda: not any(alive(pid) for pid in pids), seconds, f"processes {pids} ended"
    )
