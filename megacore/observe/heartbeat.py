"""Heartbeat of a rank: its current activity, in a small memory-mapped file.

An update takes no system call. Readers see the rank's iteration, phase and last collective without
asking the rank, even if it hangs or has died. This module does not import torch.
"""

import contextlib
import mmap
import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from megacore.paths import glob

WAIT = " wait"
"""Suffix of the names of phases in which a rank waits for others. These phases are nested in
others."""
ENDED = "ended"
"""Phase of a rank that has finished its work; no further change is expected."""

_MAGIC = b"MCHB0002"
_OWNER = struct.Struct("<8sqQQ64s")
"""Magic number, process id, start time of the process, its PID namespace, host name."""
_NUMBER = struct.Struct("<Q")
"""Sequence number of a state, stored before it."""
_STATE = struct.Struct("<qqd64s64s")
"""Iteration (-1: none yet), collectives, Unix time of the change, phase, last collective."""
_SLOT = _NUMBER.size + _STATE.size
_SLOTS = 2
"""Number of states, written in turn: if a rank is stopped or killed while it writes one, the other
is intact."""
_SIZE = _OWNER.size + _SLOTS * _SLOT
_READS = 5


@dataclass(frozen=True)
class Beat:
    """Content of a rank's heartbeat."""

    rank: int
    """Rank, taken from the file's name."""
    host: str
    """Name of the rank's host."""
    pid: int
    """Process id on that host."""
    process_start: int
    """Start time of the process, in clock ticks since the host booted. It detects a reused process
    id."""
    namespace: int
    """PID namespace in which the process id is valid (a container has its own); 0 if unknown."""
    changes: int
    """Number of changes of the heartbeat; it does not increase while the rank hangs."""
    iteration: int | None
    """Training iteration; None before the first."""
    phase: str
    """Current activity of the rank."""
    collectives: int
    """Number of times the rank began to wait for others."""
    collective: str
    """Name of the last wait for others; empty before the first."""
    time: float
    """Unix time of the last change in seconds, by the clock of the rank's host."""

    @property
    def here(self) -> bool:
        """True if the process is on this host, in the same PID namespace."""
        return self.host == _host() and self.namespace == _namespace()

    @property
    def alive(self) -> bool:
        """True if the process exists and is not a zombie; only valid if it is `here`."""
        return process_start(self.pid) == self.process_start

    @property
    def waits(self) -> bool:
        """True if the rank waits for others now."""
        return self.phase.endswith(WAIT)


class Heartbeat:
    """Writer of one rank's heartbeat. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        """Create the file with the phase "start".

        Raises:
            OSError: the file cannot be written.
        """
        self.phase = "start"
        """Current phase of the rank."""
        self._iteration, self._changes, self._collectives, self._collective = -1, 0, 0, b""
        start = process_start(os.getpid()) or 0
        owner = _OWNER.pack(_MAGIC, os.getpid(), start, _namespace(), _host().encode())
        temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "w+b") as file:
            file.write(owner + bytes(_SLOTS * _SLOT))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._write("start")
        os.replace(temporary, path)

    def beat(self, phase: str, iteration: int | None = None) -> None:
        """Record a phase and, if given, the iteration.

        A phase with a name that ends in " wait" counts as a collective.
        """
        if iteration is not None:
            self._iteration = iteration
        if phase.endswith(WAIT):
            self._collectives += 1
            self._collective = phase.encode()
        self._write(phase)

    def leave_phase(self, phase: str) -> None:
        """Record the return to an outer phase, without counting another collective."""
        self._write(phase)

    def _write(self, phase: str) -> None:
        self.phase = phase
        self._changes += 1
        state = _STATE.pack(
            self._iteration, self._collectives, time.time(), phase.encode(), self._collective
        )
        slot = _OWNER.size + self._changes % _SLOTS * _SLOT
        self._memory[slot + _NUMBER.size : slot + _SLOT] = state
        # The number makes the new state valid; until then readers take the other slot.
        self._memory[slot : slot + _NUMBER.size] = _NUMBER.pack(self._changes)


def beat_path(directory: Path, rank: int) -> Path:
    """Return the path of a rank's heartbeat."""
    return directory / f"rank_{rank:05d}.beat"


def stack_path(directory: Path, rank: int) -> Path:
    """Return the path of the file to which a rank writes its Python stacks on SIGUSR2."""
    return directory / f"rank_{rank:05d}.stack"


def read_heartbeat(path: Path) -> Beat | None:
    """Read a rank's heartbeat; return None if there is none yet."""
    data = b""
    with contextlib.suppress(OSError):
        for _ in range(_READS):  # until two reads are equal
            earlier, data = data, path.read_bytes()
            if data == earlier:
                break
    if len(data) != _SIZE or not data.startswith(_MAGIC):
        return None
    _, pid, start, namespace, host = _OWNER.unpack_from(data)
    slots = range(_OWNER.size, _SIZE, _SLOT)
    changes, slot = max((_NUMBER.unpack_from(data, slot)[0], slot) for slot in slots)
    iteration, collectives, moment, phase, collective = _STATE.unpack_from(
        data, slot + _NUMBER.size
    )
    return Beat(
        rank=int(path.stem.rpartition("_")[2]),
        host=_text(host),
        pid=pid,
        process_start=start,
        namespace=namespace,
        changes=changes,
        iteration=None if iteration < 0 else iteration,
        phase=_text(phase),
        collectives=collectives,
        collective=_text(collective),
        time=moment,
    )


def read_heartbeats(directory: Path) -> list[Beat]:
    """Return the heartbeats in a directory that can be read now, sorted by rank."""
    try:
        paths = list(glob(directory, "rank_*.beat"))
    except OSError:  # Python 3.11 raises the errors of a directory
        return []
    beats = [read_heartbeat(path) for path in paths]
    return sorted((beat for beat in beats if beat is not None), key=lambda beat: beat.rank)


def process_start(pid: int) -> int | None:
    """Return the start time of a process on this host, in clock ticks since the host booted.

    Return None if the process is gone or a zombie, or if there is no /proc.
    """
    fields = _stat(pid)
    return None if not fields or fields[0] in ("Z", "X") else int(fields[19])


def process_state(pid: int) -> str:
    """Return the kernel's state letter of a process (R S D T t Z …), or "" if it is gone."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the process name; empty if it is gone."""
    try:
        return (
            Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return []


def _host() -> str:
    return socket.gethostname()[:63]


def _namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("utf-8", errors="replace")
