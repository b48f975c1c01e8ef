"""A small stand-in for torchrun: `python _fake_ranks.py DIRECTORY BEHAVIOUR RANKS`.

It starts each rank in a separate session. A rank writes its process id to DIRECTORY/rank_N.pid and
follows BEHAVIOUR.

With a behaviour that ends in "-watched" the ranks write heartbeats: rank 1 is stopped or killed in
a forward pass, and rank 0 waits for it in a collective. The launcher waits for rank 0 first, so it
does not notice the end of rank 1. Both wait for each other first, as their heartbeats are watched.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megacore.errors import ConfigError
from megacore.launch.exit_reason import die_with_parent, reported_exit
from megacore.observe.heartbeat import Heartbeat, beat_path, read_heartbeat
from megacore.ranks.rank import write_stacks_on_signal
from tests._limits import HANG

LIFETIME = 2 * HANG
"""Seconds after which a rank exits if no process has ended it, longer than a test waits."""


def start_ranks(directory: Path, behaviour: str, ranks: int) -> int:
    (directory / "launcher.pid").write_text(str(os.getpid()))
    if behaviour.startswith("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    command = [sys.executable, __file__, str(directory), behaviour]
    children = [
        subprocess.Popen([*command, "--rank", str(rank)], start_new_session=True)
        for rank in range(ranks)
    ]
    code = max(1 if child.wait() else 0 for child in children)
    if behaviour == "orphaned-waiting":
        time.sleep(LIFETIME)  # the launcher outlives its own children
    return code


def rank_main(directory: Path, behaviour: str, rank: int) -> None:
    if behaviour.startswith("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour.endswith("chained"):
        die_with_parent()
    if behaviour.startswith("orphaned") and os.fork():
        wait_for(directory / f"rank_{rank}.pid")
        os._exit(0)  # the grandchild continues without a parent
    temporary = directory / f"rank_{rank}.tmp"
    temporary.write_text(str(os.getpid()))
    temporary.rename(directory / f"rank_{rank}.pid")
    sys.stdout.write(f"rank {rank} is here\n")
    sys.stdout.flush()
    if behaviour == "notified" and rank == 1:
        wait_for(directory / "rank_0.notified")  # rank 1 installs its handler later than rank 0
    if behaviour == "notified":
        signal.signal(signal.SIGUSR1, lambda number, frame: end_notified(directory, rank))
        (directory / f"rank_{rank}.catches").touch()
    if behaviour.endswith("watched"):
        keep_heartbeat(directory, behaviour, rank)
    if behaviour == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "config-error" and rank == 0:
        with reported_exit(directory / "exit", rank):
            raise ConfigError("train.lr is 7: lower it")
    if behaviour not in {"quick", "killed", "config-error"}:
        time.sleep(LIFETIME)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def end_notified(directory: Path, rank: int) -> None:
    (directory / f"rank_{rank}.notified").touch()
    sys.exit(0)


def keep_heartbeat(directory: Path, behaviour: str, rank: int) -> None:
    beats = [beat_path(directory / "exit", each) for each in range(2)]
    write_stacks_on_signal(directory / "exit", rank)
    (directory / f"rank_{rank}.ready").touch()
    if rank == 0:
        wait_for(directory / "rank_1.ready")
        heartbeat = Heartbeat(beats[0])
        heartbeat.beat("forward-compute", 7)
        wait_in_a_collective(heartbeat)
    while (beat := read_heartbeat(beats[0])) is None or not beat.waits:
        time.sleep(0.01)
    Heartbeat(beats[1]).beat("forward-compute", 7)
    if "stopped" in behaviour:
        os.kill(os.getpid(), signal.SIGSTOP)
    if "killed" in behaviour:
        os.kill(os.getpid(), signal.SIGKILL)


def wait_in_a_collective(heartbeat: Heartbeat) -> None:
    heartbeat.beat("data-parallel wait")
    time.sleep(LIFETIME)


if __name__ == "__main__":
    if sys.argv[3] == "--rank":
        rank_main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[4]))
    else:
        sys.exit(start_ranks(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
