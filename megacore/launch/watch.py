"""Detection of stalled, lost and killed ranks of a job, and the state that its scheduler reports.

Heartbeats show stalled and lost ranks. Out-of-memory kills show only in the kernel's counters.
While a scheduler's job is queued or ending, its ranks are not expected to make progress: the
process that follows the job writes its state in a small file next to the ranks' reasons, and the
supervisor reads it. Without the file, and so without a scheduler, the job counts as running.
Imports no torch.
"""

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from megacore.artifact.files import read_record, workspace_errors, write_json
from megacore.errors import FileAccessError
from megacore.hardware import Hardware
from megacore.observe.heartbeat import ENDED, Beat, read_heartbeats

INTERVAL = 1.0
"""Seconds between two checks."""
RECENT = 60.0
"""Seconds within which a job ends after the kernel killed one of its ranks."""
LOST_LIMIT = 10.0
"""Seconds within which a job must notice a lost rank and end."""
STANDSTILL = 5.0
"""Maximum seconds between two checks. After a longer time the watcher itself, perhaps the whole
host, must have been suspended."""
REMOTE_DELAY = 120.0
"""Seconds by which a shared file system may delay another host's heartbeat."""
START_DELAY = 120.0
"""Additional seconds for a rank without a heartbeat, which may still import its packages from a
slow file system."""


@dataclass(frozen=True)
class Trouble:
    """Reason to end a job: its stalled and lost ranks."""

    stalled: tuple[int, ...] = ()
    """Ranks that made no progress for longer than the limit."""
    lost: tuple[int, ...] = ()
    """Ranks whose process is gone before their work was done."""


class RankWatch:
    """Watcher of the ranks of one job."""

    def __init__(
        self,
        directory: Path,
        *,
        stall_limit: float | None,
        ranks: int | None = None,
        only: Collection[int] | None = None,
        elsewhere: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start to watch the heartbeats in `directory`.

        Args:
            directory: the job's `exit_directory`.
            stall_limit: seconds without a change after which a rank is stalled; None means never.
            ranks: number of ranks expected to write a heartbeat; None means that ranks without one
                are not watched.
            only: ranks to watch, all expected to write a heartbeat; None means all.
            elsewhere: True if agents watch all ranks, including those of this host, and should
                report first.
            clock: monotonic clock in seconds.
        """
        self._directory, self._stall_limit, self._clock = directory, stall_limit, clock
        self._only, self._elsewhere = only, elsewhere
        self._ranks = frozenset(range(ranks or 0) if only is None else only)
        self._began = self._looked = clock()
        self._since: dict[int, tuple[tuple[int, int], float]] = {}
        self._gone: dict[int, float] = {}

    def look(self) -> Trouble | None:
        """Check the heartbeats, at most once a second, and return the trouble, if any."""
        now = self._clock()
        pause = now - self._looked
        if pause < INTERVAL:
            return None
        self._looked = now
        if pause > STANDSTILL:
            # One interval counts: checks that always take long must find a stall, too.
            pause -= INTERVAL
            self._began += pause
            self._since = {
                rank: (progress, moment + pause) for rank, (progress, moment) in self._since.items()
            }
            self._gone = {rank: moment + pause for rank, moment in self._gone.items()}
        beats = [
            beat
            for beat in read_heartbeats(self._directory)
            if self._only is None or beat.rank in self._ranks
        ]
        self._note(beats, now)
        stalled = tuple(
            sorted(
                [
                    *(beat.rank for beat in beats if self._stalls(beat, now)),
                    *self._absent(beats, now),
                ]
            )
        )
        lost = tuple(
            rank for rank, moment in sorted(self._gone.items()) if now - moment > LOST_LIMIT
        )
        return Trouble(() if lost else stalled, lost) if stalled or lost else None

    def hold(self) -> None:
        """Restart all limits; the ranks had no hosts to run on until now."""
        self._began = self._looked = self._clock()
        self._since.clear()
        self._gone.clear()

    def _near(self, beat: Beat) -> bool:
        return beat.here and not self._elsewhere

    def _is_finished(self, beat: Beat) -> bool:
        """Return True if a rank has done its work and its process is gone, as far as is known.

        The exit of a process can hang, for example in the driver of a GPU.
        """
        return beat.phase == ENDED and not (self._near(beat) and beat.alive)

    def _note(self, beats: list[Beat], now: float) -> None:
        for beat in beats:
            progress = (beat.pid, beat.changes)
            changed = self._since.get(beat.rank, (None, 0.0))[0] != progress
            if changed or self._is_finished(beat):
                self._since[beat.rank] = (progress, now)
            if beat.phase != ENDED and self._near(beat) and not beat.alive:
                self._gone.setdefault(beat.rank, now)
            else:
                self._gone.pop(beat.rank, None)

    def _absent(self, beats: list[Beat], now: float) -> set[int]:
        """Return the ranks whose start is overdue, or that were unreadable for as long.

        A file that cannot be read for a moment does not mean that the rank stands still.
        """
        if self._stall_limit is None:
            return set()
        limit = self._stall_limit + START_DELAY
        return {
            rank
            for rank in set(self._ranks) - {beat.rank for beat in beats}
            if now - self._since.get(rank, (None, self._began))[1] > limit
        }

    def _stalls(self, beat: Beat, now: float) -> bool:
        if self._stall_limit is None:
            return False
        limit = self._stall_limit + (0.0 if self._near(beat) else REMOTE_DELAY)
        return now - self._since[beat.rank][1] > limit


def oom_kills(root: Path = Path("/")) -> int | None:
    """Return the number of out-of-memory kills so far in this control group, else on this host.

    The counter of a control group counts its own processes, no matter who used up the memory. The
    host's counter counts all processes. None means that there is no counter. `root` is the parent
    directory of /proc and /sys.
    """
    for path in [*_group_files(root), root / "proc/vmstat"]:
        if (count := _field(path, "oom_kill")) is not None:
            return count
    return None


class KillCounter:
    """Counter of recent out-of-memory kills, none of them before the creation of this object.

    A kill long before a rank was lost has another reason: the counter is of the whole control
    group or host.
    """

    def __init__(
        self,
        read: Callable[[], int | None] = oom_kills,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the initial count with `read`, which returns the number of all kills so far."""
        self._read, self._clock = read, clock
        count = read()
        self._samples = deque([] if count is None else [(clock(), count)])

    @property
    def counts(self) -> bool:
        """True if the kernel provides a counter."""
        return bool(self._samples)

    def look(self) -> None:
        """Read the count, at most once a second; kills that it contains grow old from now on."""
        now = self._clock()
        if not self.counts or now - self._samples[-1][0] < INTERVAL:
            return
        count = self._read()
        if count is not None:
            self._samples.append((now, count))
            self._forget(now)

    @property
    def rose(self) -> bool:
        """True if the kernel has killed a process for lack of memory within `RECENT` seconds."""
        count = self._read()
        self._forget(self._clock())
        return count is not None and self.counts and count > self._samples[0][1]

    def _forget(self, now: float) -> None:
        """Drop the samples before the newest one that is not recent."""
        while len(self._samples) > 1 and now - self._samples[1][0] >= RECENT:
            self._samples.popleft()


def memory_text() -> str:
    """Describe the memory of this host, or the limit of the control group."""
    return f"{Hardware.detect().memory / 2**30:.1f} GiB of host memory"


def _group_files(root: Path) -> list[Path]:
    """Return the counter files of this process's control groups: version 2, then version 1.

    In a container the process's own group may be mounted as the root of the hierarchy.
    """
    try:
        lines = (
            (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
        )
    except OSError:
        return []
    files = []
    for mount, controller, name in (
        ("", "", "memory.events"),
        ("memory", "memory", "memory.oom_control"),
    ):
        for line in lines:
            _, controllers, group = line.split(":", 2)
            if controller in controllers.split(","):
                top = root / "sys/fs/cgroup" / mount
                files += [top / group.lstrip("/") / name, top / name]
    return files


def _field(path: Path, name: str) -> int | None:
    try:
        for line in path.read_text(encoding="ascii", errors="replace").splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return None


State = Literal["queued", "running", "ending"]

_NAME = "launcher_state.json"


@dataclass(frozen=True)
class LauncherState:
    """State of a job according to its scheduler."""

    state: State
    """State of the job: queued (it waits for hosts, at first or after preemption), running, or
    ending (its ranks are being ended, or have ended and the hosts are cleaned up)."""
    detail: str
    """State in the scheduler's own words, such as `PENDING (Resources)`."""
    time: float
    """Unix time of the change, in seconds."""


def launcher_state_path(exit_directory: Path) -> Path:
    """Return the path of the state file."""
    return exit_directory / _NAME


def write_launcher_state(exit_directory: Path, state: State, detail: str) -> None:
    """Replace the state atomically.

    Args:
        exit_directory: the job's exit directory; created if it does not exist.
        state: queued, running or ending.
        detail: state in the scheduler's own words.

    Raises:
        WorkspaceError: the file cannot be written.
    """
    path = launcher_state_path(exit_directory)
    with workspace_errors(path):
        exit_directory.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(LauncherState(state, detail, time.time())))


def read_launcher_state(exit_directory: Path) -> LauncherState | None:
    """Return the state; None if no scheduler has reported one or it cannot be read now."""
    try:
        record = read_record(launcher_state_path(exit_directory), LauncherState)
    except FileAccessError:  # the next poll reads it
        return None
    return record if record is not None and record.state in get_args(State) else None


def forget_launcher_state(exit_directory: Path) -> None:
    """Remove the state of an earlier attempt, which must not count for this one.

    Raises WorkspaceError.
    """
    path = launcher_state_path(exit_directory)
    with workspace_errors(path):
        path.unlink(missing_ok=True)
