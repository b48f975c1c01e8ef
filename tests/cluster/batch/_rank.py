"""A rank that does nothing but what it is told: `python -m tests.cluster.batch._rank --config
job.json`.

What MEGACORE_RANK_DOES says: "wait" until it is asked to stop, "fail" with a reason, "nothing"
whatever it is asked, or "end". It notes its process id.
"""

import os
import signal
import sys
import time
from pathlib import Path

from megacore.errors import LossError, PreemptedError
from megacore.jobs.run import RankJob
from megacore.launch.exit_reason import write_reason


def main() -> int:
    job = RankJob.read(Path(sys.argv[sys.argv.index("--config") + 1]))
    rank, exit_directory = int(os.environ.get("RANK", "0")), Path(job.exit_directory)
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: asked.append(number))
    note = exit_directory.parent / f"pid_{rank}"
    note.with_suffix(".tmp").write_text(str(os.getpid()))
    note.with_suffix(".tmp").rename(note)
    sys.stdout.write(f"rank {rank} of {job.ranks}, {job.threads_per_rank} threads\n")
    sys.stdout.flush()
    does = os.environ["MEGACORE_RANK_DOES"]
    if does == "fail":
        write_reason(exit_directory, rank, LossError("the loss is nan"))
        return 7
    while does == "wait" and not asked:
        time.sleep(0.05)
    while does == "nothing":
        time.sleep(0.05)
    if asked:
        write_reason(
            exit_directory, rank, PreemptedError(f"stopped by {signal.Signals(asked[0]).name}")
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
