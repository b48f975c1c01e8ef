"""What a failed job is told as: one typed error.

It comes from the ranks' reasons, the launcher's log and the heartbeats.
"""

import contextlib
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megacore.errors import (
    LaunchError,
    MegacoreError,
    MemoryExhaustedError,
    RankLostError,
    RankStalledError,
)
from megacore.launch.exit_reason import ExitReason, read_launcher_reason, read_reasons
from megacore.launch.guard import NOT_EXECUTABLE, NOT_FOUND
from megacore.launch.rank_table import RankState, StateReport, furthest_behind, rank_states, table
from megacore.launch.watch import LOST_LIMIT, KillCounter, Trouble, memory_text

_LOG_BYTES = 65536
_LOG_LINES = 5
_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.S
)
_DEEPSPEED_CAUSE = re.compile(r"exits with return code = (-?\d+)")
"""What DeepSpeed's launcher says of the first rank that failed, without naming it."""
_LAUNCHERS_OWN = re.compile(
    r"^(?:\S+: )?[WE]\d{4} .*torch/distributed/elastic/|^(?:\S+: )?\[[^]]*\] \[[A-Z]+\] "
    r"\[launch\.py:",
    re.M,
)
"""Where a launcher's account of the failure begins, which says less than the ranks' last lines."""
_PORT_IN_USE = re.compile(r"(?:EADDRINUSE|address already in use)", re.I)
_PORT = re.compile(r"port:? (\d+)")
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_RESUMES = "a retry resumes from the last complete checkpoint"


@dataclass(frozen=True)
class Attempt:
    """One run of a command, for the account of its failure."""

    program: str
    """The command's name."""
    log: Path
    """Where its output went."""
    written: int
    """Bytes that the log had before."""
    exit_directory: Path
    """Where each rank writes its reason, its heartbeat and its stacks."""
    ranks: int | None
    """Processes of the job, None where that is not known."""
    kills: KillCounter
    """Whether the kernel killed for want of memory meanwhile."""
    hosts: tuple[str, ...] = ()
    """Machines whose lines in the log begin with their names; empty where there is but one."""

    @property
    def table_path(self) -> Path:
        """Where the table of ranks goes: beside the log."""
        return self.log.with_name(f"{self.log.stem}-ranks.txt")

    def stopped(self) -> MegacoreError | None:
        """What a command that ended with code 0 left to say: that it stopped before its end."""
        reasons = read_reasons(self.exit_directory)
        return reasons[0].exception() if reasons else self._launchers_own(reasons)

    def _launchers_own(self, reasons: list[ExitReason]) -> MegacoreError | None:
        """Why the launcher itself ended the job, unless a rank did by itself."""
        if any(not reason.secondary for reason in reasons):
            return None
        return read_launcher_reason(self.exit_directory)

    def failed(self, code: int) -> MegacoreError:
        """The typed error for a command that ended with `code`; all its processes are gone."""
        reasons, text = read_reasons(self.exit_directory), _tail(self.log, self.written)
        if code in {NOT_FOUND, NOT_EXECUTABLE} and not reasons:
            return LaunchError(
                f"cannot start {self.program} (exit code {code}): {_last_lines(text)}; the log is "
                f"{self.log}"
            )
        if (own := self._launchers_own(reasons)) is not None:
            return self._with_table(own, None)
        lost_rank, lost_code = _first_to_fail(text, self.hosts)
        lost_rank = self._only_silent(reasons) if lost_rank is None else lost_rank
        silent = lost_rank is None or lost_rank not in {reason.rank for reason in reasons}
        signalled = silent and lost_code is not None and lost_code < 0
        number = lost_code if lost_code is not None else code
        who = (
            f"rank {lost_rank}"
            if lost_rank is not None
            else "the job"
            if lost_code is None
            else "a rank"
        )
        error: MegacoreError
        if reasons and (reasons[0].stopped or not (signalled or reasons[0].secondary)):
            return reasons[0].exception()
        if self.kills.rose and (number in _KILLED or (reasons and not signalled)):
            error = _out_of_memory(who)
        elif reasons and not signalled and (lost_rank is None or not silent):
            error = reasons[0].exception()
        elif not reasons and _PORT_IN_USE.search(text):
            port = _PORT.search(text)
            error = RankLostError(
                f"port {port[1] if port else 'of the rendezvous'} is in use by another process: "
                f"end it, or start again for another port; the log is {self.log}"
            )
        else:
            # What the launcher reports may be the code of a rank that only lost this one.
            how = _ended(number, self.kills) if signalled or not reasons else "ended"
            error = RankLostError(
                f"{who} {how} without giving a reason; {_RESUMES}; last lines of {self.log}: "
                f"{_last_lines(text)}"
            )
        return self._with_table(error, lost_rank)

    def _only_silent(self, reasons: list[ExitReason]) -> int | None:
        """The rank that gave no reason where all others did."""
        silent = set(range(self.ranks or 0)) - {reason.rank for reason in reasons}
        return silent.pop() if reasons and len(silent) == 1 else None

    def states(
        self, *, stacks: bool, reported: Mapping[int, StateReport] | None = None
    ) -> list[RankState]:
        """The ranks now.

        With `stacks` those of this machine are asked for theirs, `reported` is what agents said.
        """
        return rank_states(self.exit_directory, self.ranks, stacks=stacks, reported=reported)

    def troubled(
        self, trouble: Trouble, stall_limit: float | None, states: list[RankState]
    ) -> MegacoreError:
        """The typed error for a job that had to be ended, with a table of its ranks."""
        reasons = read_reasons(self.exit_directory)
        if trouble.lost:
            first = next(state for state in states if state.rank == trouble.lost[0])
            error = self._lost(first, reasons)
        else:
            first = furthest_behind(states)
            error = self._stalled(trouble, stall_limit, first, reasons)
        return self._told(error, states, first)

    def _lost(self, first: RankState, reasons: list[ExitReason]) -> MegacoreError:
        silent = first.rank not in {reason.rank for reason in reasons}
        if reasons and (reasons[0].stopped or not (silent or reasons[0].secondary)):
            return reasons[0].exception()
        if self.kills.rose:
            return _out_of_memory(f"rank {first.rank}")
        return RankLostError(
            f"rank {first.rank} {first.where} is gone without giving a reason, and the job did not "
            f"end by itself within {LOST_LIMIT:g} s; {_RESUMES}"
        )

    def _stalled(
        self, trouble: Trouble, limit: float | None, first: RankState, reasons: list[ExitReason]
    ) -> MegacoreError:
        if reasons and not reasons[0].secondary:
            return reasons[0].exception()
        who = (
            f"rank{'s' if len(trouble.stalled) > 1 else ''} {', '.join(map(str, trouble.stalled))}"
        )
        return RankStalledError(
            f"{who} made no progress for launch.stall_limit = {limit:g} s; furthest behind is rank "
            f"{first.rank} {first.where}; {_RESUMES}"
        )

    def _with_table(self, error: MegacoreError, lost_rank: int | None) -> MegacoreError:
        """A job that ended by itself.

        Its ranks are all gone, and what they did last is still to be read.
        """
        states = self.states(stacks=False)
        if not states:
            return error
        first = next((state for state in states if state.rank == lost_rank), None)
        return self._told(error, states, first)

    def _told(
        self, error: MegacoreError, states: list[RankState], first: RankState | None
    ) -> MegacoreError:
        """Write the table beside the log and into it; the error says where it is."""
        text = table(states, first, str(error))
        with contextlib.suppress(OSError), open(self.log, "a", encoding="utf-8") as log:
            log.write(text)
        try:
            self.table_path.write_text(text, encoding="utf-8")
        except OSError as unwritable:
            return type(error)(f"{error}; the table of ranks could not be written ({unwritable})")
        return type(error)(f"{error}; the table of ranks is {self.table_path}")


def _out_of_memory(who: str) -> MemoryExhaustedError:
    return MemoryExhaustedError(
        f"{who} ran out of main memory: the kernel's out-of-memory killer ended it, with "
        f"{memory_text()} to be had"
    )


def _first_to_fail(text: str, hosts: Sequence[str] = ()) -> tuple[int | None, int | None]:
    """Rank and exit code of the first rank that failed, as far as the launcher's log says.

    Of several machines' accounts one that tells of a signal counts: the other ranks only lost that
    one.
    """
    told = [found for part in _by_host(text, hosts) if (found := _first_in(part)) != (None, None)]
    signalled = (found for found in told if found[1] is not None and found[1] < 0)
    return next(signalled, told[0] if told else (None, None))


def _by_host(text: str, hosts: Sequence[str]) -> list[str]:
    """The lines of each machine without its name."""
    if not hosts:
        return [text]
    lines = text.splitlines()
    return [
        "\n".join(line.removeprefix(f"{host}: ") for line in lines if line.startswith(f"{host}: "))
        for host in hosts
    ]


def _first_in(text: str) -> tuple[int | None, int | None]:
    """What one machine's launcher says of it."""
    if root := _ROOT_CAUSE.search(text):
        return int(root[1]), int(root[2])
    cause = _DEEPSPEED_CAUSE.search(text)
    return None, int(cause[1]) if cause else None


def _ended(code: int, kills: KillCounter) -> str:
    """How a process ended, from a negative signal number, a shell's 128 + n, or an exit code."""
    number = -code if code < 0 else code - 128
    if number <= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"exited with code {code}"
    hint = (
        " (as the kernel does when memory runs out)"
        if name == "SIGKILL" and not kills.counts
        else ""
    )
    return f"was ended by {name}{hint}"


def _tail(log: Path, start: int) -> str:
    """What this attempt wrote last."""
    with open(log, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _LOG_BYTES))
        return file.read().decode("utf-8", errors="replace")


def _last_lines(text: str) -> str:
    own = _LAUNCHERS_OWN.search(text)
    said = text[: own.start()] if own and text[: own.start()].strip() else text
    lines = [line.strip() for line in said.splitlines() if line.strip(" =-*")]
    return " | ".join(lines[-_LOG_LINES:]) or "none"
