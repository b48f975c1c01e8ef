"""Watching a job's ranks: which stands still, which is gone without a word, and which was killed.

Heartbeats tell the first two. The kernel counts the processes that it killed because memory ran
out, and says so to nobody else.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from megacore.hardware import Hardware
from megacore.observe.heartbeat import ENDED, Beat, read_heartbeats

INTERVAL = 1.0
"""Seconds between two looks."""
LOST_LIMIT = 10.0
"""Seconds in which a job must have noticed by itself that a rank is gone."""
STANDSTILL = 5.0
"""Seconds between two looks after which the watcher itself, and perhaps the whole machine, stood
still."""
REMOTE_DELAY = 120.0
"""Seconds by which a shared file system may show another machine's heartbeat late."""
START_DELAY = 120.0
"""Seconds more for a rank that has no heartbeat yet: it loads its packages, perhaps from a slow
file system."""


@dataclass(frozen=True)
class Trouble:
    """Why a job has to be ended."""

    stalled: tuple[int, ...] = ()
    """Ranks that made no progress for longer than the limit."""
    lost: tuple[int, ...] = ()
    """Ranks whose process is gone though they had not done their work."""


class RankWatch:
    """Watches the ranks of one job."""

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
        """Look at the heartbeats in `directory`.

        Args:
            directory: the job's `exit_directory`.
            stall_limit: seconds without a change after which a rank is stalled; None: it never is.
            ranks: how many will have a heartbeat; None: one that has none is not watched.
            only: the ranks that are watched and will have one; None: all.
            elsewhere: whether ranks of this machine, too, are watched by somebody nearer, whose
                word comes first.
            clock: tells seconds that pass.
        """
        self._directory, self._stall_limit, self._clock = directory, stall_limit, clock
        self._only, self._elsewhere = only, elsewhere
        self._ranks = frozenset(range(ranks or 0) if only is None else only)
        self._began = self._looked = clock()
        self._since: dict[int, tuple[tuple[int, int], float]] = {}
        self._gone: dict[int, float] = {}

    def look(self) -> Trouble | None:
        """What is wrong, if anything; looks at most once a second."""
        now = self._clock()
        pause = now - self._looked
        if pause < INTERVAL:
            return None
        self._looked = now
        if pause > STANDSTILL:
            self._began += pause
            self._since = {
                rank: (what, moment + pause) for rank, (what, moment) in self._since.items()
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
        """Begin anew: until now the ranks had nothing to run on."""
        self._began = self._clock()
        self._since.clear()
        self._gone.clear()

    def _near(self, beat: Beat) -> bool:
        return beat.here and not self._elsewhere

    def _note(self, beats: list[Beat], now: float) -> None:
        for beat in beats:
            what = (beat.pid, beat.changes)
            if self._since.get(beat.rank, (None, 0.0))[0] != what:
                self._since[beat.rank] = (what, now)
            if beat.phase != ENDED and self._near(beat) and not beat.alive:
                self._gone.setdefault(beat.rank, now)
            else:
                self._gone.pop(beat.rank, None)

    def _absent(self, beats: list[Beat], now: float) -> set[int]:
        """Ranks that should have begun by now."""
        if self._stall_limit is None or now - self._began <= self._stall_limit + START_DELAY:
            return set()
        return set(self._ranks) - {beat.rank for beat in beats}

    def _stalls(self, beat: Beat, now: float) -> bool:
        if self._stall_limit is None or beat.phase == ENDED:
            return False
        limit = self._stall_limit + (0.0 if self._near(beat) else REMOTE_DELAY)
        return now - self._since[beat.rank][1] > limit


def oom_kills(root: Path = Path("/")) -> int | None:
    """Processes killed so far for want of memory in this control group, else on this machine.

    None: nobody counts.

    A group's own counter has its processes, whatever made memory run out; the machine's has
    everybody's. `root` is where /proc and /sys are.
    """
    for path in [*_group_files(root), root / "proc/vmstat"]:
        if (count := _field(path, "oom_kill")) is not None:
            return count
    return None


class KillCounter:
    """Whether the kernel killed since this object was made."""

    def __init__(self, read: Callable[[], int | None] = oom_kills) -> None:
        """`read` counts all kills so far."""
        self._read = read
        self._before = read()

    @property
    def counts(self) -> bool:
        """Whether anybody counts."""
        return self._before is not None

    @property
    def rose(self) -> bool:
        """Whether a process was killed for want of memory meanwhile."""
        now = self._read()
        return now is not None and self._before is not None and now > self._before


def memory_text() -> str:
    """How much memory this machine has, or the control group may take."""
    return f"{Hardware.detect().memory / 2**30:.1f} GiB of main memory"


def _group_files(root: Path) -> list[Path]:
    """Where this process's control groups count: version 2's, then version 1's.

    In a container its own group is mounted as the root of all that it sees.
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
