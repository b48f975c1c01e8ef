"""Messages between the head of a job and its agents: lines of JSON over non-blocking pipes.

A line that is not a message is text, for example from a login shell before the agent starts.
Imports only the standard library.
"""

import contextlib
import json
import os
import select
import signal
from collections.abc import Iterable, Iterator
from typing import Any

BEAT = "beat"
"""Kind of the message that only shows that its sender is alive."""
BEAT_INTERVAL = 1.0
"""Seconds between two of these messages."""
FULL = 2**20
"""Size of the send queue in bytes above which less urgent messages should wait."""

LONGEST = 2**25
"""Maximum size of a message in bytes; a longer line counts as text and is returned in pieces."""

_MARK = b"\x1e"
_PIECE = 65536
_PIECES = 16

Message = dict[str, Any]


class Channel:
    """One side of a connection."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        """Take two file descriptors and make them non-blocking."""
        self.incoming, self.outgoing = incoming, outgoing
        self.open = True
        """True if the other side can still send."""
        self.broken = False
        """True if the other side no longer receives."""
        self._read, self._waiting = b"", bytearray()
        os.set_blocking(incoming, False)
        os.set_blocking(outgoing, False)

    @property
    def waiting(self) -> int:
        """Size of the send queue in bytes."""
        return 0 if self.broken else len(self._waiting)

    def send(self, kind: str, **values: Any) -> None:
        """Queue a message and send as much as the pipe accepts now."""
        if not self.broken:
            self._waiting += _MARK + json.dumps({"kind": kind, **values}).encode("ascii") + b"\n"
            self.flush()

    def flush(self) -> None:
        """Send as much of the queue as the pipe accepts now."""
        while self._waiting and not self.broken:
            try:
                del self._waiting[: os.write(self.outgoing, self._waiting[:_PIECE])]
            except BlockingIOError:
                return
            except OSError:
                self.broken = True

    def receive(self) -> Iterator[Message | str]:
        """Yield the received messages and lines of text."""
        for _ in range(_PIECES):
            if not self.open:
                break
            try:
                part = os.read(self.incoming, _PIECE)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            self.open = part != b""
            self._read += part
        lines = self._read.split(b"\n")
        self._read = lines.pop() if self.open and len(lines[-1]) <= LONGEST else b""
        for line in filter(None, lines):
            yield _parsed(line)


def _parsed(line: bytes) -> Message | str:
    if line.startswith(_MARK):
        try:
            message = json.loads(line[1:])
            if isinstance(message, dict) and isinstance(message.get("kind"), str):
                return message
        except (ValueError, RecursionError):
            # The connection broke within the line, or the line is not from megacore.
            pass
    return line.decode("utf-8", errors="replace").rstrip("\r")


def wait(readable: Iterable[int], writable: Iterable[int], seconds: float) -> None:
    """Wait until one of the descriptors is ready, for at most `seconds` seconds."""
    poll = select.poll()
    writes = set(writable)
    for descriptor in {*readable} | writes:
        poll.register(descriptor, select.POLLOUT if descriptor in writes else select.POLLIN)
    poll.poll(seconds * 1000)


class WakeUp:
    """A descriptor that becomes readable with every signal that has a handler."""

    def __init__(self) -> None:
        """Register the descriptor; only once, and in the main thread."""
        self.descriptor, writer = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def clear(self) -> None:
        """Clear the descriptor, so that it waits for the next signal."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 4096)
