"""Fake ranks of one host, without torch, and a head that starts them instead of torchrun.

python _host_ranks.py ranks BEHAVIOUR DIRECTORY EXIT FIRST COUNT
python _host_ranks.py head --plan FILE      (the plan's module is the behaviour, the directory of
                                            its job file is DIRECTORY)

Each rank writes its process id to DIRECTORY/rank_N.pid and its environment variables to
rank_N.json, and then follows BEHAVIOUR.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests._limits import HANG

LIFETIME = 2 * HANG
"""Seconds after which a rank exits if no process has ended it, longer than a test waits."""


def start_ranks(
    behaviour: str, directory: Path, exit_directory: Path, first: int, count: int
) -> int:
    command = [sys.executable, __file__, "rank", behaviour, str(directory), str(exit_directory)]
    children = [
        subprocess.Popen([*command, str(rank)], start_new_session=True)
        for rank in range(first, first + count)
    ]
    return max(128 - code if (code := child.wait()) < 0 else code for child in children)


def rank_main(behaviour: str, directory: Path, exit_directory: Path, rank: int) -> None:
    from megacore.observe.heartbeat import Heartbeat, beat_path
    from megacore.ranks.rank import write_stacks_on_signal

    if behaviour == "notified":
        signal.signal(signal.SIGUSR1, lambda number, frame: os._exit(0))
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "saves":
        signal.signal(
            signal.SIGTERM, lambda number, frame: (time.sleep(0.5), mark_saved(directory, rank))
        )
    (directory / f"rank_{rank}.json").write_text(json.dumps(dict(os.environ)))
    temporary = directory / f"rank_{rank}.tmp"
    temporary.write_text(str(os.getpid()))
    temporary.rename(directory / f"rank_{rank}.pid")
    sys.stdout.write(f"rank {rank} is here\n")
    sys.stdout.flush()
    if behaviour.startswith("watched"):
        write_stacks_on_signal(exit_directory, rank)
        # Rank 0 may have started later, and must wait before its peer stalls.
        if rank == 0:
            wait_for(directory / "rank_1.pid")
        elif rank == 1:
            wait_for(beat_path(exit_directory, 0))
        heartbeat = Heartbeat(beat_path(exit_directory, rank))
        heartbeat.beat("forward-compute", 7)
        if rank == 0:
            heartbeat.beat("data-parallel wait")
        elif behaviour == "watched-stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
    if behaviour == "fails" and rank == 1:
        wait_for(directory / "rank_0.pid")
        sys.exit(9)
    if behaviour == "reasons" and rank == 1:
        from megacore.errors import DataFormatError
        from megacore.launch.exit_reason import reported_exit

        with reported_exit(exit_directory, rank):
            raise DataFormatError("tokens.bin is damaged")
    if behaviour == "floods":
        for number in range(20000):
            sys.stdout.write(f"line {number} of rank {rank}\n")
    if behaviour not in {"quick", "floods", "reasons"}:
        time.sleep(LIFETIME)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def mark_saved(directory: Path, rank: int) -> None:
    (directory / f"rank_{rank}.saved").touch()
    os._exit(0)


def head(arguments: list[str]) -> int:
    from megacore.cluster.hosts import fanout, plan

    class FakeRanksPlan(plan.Plan):
        def command(self, number: int, master: str, port: int | str) -> list[str]:
            first = sum([*self.hosts.values()][:number])
            count = [*self.hosts.values()][number]
            paths_and_ranks = [
                str(Path(self.job_file).parent),
                self.exit_directory,
                str(first),
                str(count),
            ]
            return [sys.executable, __file__, "ranks", self.module, *paths_and_ranks]

    fanout.Plan = FakeRanksPlan  # type: ignore[misc]
    fanout.FAIL_LIMIT = 2.0
    return fanout.main(arguments)


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "head":
        sys.exit(head(rest))
    behaviour, *places = rest
    if kind == "ranks":
        sys.exit(
            start_ranks(behaviour, Path(places[0]), Path(places[1]), int(places[2]), int(places[3]))
        )
    rank_main(behaviour, Path(places[0]), Path(places[1]), int(places[2]))
