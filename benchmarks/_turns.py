"""Processes that wait on standard input and take turns.

A host whose speed changes then affects all of them.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megacore.cluster.start import rank_environment

_MALLOC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables that make glibc keep freed blocks; a contestant without them must not inherit them."""


def environment(threads: int, *, tuned_malloc: bool = True) -> dict[str, str]:
    """Return the environment of a process with this number of threads.

    It is that of megacore's launcher, or without its malloc settings.
    """
    launched = rank_environment(threads)
    untuned = {name: value for name, value in launched.items() if name not in _MALLOC}
    inherited = {name: value for name, value in os.environ.items() if name not in _MALLOC}
    return inherited | (launched if tuned_malloc else untuned)


@dataclass
class Contestant:
    """Processes of one contestant, and their measurements."""

    name: str
    processes: "list[subprocess.Popen[str]]"
    seconds: list[float] = field(default_factory=list)
    """Seconds of one step on the slowest rank, by round."""
    last: list[dict[str, Any]] = field(default_factory=list)
    """Last answer of each rank."""

    @classmethod
    def start(
        cls, name: str, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]
    ) -> "Contestant":
        """Start a process `python -m ARGUMENTS` for each environment."""
        command = [sys.executable, "-m", *arguments]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return cls(
            name, [subprocess.Popen(command, env=dict(each), **pipes) for each in environments]
        )

    def ask(self, command: str) -> list[dict[str, Any]]:
        """Send a command to every process; return the first one's answer, a list by rank."""
        self.send(command)
        return self.answer()

    def send(self, command: str) -> None:
        """Send a command to every process, whose answer is read later."""
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.write(f"{command}\n")
                process.stdin.flush()
            except BrokenPipeError:
                break

    def answer(self) -> list[dict[str, Any]]:
        """Return the first process's answer to the command that was sent, a list by rank."""
        answers = self.processes[0].stdout
        assert answers is not None
        for line in answers:  # a library may print too
            if line.startswith("[{"):
                self.last = json.loads(line)
                return self.last
        raise SystemExit(f"contestant {self.name!r} ended: its error is above")

    def run(self, steps: int) -> float:
        """Make steps; return the seconds of one step on the slowest rank."""
        return max(float(rank["seconds"]) for rank in self.ask(f"run {steps}"))

    @property
    def median(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Quartiles of the seconds of a step."""
        if len(self.seconds) < 2:
            return self.median, self.median
        lower, _, upper = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return lower, upper

    def speedup_over(self, other: "Contestant") -> float:
        """Return the median ratio of the other's seconds to these, taken within rounds."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(other_seconds / seconds for seconds, other_seconds in pairs)

    def end(self) -> None:
        """Kill the remaining processes."""
        for process in self.processes:
            process.kill()
            process.wait()


def compete(
    contestants: Sequence[Contestant], rounds: int, steps: int, *, warmup: int, seconds: float
) -> int:
    """Take turns, in reverse order in every other round; return the number of rounds.

    Args:
        contestants: contestants, whose `seconds` are extended.
        rounds: most rounds.
        steps: steps of each contestant in a round.
        warmup: steps of each contestant before the first round.
        seconds: time limit; no round starts that would not end in time, but at least three are run.
    """
    started = time.monotonic()
    for each in contestants:
        each.run(warmup)
    for number in range(rounds):
        round_start = time.monotonic()
        for each in contestants if number % 2 == 0 else reversed(contestants):
            each.seconds.append(each.run(steps))
        now = time.monotonic()
        if number >= 2 and now + (now - round_start) > started + seconds:
            return number + 1
    return rounds


def progress(text: str) -> None:
    """Print progress to standard error, separate from the results."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
