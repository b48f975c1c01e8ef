"""A small stand-in for torchrun: `python _fake_ranks.py DIRECTORY BEHAVIOUR RANKS`.

It starts each rank in a separate session. A rank writes its process id to DIRECTORY/rank_N.pid and
follows BEHAVIOUR.

With a behaviour that ends in "-watched" the ranks write heartbeats: rank 1 is stopped or killed in
a forward pass, and rank 0 waits for it in a collective. The launcher waits for rank 0 first, so it
does not notice the end of rank 1.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megacore.errors import ConfigError
from megacore.launch.exit_reason import die_with_parent, reported_exit
from megacore.observe.heartbeat import Heartbeat, beat_path
from megacore.ranks.rank import write_stacks_on_signal

LIFETIME = 30.0
"""Seconds after which a rank exits if no process has ended it."""


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
        os._exit(0)  # the grandchild continues without a parent
    temporary = directory / f"rank_{rank}.tmp"
    temporary.write_text(str(os.getpid()))
    temporary.rename(directory / f"rank_{rank}.pid")
    sys.stdout.write(f"rank {rank} is here\n")
    sys.stdout.flush()
    if behaviour == "notified" and rank == 1:
        time.sleep(0.5)  # rank 1 installs its handler later than rank 0
    if behaviour == "notified":
        signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(0))
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


def keep_heartbeat(directory: Path, behaviour: str, rank: int) -> None:
    write_stacks_on_signal(directory / "exit", rank)
    heartbeat = Heartbeat(beat_path(directory / "exit", rank))
    heartbeat.beat("forward-compute", 7)
    if rank == 0:
        wait_in_a_collective(heartbeat)
    time.sleep(0.3)
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
