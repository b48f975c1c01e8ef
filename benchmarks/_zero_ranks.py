"""Ranks of one piece of work: their start, their commands and their end."""

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from benchmarks._zero_rank import OUT_OF_MEMORY
from benchmarks._zero_variants import Work
from megacore.cluster.start import rank_environment

_GRACE = 10.0
"""Seconds for ranks that lost a peer to notice it; the exit code of the peer shows the cause."""


class OutOfMemoryError(Exception):
    """A rank ran out of memory."""


class Ranks:
    """Processes of one piece of work."""

    def __init__(self, work: Work) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.work = work
        self.processes = []
        for rank in range(work.ranks):
            environment = {
                **os.environ,
                **rank_environment(work.threads),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(work.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks._zero_rank", json.dumps(asdict(work))],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def ask(self, command: str) -> list[dict[str, Any]]:
        """Send a command; return the answer of each rank.

        Raises OutOfMemoryError; any other failure ends the benchmark.
        """
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.write(f"{command}\n")
                process.stdin.flush()
            except BrokenPipeError:
                break
        answers = self.processes[0].stdout
        assert answers is not None
        while not select.select([answers], [], [], 0.2)[0]:
            if any(process.poll() is not None for process in self.processes):
                self._failed()
        line = answers.readline()
        if not line:
            self._failed()
        results: list[dict[str, Any]] = json.loads(line)
        return results

    def end(self) -> None:
        """Kill the remaining processes."""
        for process in self.processes:
            process.kill()
            process.wait()

    def _failed(self) -> None:
        deadline = time.monotonic() + _GRACE
        codes: list[int | None] = []
        while time.monotonic() < deadline:
            codes = [process.poll() for process in self.processes]
            # -9 is the kernel's out-of-memory killer, which no rank can report
            if OUT_OF_MEMORY in codes or -9 in codes:
                raise OutOfMemoryError
            if None not in codes:
                break
            time.sleep(0.1)
        raise SystemExit(f"{self.work}: ranks ended with {codes}, their errors are above")


@contextmanager
def started(work: Work) -> Iterator[Ranks]:
    """Yield started ranks, and end them after the body."""
    ranks = Ranks(work)
    try:
        yield ranks
    finally:
        ranks.end()
