"""Messages between the head of a job and its agents.

JSON, a line each, over pipes that never block their owner.

A line that is no message is text, as a login shell may write before the agent begins. Only the
standard library is imported.
"""

import contextlib
import json
import os
import select
import signal
from collections.abc import Iterable, Iterator
from typing import Any

BEAT = "beat"
"""Kind of the message that says nothing but that its sender lives."""
BEAT_INTERVAL = 1.0
"""Seconds between two of them."""
FULL = 2**20
"""Bytes that wait to be sent from which on nothing should be added that can wait."""

LONGEST = 2**25
"""Bytes of a line that is still awaited; what is longer is no message, and is passed on in
pieces."""

_MARK = b"\x1e"
_PIECE = 65536
_PIECES = 16

Message = dict[str, Any]


class Channel:
    """One side of a connection."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        """Take two descriptors, which stop blocking."""
        self.incoming, self.outgoing = incoming, outgoing
        self.open = True
        """Whether the other side can still say something."""
        self.broken = False
        """Whether it takes nothing any more."""
        self._read, self._waiting = b"", bytearray()
        os.set_blocking(incoming, False)
        os.set_blocking(outgoing, False)

    @property
    def waiting(self) -> int:
        """Bytes that wait to be sent."""
        return 0 if self.broken else len(self._waiting)

    def send(self, kind: str, **values: Any) -> None:
        """Queue a message and send what the pipe takes now."""
        if not self.broken:
            self._waiting += _MARK + json.dumps({"kind": kind, **values}).encode("ascii") + b"\n"
            self.flush()

    def flush(self) -> None:
        """Send what the pipe takes now."""
        while self._waiting and not self.broken:
            try:
                del self._waiting[: os.write(self.outgoing, self._waiting[:_PIECE])]
            except BlockingIOError:
                return
            except OSError:
                self.broken = True

    def receive(self) -> Iterator[Message | str]:
        """What has come: messages, and lines of text."""
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
            # the connection broke within it, or it is none of ours
            pass
    return line.decode("utf-8", errors="replace").rstrip("\r")


def wait(readable: Iterable[int], writable: Iterable[int], seconds: float) -> None:
    """Until one of these descriptors is ready, or the time is over."""
    poll = select.poll()
    writes = set(writable)
    for descriptor in {*readable} | writes:
        poll.register(descriptor, select.POLLOUT if descriptor in writes else select.POLLIN)
    poll.poll(seconds * 1000)


class WakeUp:
    """A descriptor that becomes readable with every signal that has a handler."""

    def __init__(self) -> None:
        """Only in the main thread, once."""
        self.descriptor, writer = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def clear(self) -> None:
        """Make it wait for the next one."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 4096)
