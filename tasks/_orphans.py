"""Watcher that ends the temporary server of a flow if the flow is killed.

    python -m tasks._orphans TOKEN

waits for the end of stdin, a pipe whose other end only the flow's process has open. Only the
standard library is imported.
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
"""Environment variable that all processes started by the flow inherit."""
_SERVER = b"prefect.server.api.server:create_app"
_GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL."""


def start_server() -> None:
    """Start Prefect's temporary server, which ends with this process but not on Ctrl-C.

    A terminal sends Ctrl-C to all of its processes. The flow still needs the server then, to
    record how it ended.
    """
    from prefect.server.api.server import SubprocessASGIServer

    watch_over_server()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        SubprocessASGIServer().start()  # the server inherits the blocked signal
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def watch_over_server() -> None:
    """Start the watcher, which ends when this process ends and then ends the server.

    Must be called before the server starts.
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
    # The first registered function runs last: Prefect has already ended its server by then.
    atexit.register(_stop_watcher, watcher)


def _stop_watcher(watcher: "subprocess.Popen[bytes]") -> None:
    assert watcher.stdin is not None
    watcher.stdin.close()
    watcher.wait()


def servers(token: str) -> list[int]:
    """Return the process ids of the servers that inherited the mark."""
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it ended, or is another user's
                marked = f"{MARK}={token}".encode() in Path(
                    "/proc", name, "environ"
                ).read_bytes().split(b"\0")
                if marked and _SERVER in Path("/proc", name, "cmdline").read_bytes():
                    pids.append(int(name))
    return pids


def main(token: str) -> None:
    """Wait for the end of the flow, then end its remaining servers."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the flow handles them
    sys.stdin.buffer.read()
    for ending_signal in (signal.SIGTERM, signal.SIGKILL):
        for pid in servers(token):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, ending_signal)
        deadline = time.monotonic() + _GRACE
        while servers(token) and time.monotonic() < deadline:
            time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1])
