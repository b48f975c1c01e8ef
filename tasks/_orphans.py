"""Start and end of the temporary server of a flow, and of the flow's process.

    python -m tasks._orphans TOKEN

is the watcher that ends the server if the flow is killed. It waits for the end of stdin, a pipe
whose other end only the flow's process has open, and imports only the standard library.
"""

import atexit
import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

MARK = "MEGACORE_FLOW_PROCESS"
"""Environment variable that all processes started by the flow inherit."""
_SERVER = b"prefect.server.api.server:create_app"
_GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL."""
RESTARTS = 3
"""Number of times that a killed temporary server is started again."""
FLUSH = 10.0
"""Seconds that an ending flow waits until a server has its last logs and events."""


_ending = threading.Event()
_restarting = threading.Lock()


def start_server() -> None:
    """Start Prefect's temporary server, which ends with this process but not on Ctrl-C.

    A terminal sends Ctrl-C to all of its processes. The flow still needs the server then, to
    record how it ended. A server that is killed is started again, with the same records. It asks
    every process for a password that only this one and its children know. Servers of one workspace
    start one after another, because each may have to create or migrate the database.
    """
    _set_password()
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import PREFECT_HOME

    from megacore.artifact import lock

    watch_over_server()
    server = SubprocessASGIServer()
    keeper = threading.Thread(target=_keep, args=(server,), name="server-keeper", daemon=True)
    database = Path(PREFECT_HOME.value()) / "prefect.db"
    database.parent.mkdir(parents=True, exist_ok=True)
    with lock(database):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            server.start()  # the server and the thread inherit the blocked signal
            keeper.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _set_password() -> None:
    """Set a password of a single use for the temporary server and its clients."""
    from prefect.context import refresh_global_settings_context

    password = f"megacore:{secrets.token_urlsafe(24)}"
    os.environ.update(
        PREFECT_SERVER_API_AUTH_STRING=password,
        PREFECT_API_AUTH_STRING=password,
        # It has no pages of its own.
        PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS="http://127.0.0.1",
    )
    refresh_global_settings_context()


def _keep(server: Any) -> None:
    """Start the server again when it has ended, at the same address, until the flow ends."""
    for _ in range(RESTARTS):
        while server.server_process is not None and server.server_process.poll() is None:
            if _ending.wait(0.5):
                return
        with _restarting:
            if _ending.is_set() or server.server_process is None:
                return
            logging.getLogger("prefect").warning(
                "the temporary server was ended from outside; it is started again"
            )
            server.server_process = server._run_uvicorn_command()


def end_process(last_line: str, code: int) -> NoReturn:
    """End the flow's process: send the last logs and events, end the temporary server, print.

    Nothing is printed after `last_line`. Prefect would try for minutes to send to a server that has
    ended; this function waits `FLUSH` seconds, and not at all if the temporary server has ended.

    Args:
        last_line: last line for stderr, or an empty string.
        code: exit code, or a negative signal number to die of that signal.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # what follows is short
    with _restarting:
        _ending.set()
    logging.disable(logging.CRITICAL)
    logging.raiseExceptions = False  # Prefect would report logs that no server takes
    from prefect._internal.concurrency.services import QueueService

    module = sys.modules.get("prefect.server.api.server")  # its import takes seconds
    server = module.SubprocessASGIServer() if module else None
    process = server.server_process if server else None
    lost = process is not None and process.poll() is not None
    _, unsent = QueueService.drain_all(timeout=0.0 if lost else FLUSH)  # type: ignore[misc]
    if server:
        server.stop()
    sys.stdout.flush()
    if last_line:
        sys.stderr.write(f"{last_line}\n")
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    busy = [thread for thread in threading.enumerate() if not thread.daemon]
    if unsent or len(busy) > 1:
        os._exit(code)  # the interpreter's own end would wait for them
    sys.exit(code)


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
