"""Ends the server that a flow without one brings along.

It does so when the flow itself is killed and no longer can.

    python -m tasks._orphans TOKEN

waits for the end of stdin, a pipe whose other end the flow's process alone holds. Only the standard
library is imported.
"""

import atexit
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "MEGACORE_FLOW_PROCESS"
"""Environment variable that everything which the flow starts inherits."""
_SERVER = b"prefect.server.api.server:create_app"
_GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL."""


def watch_over_server() -> None:
    """Start the watcher; it ends with this process, and after it the server.

    To be called before the server starts.
    """
    token = os.environ[MARK] = secrets.token_hex(8)
    command = [sys.executable, "-m", "tasks._orphans", token]
    watcher = subprocess.Popen(
        command,
        cwd=Path(__file__).resolve().parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    # What is registered first is done last: Prefect has ended its server itself by then.
    atexit.register(_let_go, watcher)


def _let_go(watcher: "subprocess.Popen[bytes]") -> None:
    assert watcher.stdin is not None
    watcher.stdin.close()
    watcher.wait()


def servers(token: str) -> list[int]:
    """Ids of the servers that carry the mark."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it ended, or is another user's
                marked = f"{MARK}={token}".encode() in Path(
                    "/proc", name, "environ"
                ).read_bytes().split(b"\0")
                if marked and _SERVER in Path("/proc", name, "cmdline").read_bytes():
                    found.append(int(name))
    return found


def main(token: str) -> None:
    """Wait, then end what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the flow's affair
    sys.stdin.buffer.read()
    for sent in (signal.SIGTERM, signal.SIGKILL):
        for pid in servers(token):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)
        deadline = time.monotonic() + _GRACE
        while servers(token) and time.monotonic() < deadline:
            time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1])
