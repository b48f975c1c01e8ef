"""Translation of a failed job into one typed error.

The error is derived from the ranks' reasons, the launcher's log and the heartbeats.
"""

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megacore.artifact.files import free_text, reason_of
from megacore.errors import (
    LaunchError,
    MegacoreError,
    MemoryExhaustedError,
    RankLostError,
    RankStalledError,
    TrainingError,
    WorkspaceError,
)
from megacore.launch.exit_reason import (
    ExitReason,
    printed_reasons,
    read_launcher_reason,
    read_reasons,
)
from megacore.launch.guard import NOT_EXECUTABLE, NOT_FOUND
from megacore.launch.rank_table import RankState, StateReport, furthest_behind, rank_states, table
from megacore.launch.watch import LOST_LIMIT, KillCounter, Trouble, memory_text

_LOG_BYTES = 1 << 25
"""Last bytes of a log that are searched: ranks that torch aborts write about 10 KB each, and those
of all other hosts may do so after the report about the first one."""
_LOG_LINES = 5
_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):(?:\s*\[\d+\]:\s*time\s*:\s*(?P<time>\S+))?.*?rank\s*:"
    r"\s*(?P<rank>\d+).*?exitcode\s*:\s*(?P<code>-?\d+)",
    re.S,
)
_DEEPSPEED_CAUSE = re.compile(r"exits with return code = (-?\d+)")
"""DeepSpeed's log line about the first rank that failed; it does not name the rank."""
_LAUNCHERS_OWN = re.compile(
    r"^(?:\S+: )?[WE]\d{4} .*torch/distributed/elastic/|^(?:\S+: )?\[[^]]*\] \[[A-Z]+\] "
    r"\[launch\.py:",
    re.M,
)
"""Start of the launcher's own report of the failure; the ranks' last lines before it say more."""
_CPP_STACK = re.compile(
    r"^(?:\S+: )?(?:\[rank\d+\]: ?)?(?:frame #\d+: |Exception raised from |For debugging consider "
    r"passing CUDA_LAUNCH_BLOCKING|Compile with `TORCH_USE_CUDA_DSA|CUDA kernel errors might be )"
)
"""Start of a line of torch's C++ stacks and of CUDA's advice; the lines before them say more."""
_PORT_IN_USE = re.compile(r"(?:EADDRINUSE|address already in use)", re.I)
_PORT = re.compile(r"port:? (\d+)")
_LITTLE_SPACE = 1 << 30
"""Free bytes below which a full disk is a likely cause."""
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
RESUMES = "resumes from the last complete checkpoint"
"""Verb phrase on a retry of a training, to follow a subject."""
REPEATS = "starts from the beginning"
"""Verb phrase on a retry of another job, to follow a subject."""


@dataclass(frozen=True)
class Attempt:
    """One start of a command, with the facts that explain its failure."""

    program: str
    """Name of the command."""
    log: Path
    """Path of the command's log."""
    written: int
    """Size of the log in bytes before the attempt."""
    exit_directory: Path
    """Directory of the ranks' reasons, heartbeats and stacks."""
    ranks: int | None
    """Number of ranks of the job; None if unknown."""
    kills: KillCounter
    """Counter of recent out-of-memory kills."""
    hosts: tuple[str, ...] = ()
    """Hosts that prefix their log lines with their names; empty for a job on one host."""
    printed: bytearray = field(default_factory=bytearray)
    """Reasons that ranks could not write to their files, one in each line, from the guard."""
    mark: str = ""
    """Mark of the job, which its ranks inherit. Reasons with another mark are of an earlier attempt
    and do not count; if it is empty, all count."""
    again: str = REPEATS
    """Verb phrase on a retry of the command: `RESUMES` or `REPEATS`."""
    stall_limit: float | None = None
    """Seconds without progress after which a rank is stalled; None means no limit."""

    @property
    def table_path(self) -> Path:
        """Path of the rank table, next to the log."""
        return self.log.with_name(f"{self.log.stem}-ranks.txt")

    def stopped(self) -> MegacoreError | None:
        """Return why a command that ended with code 0 stopped early; None if it did not."""
        reasons = self._reasons()
        return reasons[0].exception() if reasons else self._launchers_own(reasons)

    def _reasons(self) -> list[ExitReason]:
        printed = printed_reasons(bytes(self.printed).splitlines())
        return [
            reason
            for reason in read_reasons(self.exit_directory, printed)
            if reason.mark in ("", self.mark) or not self.mark
        ]

    def _launchers_own(self, reasons: list[ExitReason]) -> MegacoreError | None:
        """Return the launcher's own reason, unless a rank has a reason of its own."""
        if any(not reason.secondary for reason in reasons):
            return None
        return read_launcher_reason(self.exit_directory)

    def failed(self, code: int) -> MegacoreError:
        """Return the typed error for a command that ended with `code`; its processes are gone."""
        reasons, text = self._reasons(), _tail(self.log, self.written)
        if code in {NOT_FOUND, NOT_EXECUTABLE} and not reasons:
            return LaunchError(
                f"cannot start {self.program} (exit code {code}): {_last_lines(text)}; the log is "
                f"{self.log}"
            )
        if (launcher_error := self._launchers_own(reasons)) is not None:
            return self._with_table(launcher_error, None)
        lost_rank, lost_code = _first_to_fail(text, self.hosts)
        lost_rank = self._only_silent(reasons) if lost_rank is None else lost_rank
        silent = lost_rank is None or lost_rank not in {reason.rank for reason in reasons}
        signalled = silent and lost_code is not None and lost_code < 0
        if lost_code == -signal.SIGABRT and reasons and _is_cause(reasons[0]):
            # With NCCL, torch aborts the ranks that lost this one, which then give no reason.
            signalled = False
        exit_code = lost_code if lost_code is not None else code
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
        if self.kills.rose and (exit_code in _KILLED or (reasons and not signalled)):
            error = _out_of_memory(who)
        elif reasons and not signalled and (lost_rank is None or not silent):
            error = reasons[0].exception()
        elif not reasons and _PORT_IN_USE.search(text):
            port = _PORT.search(text)
            error = RankLostError(
                f"port {port[1] if port else 'of the rendezvous'} is in use by another process: "
                f"end it, or start again for another port; the log is {self.log}"
            )
        elif not reasons and exit_code == WorkspaceError.exit_code:
            error = WorkspaceError(
                f"{who} {_ended(exit_code, self.kills)}, which means that it could not use the "
                f"workspace, and its reason is lost too{_little_space(self.exit_directory)}; last "
                f"lines of {self.log}: {_last_lines(text)}"
            )
        else:
            # The launcher may report the code of a rank that failed only because it lost this one.
            how = _ended(exit_code, self.kills) if signalled or not reasons else "ended"
            error = RankLostError(
                f"{who} {how} without giving a reason; a retry {self.again}; last lines of "
                f"{self.log}: {_last_lines(text, lost_rank)}"
            )
        return self._with_table(error, lost_rank)

    def _only_silent(self, reasons: list[ExitReason]) -> int | None:
        """Return the only rank without a reason; None if there are none or several."""
        silent = set(range(self.ranks or 0)) - {reason.rank for reason in reasons}
        return silent.pop() if reasons and len(silent) == 1 else None

    def states(
        self, *, stacks: bool, reported: Mapping[int, StateReport] | None = None
    ) -> list[RankState]:
        """Return the current states of the ranks.

        Args:
            stacks: True to ask the ranks of this host for their Python stacks.
            reported: states that agents report.
        """
        return rank_states(self.exit_directory, self.ranks, stacks=stacks, reported=reported)

    def troubled(self, trouble: Trouble, states: list[RankState]) -> MegacoreError:
        """Write the rank table of a job that had to be ended and return its typed error."""
        reasons = self._reasons()
        if trouble.lost:
            first = next(state for state in states if state.rank == trouble.lost[0])
            error = self._lost(first, reasons)
        else:
            first = furthest_behind(states)
            error = self._stalled(trouble, first, reasons)
        return self._write_table(error, states, first)

    def _lost(self, first: RankState, reasons: list[ExitReason]) -> MegacoreError:
        silent = first.rank not in {reason.rank for reason in reasons}
        if reasons and (
            reasons[0].stopped or _is_cause(reasons[0]) or not (silent or reasons[0].secondary)
        ):
            return reasons[0].exception()
        if self.kills.rose:
            return _out_of_memory(f"rank {first.rank}")
        return RankLostError(
            f"rank {first.rank} {first.where} is gone without giving a reason, and the job did not "
            f"end by itself within {LOST_LIMIT:g} s; a retry {self.again}"
        )

    def _stalled(
        self, trouble: Trouble, first: RankState, reasons: list[ExitReason]
    ) -> MegacoreError:
        if reasons and not reasons[0].secondary:
            return reasons[0].exception()
        who = (
            f"rank{'s' if len(trouble.stalled) > 1 else ''} {', '.join(map(str, trouble.stalled))}"
        )
        return RankStalledError(
            f"{who} made no progress for launch.stall_limit = {self.stall_limit:g} s; furthest "
            f"behind is rank {first.rank} {first.where}; a retry {self.again}"
        )

    def _with_table(self, error: MegacoreError, lost_rank: int | None) -> MegacoreError:
        """Write the rank table of a job that has ended and return `error` with its path.

        The ranks are gone, but their last heartbeats can still be read.
        """
        states = self.states(stacks=False)
        if not states:
            return error
        first = next((state for state in states if state.rank == lost_rank), None)
        return self._write_table(error, states, first)

    def _write_table(
        self, error: MegacoreError, states: list[RankState], first: RankState | None
    ) -> MegacoreError:
        """Write the rank table to the log and next to it; return the error with its path."""
        rank_table = table(states, first, str(error))
        with contextlib.suppress(OSError), open(self.log, "a", encoding="utf-8") as log:
            log.write(rank_table)
        try:
            self.table_path.write_text(rank_table, encoding="utf-8")
        except OSError as unwritable:
            return type(error)(
                f"{error}; the table of ranks could not be written ({reason_of(unwritable)})"
            )
        return type(error)(f"{error}; the table of ranks is {self.table_path}")


def _is_cause(reason: ExitReason) -> bool:
    """Return True if the loss of another rank cannot have caused the failure.

    An unknown exception, which is a TrainingError, may be its consequence.
    """
    return not reason.secondary and reason.error != TrainingError.__name__


def _out_of_memory(who: str) -> MemoryExhaustedError:
    return MemoryExhaustedError(
        f"{who} ran out of host memory: the kernel's out-of-memory killer ended it, with "
        f"{memory_text()} available"
    )


def _little_space(directory: Path) -> str:
    """Return advice if the directory's disk is nearly full, otherwise an empty string."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(directory).free < _LITTLE_SPACE:
            return f"; {free_text(directory)}: free some space, then start again"
    return ""


def _first_to_fail(text: str, hosts: Sequence[str] = ()) -> tuple[int | None, int | None]:
    """Return rank and exit code of the first rank that failed, according to the launchers' log.

    If several hosts report a failure, the first report of a signal wins: the other ranks failed
    only because they lost that one. SIGTERM does not count on the nodes of a batch job, for which
    there are no `hosts`: the scheduler sends it to the others when one fails. Each value is None if
    the log does not give it.
    """
    failures = [failure for part in _by_host(text, hosts) for failure in _failures_in(part)]
    others = () if hosts else (-signal.SIGTERM,)
    signalled = [failure for failure in failures if failure.code < 0 and failure.code not in others]
    first = min(signalled, key=lambda failure: failure.time) if signalled else None
    first = first or next(iter(failures), None)
    return (None, None) if first is None else (first.rank, first.code)


def _by_host(text: str, hosts: Sequence[str]) -> list[str]:
    """Return the log lines of each host without the host's name."""
    if not hosts:
        return [text]
    parts: dict[str, list[str]] = {host: [] for host in hosts}
    for line in text.splitlines():
        host, _, rest = line.partition(": ")
        if host in parts:
            parts[host].append(rest)
    return ["\n".join(lines) for lines in parts.values()]


class _Failure(NamedTuple):
    """First failure on one host, in the report of its launcher."""

    time: str
    """Local time, as in 2026-11-28_15:00:03; empty if the report has none."""
    rank: int | None
    code: int


def _failures_in(text: str) -> list[_Failure]:
    """Return the failures in a log: of one host, or of all nodes of a batch job."""
    if roots := list(_ROOT_CAUSE.finditer(text)):
        return [
            _Failure(root["time"] or "", int(root["rank"]), int(root["code"])) for root in roots
        ]
    cause = _DEEPSPEED_CAUSE.search(text)
    return [_Failure("", None, int(cause[1]))] if cause else []


def _ended(code: int, kills: KillCounter) -> str:
    """Describe the end of a process.

    Args:
        code: negative signal number, a shell's 128 + n, or an exit code.
        kills: counter of out-of-memory kills; if the kernel does not count them, the description of
            SIGKILL mentions them as a possible cause.
    """
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
    """Return the last `_LOG_BYTES` of the log from offset `start` on; "" if it cannot be read."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - _LOG_BYTES))
            return file.read().decode("utf-8", errors="replace")
    except OSError:  # the ranks' reasons say more than the loss of the log
        return ""


def _last_lines(text: str, rank: int | None = None) -> str:
    """Return the last lines of a log in one line; only those that name `rank`, if there are any.

    torch's and NCCL's messages name their rank, as in `[rank3]:` or `[PG ID 0 PG GUID 0 Rank 3]`.
    The other ranks' messages about the loss of this one are later and say less.
    """
    launcher_report = _LAUNCHERS_OWN.search(text)
    ranks_text = (
        text[: launcher_report.start()]
        if launcher_report and text[: launcher_report.start()].strip()
        else text
    )
    lines = [
        line.strip()
        for line in ranks_text.splitlines()
        if line.strip(" =-*") and not _CPP_STACK.match(line)
    ]
    if rank is not None:
        named = re.compile(rf"\brank ?{rank}\]", re.I)
        lines = [line for line in lines if named.search(line)] or lines
    return " | ".join(lines[-_LOG_LINES:]) or "none"
