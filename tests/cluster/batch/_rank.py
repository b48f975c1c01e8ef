"""A fake rank: `python -m tests.cluster.batch._rank --config job.json`.

MEGACORE_RANK_DOES sets its behaviour: "wait" until a signal asks it to stop, "save" like "wait" and
then until the file `saved` exists, "fail" with a reason, "nothing" despite all signals, or "end"
immediately. It writes its process id to a file.
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
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: received.append(number))
    note = exit_directory.parent / f"pid_{rank}"
    note.with_suffix(".tmp").write_text(str(os.getpid()))
    note.with_suffix(".tmp").rename(note)
    sys.stdout.write(f"rank {rank} of {job.ranks}, {job.threads_per_rank} threads\n")
    sys.stdout.flush()
    behaviour = os.environ["MEGACORE_RANK_DOES"]
    if behaviour == "fail":
        write_reason(exit_directory, rank, LossError("the loss is nan"))
        return 7
    while behaviour in ("wait", "save") and not received:
        time.sleep(0.05)
    while behaviour == "save" and not (exit_directory.parent / "saved").exists():
        time.sleep(0.05)
    while behaviour == "nothing":
        time.sleep(0.05)
    if received:
        write_reason(
            exit_directory, rank, PreemptedError(f"stopped by {signal.Signals(received[0]).name}")
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
