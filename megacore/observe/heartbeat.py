"""What a rank is doing now, in a small file that it maps into its memory.

Telling it takes no system call.

Nobody is asked for it: whoever looks at the file sees the rank's iteration, its phase and its last
collective, also when the rank hangs or is gone. Imports no torch.
"""

import contextlib
import mmap
import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

WAIT = " wait"
"""How the name of a phase ends in which a rank waits for others; such phases lie within other
ones."""
ENDED = "ended"
"""The phase of a rank that has done its work; nobody waits for a further change."""

_MAGIC = b"MCHB0002"
_OWNER = struct.Struct("<8sqQQ64s")
"""Magic, process id, start of the process, its namespace of ids, host."""
_NUMBER = struct.Struct("<Q")
"""Number of changes up to a state, in front of it."""
_STATE = struct.Struct("<qqd64s64s")
"""Iteration (-1: none yet), collectives, Unix time of the change, phase, last collective."""
_SLOT = _NUMBER.size + _STATE.size
_SLOTS = 2
"""States that are written by turns: a rank that is stopped or killed while it writes one has left
the other whole."""
_SIZE = _OWNER.size + _SLOTS * _SLOT
_READS = 5


@dataclass(frozen=True)
class Beat:
    """What a rank's heartbeat says."""

    rank: int
    """The rank, by the name of the file."""
    host: str
    """Name of its machine."""
    pid: int
    """Id of its process there."""
    process_start: int
    """When that process started, in clock ticks since the machine did: another one may have its id
    by now."""
    namespace: int
    """Where its id is valid: a container has ids of its own; 0 where that is not known."""
    changes: int
    """How often the heartbeat changed: it stands still while the rank does."""
    iteration: int | None
    """Training iteration, None before the first."""
    phase: str
    """What the rank does."""
    collectives: int
    """How often the rank began to wait for others."""
    collective: str
    """The last wait for others; empty before the first."""
    time: float
    """Unix time of the last change, by the clock of its machine, in seconds."""

    @property
    def here(self) -> bool:
        """Whether the process is on this machine, under the id that the heartbeat says."""
        return self.host == _host() and self.namespace == _namespace()

    @property
    def alive(self) -> bool:
        """Whether the process is there and no zombie; to be asked of one that is `here`."""
        return process_start(self.pid) == self.process_start

    @property
    def waits(self) -> bool:
        """Whether the rank waits for others now."""
        return self.phase.endswith(WAIT)


class Heartbeat:
    """Writes one rank's heartbeat. Not for several threads at a time."""

    def __init__(self, path: Path) -> None:
        """Make the file, in the phase "start".

        Raises:
            OSError: the file cannot be written.
        """
        self.phase = "start"
        """What the rank does now."""
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
        """Tell a phase and, where it is given, the iteration.

        One whose name ends in " wait" counts as a collective.
        """
        if iteration is not None:
            self._iteration = iteration
        if phase.endswith(WAIT):
            self._collectives += 1
            self._collective = phase.encode()
        self._write(phase)

    def back_to(self, phase: str) -> None:
        """Tell that the rank is in an outer phase again, which counts as no further collective."""
        self._write(phase)

    def _write(self, phase: str) -> None:
        self.phase = phase
        self._changes += 1
        state = _STATE.pack(
            self._iteration, self._collectives, time.time(), phase.encode(), self._collective
        )
        slot = _OWNER.size + self._changes % _SLOTS * _SLOT
        self._memory[slot + _NUMBER.size : slot + _SLOT] = state
        # Only now is it the newest; until then whoever looks takes the other.
        self._memory[slot : slot + _NUMBER.size] = _NUMBER.pack(self._changes)


def beat_path(directory: Path, rank: int) -> Path:
    """Where a rank's heartbeat lies."""
    return directory / f"rank_{rank:05d}.beat"


def stack_path(directory: Path, rank: int) -> Path:
    """Where a rank writes its Python stacks when it gets SIGUSR2."""
    return directory / f"rank_{rank:05d}.stack"


def read_heartbeat(path: Path) -> Beat | None:
    """What a rank's heartbeat says; None where there is none yet."""
    data = b""
    with contextlib.suppress(OSError):
        for _ in range(_READS):  # until it did not change while it was read
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
    """All ranks' heartbeats in a directory, by rank."""
    beats = [read_heartbeat(path) for path in directory.glob("rank_*.beat")]
    return sorted((beat for beat in beats if beat is not None), key=lambda beat: beat.rank)


def process_start(pid: int) -> int | None:
    """When a process of this machine started, in clock ticks since the machine did.

    None where it is gone.

    A zombie is gone. None, too, where there is no /proc.
    """
    fields = _stat(pid)
    return None if not fields or fields[0] in ("Z", "X") else int(fields[19])


def process_state(pid: int) -> str:
    """The kernel's letter for what a process does (R S D T t Z …); empty where it is gone."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def _stat(pid: int) -> list[str]:
    """What /proc says of a process behind its name."""
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
