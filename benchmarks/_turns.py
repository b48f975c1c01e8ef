"""Processes that wait on standard input and take turns, so that a machine whose speed changes
changes it for all."""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megacore.cluster.rank_commands import rank_environment

_MALLOC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
"""What tells glibc to keep freed blocks; a contestant without them must not inherit them."""


def environment(threads: int, *, tuned_malloc: bool = True) -> dict[str, str]:
    """Of a process with so many threads, as megacore's launcher sets it, or with glibc's own
    malloc."""
    launched = rank_environment(threads)
    untuned = {name: value for name, value in launched.items() if name not in _MALLOC}
    inherited = {name: value for name, value in os.environ.items() if name not in _MALLOC}
    return inherited | (launched if tuned_malloc else untuned)


@dataclass
class Contestant:
    """The processes of one way to do the work, and what they measured."""

    name: str
    processes: "list[subprocess.Popen[str]]"
    seconds: list[float] = field(default_factory=list)
    """Of one step on the slowest rank, by round."""
    last: list[dict[str, Any]] = field(default_factory=list)
    """What each rank said last."""

    @classmethod
    def start(
        cls, name: str, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]
    ) -> "Contestant":
        """A process `python -m ARGUMENTS` for each environment."""
        command = [sys.executable, "-m", *arguments]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return cls(
            name, [subprocess.Popen(command, env=dict(each), **pipes) for each in environments]
        )

    def ask(self, command: str) -> list[dict[str, Any]]:
        """Give every process a command; the first one's answer: a list, by rank."""
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.write(f"{command}\n")
                process.stdin.flush()
            except BrokenPipeError:
                break
        answers = self.processes[0].stdout
        assert answers is not None
        for line in answers:  # a library may print too
            if line.startswith("[{"):
                self.last = json.loads(line)
                return self.last
        raise SystemExit(f"contestant {self.name!r} ended: its error is above")

    def run(self, steps: int) -> float:
        """Make steps; seconds of one on the slowest rank."""
        return max(float(rank["seconds"]) for rank in self.ask(f"run {steps}"))

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Of the seconds of a step."""
        if len(self.seconds) < 2:
            return self.median, self.median
        lower, _, upper = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return lower, upper

    def times_as_fast_as(self, other: "Contestant") -> float:
        """Median of the ratios within rounds."""
        pairs = zip(self.seconds, other.seconds, strict=True)
        return statistics.median(theirs / own for own, theirs in pairs)

    def end(self) -> None:
        """Kill what is left."""
        for process in self.processes:
            process.kill()
            process.wait()


def compete(
    contestants: Sequence[Contestant], rounds: int, steps: int, *, warmup: int, seconds: float
) -> int:
    """Take turns, every other round backwards, and return the number of rounds.

    Args:
        contestants: get their seconds.
        rounds: at most.
        steps: of each in a round.
        warmup: steps of each before the first round.
        seconds: after which no round begins that would not end in time; three are made in any case.
    """
    started = time.monotonic()
    for each in contestants:
        each.run(warmup)
    for number in range(rounds):
        began = time.monotonic()
        for each in contestants if number % 2 == 0 else reversed(contestants):
            each.seconds.append(each.run(steps))
        now = time.monotonic()
        if number >= 2 and now + (now - began) > started + seconds:
            return number + 1
    return rounds


def progress(text: str) -> None:
    """Say what is done, beside the results."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
