"""The mark of a job: an environment variable that all its processes inherit. Only the standard library is imported."""

import contextlib
import os
from pathlib import Path

JOB_VARIABLE = "MEGACORE_JOB"
"""Every process of a job inherits this variable, whatever else it does to its session or its parent."""


def host_mark(mark: str, host: int | None) -> str:
    """The mark of a job's processes on one of its hosts, by number; None is the machine that started the job."""
    return f"{mark}.{'head' if host is None else host}"


def marked(*marks: str) -> list[int]:
    """Ids of the live processes, this one apart, that carry one of these marks in their environment."""
    wanted = {f"{JOB_VARIABLE}={mark}".encode() for mark in marks}
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):  # it ended, or is another user's
                if wanted & set(Path("/proc", name, "environ").read_bytes().split(b"\0")):
                    found.append(int(name))
    return found
