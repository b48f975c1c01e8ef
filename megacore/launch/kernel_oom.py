"""Whether the kernel killed a process because memory ran out: it counts them, and says so to nobody else."""

from collections.abc import Callable
from pathlib import Path

from megacore.hardware import Hardware


def oom_kills(root: Path = Path("/")) -> int | None:
    """Processes killed so far for want of memory in this control group, else on this machine; None: nobody counts.

    A group's own counter has its processes, whatever made memory run out; the machine's has everybody's. `root` is
    where /proc and /sys are.
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
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    files = []
    for mount, controller, name in (("", "", "memory.events"), ("memory", "memory", "memory.oom_control")):
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
