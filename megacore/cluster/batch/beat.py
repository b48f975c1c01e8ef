"""The follower's sign of life, a small file on the shared workspace that each machine of the batch job looks at.

It counts up; the machines compare what they read with their own clocks, since those of several machines differ.
"""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from megacore.cluster.batch.spec import replace

INTERVAL = 2.0
"""Seconds between two signs."""

_NAME = "follower.json"


class FollowerBeat:
    """The follower's side."""

    def __init__(self, folder: Path, token: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to count in `folder`; `token` names the submission, which another follower does not know."""
        self.save = False
        """Whether the ranks are to save and end, as SIGUSR1 asks."""
        self.over = False
        """Whether the job has ended, as the scheduler says: a machine that it has lost may still run its part."""
        self._path, self._token, self._clock = folder / _NAME, token, clock
        self._count, self._told = 0, (False, False)
        self._at: float | None = None

    def beat(self) -> None:
        """Write the sign if it is time, or if there is something new to say; a full disk is met again later."""
        now = self._clock()
        told = (self.save, self.over)
        if self._at is not None and now - self._at < INTERVAL and self._told == told:
            return
        self._at, self._told = now, told
        self._count += 1
        said = {"token": self._token, "count": self._count, "save": self.save, "over": self.over}
        with contextlib.suppress(OSError):
            replace(self._path, json.dumps(said))


class FollowerWatch:
    """A machine's side."""

    def __init__(self, folder: Path, token: str, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Watch the sign of submission `token` in `folder`; `limit` is in seconds."""
        self.save = False
        """Whether the follower asks the ranks to save and end."""
        self.over = False
        """Whether the follower says that the job has ended."""
        self._path, self._token, self._limit, self._clock = folder / _NAME, token, limit, clock
        self._count, self._since = -1, clock()

    def lost(self) -> bool:
        """Look at the sign: whether it stood still for longer than the limit."""
        now = self._clock()
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            said = json.loads(self._path.read_text(encoding="utf-8"))
            if said["token"] == self._token and said["count"] != self._count:
                self._count, self._since = said["count"], now
                self.save, self.over = self.save or bool(said["save"]), bool(said["over"])
        return now - self._since > self._limit
