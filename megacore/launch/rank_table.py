"""Table of a job's ranks at its end: the state of each rank and the stack of the stuck one.

The agents of other hosts report their ranks in a file that the supervisor reads.
"""

import contextlib
import re
import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megacore.artifact.files import read_json, workspace_errors, write_json
from megacore.errors import FileAccessError
from megacore.launch.guard import catches, send_signal
from megacore.launch.watch import Trouble
from megacore.observe.heartbeat import ENDED, Beat, process_state, read_heartbeats, stack_path
from megacore.paths import exists

REPORT = "launcher_report.json"
"""Name of the agents' report, next to the ranks' reasons."""
_STACK_LIMIT = 3.0
"""Seconds for all ranks of a host to write their stacks."""
_QUIET = 0.3
_FRAMES = 3
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.M)
_HEADER = (
    *("", "rank", "host", "pid", "state", "iteration"),
    *("phase", "last collective", "number", "idle s"),
)
_WITHOUT_STACK = {
    "running": "it did not write one when it was asked to",
    "stopped": "the process is stopped (SIGSTOP), so it cannot write one",
    "in the kernel": (
        "the process waits in the kernel, for a disk or a network file system, so it cannot write "
        "one"
    ),
    "dead": "the process is gone",
    "ended": "it has done its work",
    "on another host": "its process is on another machine, which was not asked",
    "absent": "it has written no heartbeat yet",
}


@dataclass(frozen=True)
class StateReport:
    """State of a rank as its host's agent reports it; the fields are those of `RankState`."""

    state: str
    idle: float
    stack: str


@dataclass(frozen=True)
class RankState:
    """State of one rank at the end of its job."""

    rank: int
    """Number of the rank."""
    beat: Beat | None
    """Last heartbeat of the rank; None if it has written none yet."""
    state: str
    """State of the process: running, stopped, in the kernel, dead, ended, on another host, or
    absent (no heartbeat yet)."""
    idle: float
    """Seconds since the last change of the heartbeat."""
    stack: str
    """Python stacks of the rank, or the reason for their absence; empty if not requested."""

    @property
    def frames(self) -> str:
        """Innermost frames of the rank's main thread; empty if its stack is unknown."""
        main = self.stack.rpartition("Thread 0x")[2].rpartition("Current thread 0x")[2]
        frames = [
            (
                f"{Path(frame['file']).parent.name}/{Path(frame['file']).name}:{frame['line']} "
                f"({frame['function']})"
            )
            for frame in _FRAME.finditer(main)
        ]
        return " < ".join(frames[:_FRAMES])

    @property
    def where(self) -> str:
        """Host, phase and iteration of the rank, formatted for a sentence."""
        if self.beat is None:
            return "which has not begun its work"
        iteration = "" if self.beat.iteration is None else f" of iteration {self.beat.iteration}"
        at = f", at {self.frames}" if self.frames else ""
        return f"on {self.beat.host} in phase {self.beat.phase}{iteration}{at}"


@dataclass(frozen=True)
class LauncherReport:
    """Agents' report: the reason for ending the job and the states of its ranks."""

    trouble: Trouble
    """Reason for ending the job."""
    states: Mapping[int, StateReport]
    """State of each rank; the ranks of hosts that did not answer are missing."""


def rank_states(
    directory: Path,
    ranks: int | None,
    *,
    stacks: bool,
    only: Collection[int] | None = None,
    reported: Mapping[int, StateReport] | None = None,
) -> list[RankState]:
    """Return the states of a job's ranks, sorted by rank.

    The result is empty if no rank has a heartbeat, no stacks are requested, and nothing is
    reported.

    Args:
        directory: the job's `exit_directory`.
        ranks: number of ranks; None if unknown, which leaves out those without a heartbeat.
        stacks: True to ask the ranks of this host for their Python stacks, which show a hang.
        only: ranks to return; None means all.
        reported: states that agents report; they take precedence.
    """
    beats = {
        beat.rank: beat for beat in read_heartbeats(directory) if only is None or beat.rank in only
    }
    if not beats and not stacks and reported is None:  # the job ended before any rank started
        return []
    written = _ask_for_stacks(directory, beats.values()) if stacks else {}
    states = []
    for rank in sorted({*beats, *range(ranks or 0), *(only or ()), *(reported or ())}):
        beat = beats.get(rank)
        if reported and rank in reported:
            states.append(RankState(rank, beat, **asdict(reported[rank])))
            continue
        state = _state(beat)
        stack = written.get(rank) or (f"no stack: {_WITHOUT_STACK[state]}" if stacks else "")
        states.append(
            RankState(rank, beat, state, max(0.0, time.time() - beat.time) if beat else 0.0, stack)
        )
    return states


def _state(beat: Beat | None) -> str:
    if beat is None:
        return "absent"
    if beat.phase == ENDED and not (beat.here and beat.alive):
        return "ended"
    if not beat.here:
        return "on another host"
    if not beat.alive:
        return "dead"
    return {"T": "stopped", "t": "stopped", "D": "in the kernel"}.get(
        process_state(beat.pid), "running"
    )


def _ask_for_stacks(directory: Path, beats: Iterable[Beat]) -> dict[int, str]:
    """Send SIGUSR2 to the ranks of this host and return the stacks that they write, by rank."""
    signalled = []
    for beat in beats:
        if beat.here and beat.alive and catches(beat.pid, signal.SIGUSR2):
            send_signal(beat.pid, signal.SIGUSR2)
            if _state(beat) == "running":
                signalled.append(beat.rank)
    paths = {rank: stack_path(directory, rank) for rank in signalled}
    started = changed = time.monotonic()
    sizes: dict[int, int] = {}
    while (now := time.monotonic()) - started < _STACK_LIMIT:
        new_sizes = {rank: path.stat().st_size for rank, path in paths.items() if exists(path)}
        if new_sizes != sizes:
            sizes, changed = new_sizes, now
        if now - changed > _QUIET and all(sizes.get(rank) for rank in signalled):
            break
        time.sleep(0.05)
    return {
        rank: path.read_text(encoding="utf-8", errors="replace")
        for rank, path in paths.items()
        if exists(path)
    }


def furthest_behind(states: Sequence[RankState]) -> RankState:
    """Return the rank that the others wait for.

    This is a rank that is absent, stopped or outside of any collective, in this order. Otherwise it
    is the rank in the earliest collective.
    """

    def progress(state: RankState) -> tuple[bool, bool, bool, int, int, float]:
        beat = state.beat
        if beat is None:
            return (False, False, False, 0, 0, 0.0)
        iteration = -1 if beat.iteration is None else beat.iteration
        return (
            True,
            state.state != "stopped",
            beat.waits,
            iteration,
            beat.collectives,
            -state.idle,
        )

    working = [state for state in states if state.state not in ("ended", "dead")]
    return min(working or states, key=progress)


def table(states: Sequence[RankState], first: RankState | None, sentence: str) -> str:
    """Return the sentence, the table and the stacks as one text.

    `first` is the rank that the sentence is about, if there is one: it is marked, and its stacks
    come first.
    """
    rows = [_HEADER, *(_row(state, state is first) for state in states)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    parts = [f"{sentence}\n", "\n".join(lines) + "\n"]
    with_stacks = [state for state in states if state.stack]
    for state in sorted(with_stacks, key=lambda state: (state is not first, state.rank)):
        parts.append(f"Python stacks of rank {state.rank}:\n{state.stack.rstrip()}\n")
    return "\n".join(parts)


def _row(state: RankState, first: bool) -> tuple[str, ...]:
    mark, beat = "->" if first else "", state.beat
    if beat is None:
        return (mark, str(state.rank), "", "", state.state, "", "", "", "", "")
    iteration = "" if beat.iteration is None else str(beat.iteration)
    where = (beat.host, str(beat.pid), state.state, iteration, beat.phase, beat.collective)
    return (mark, str(state.rank), *where, str(beat.collectives), f"{state.idle:.0f}")


def write_report(directory: Path, report: LauncherReport) -> None:
    """Write the agents' report atomically. Raises WorkspaceError."""
    path = directory / REPORT
    with workspace_errors(path):
        write_json(
            path,
            {
                "trouble": asdict(report.trouble),
                "states": {str(rank): asdict(state) for rank, state in report.states.items()},
            },
        )


def read_report(directory: Path) -> LauncherReport | None:
    """Return the agents' report; None if there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, FileAccessError):
        fields = read_json(directory / REPORT)
        trouble = Trouble(**{name: tuple(ranks) for name, ranks in fields["trouble"].items()})
        return LauncherReport(
            trouble, {int(rank): StateReport(**state) for rank, state in fields["states"].items()}
        )
    return None
