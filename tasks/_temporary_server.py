"""Start and end of the temporary server of a flow, and of the flow's process.

    python -m tasks._temporary_server TOKEN

is the watcher that ends the server if the flow is killed. It waits for the end of stdin, a pipe
whose other end only the flow's process has open, and imports only the standard library.
"""

import atexit
import base64
import contextlib
import http.client
import importlib
import json
import logging
import math
import os
import random
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NoReturn, Self
from uuid import UUID

MARK = "MEGACORE_FLOW_PROCESS"
"""Environment variable that all processes started by the flow inherit."""
_SERVER_MODULE = "prefect.server.api.server"
_SERVER = f"{_SERVER_MODULE}:create_app".encode()
_SERVE = """
import atexit, gc, sys, types
gc.set_threshold(*{thresholds})
atexit.register(gc.freeze)
sys.modules["prefect_dask"] = types.ModuleType("prefect_dask")
from uvicorn import main
main()
"""
"""Program of the temporary server: `python -m uvicorn` with rarer searches for garbage.

The server imports every collection of Prefect's for its types of blocks. The one for Dask has none,
and imports Dask.
"""
GC_THRESHOLDS = (100_000, 20, 50)
"""Thresholds of garbage collection while thousands of modules are imported, all of which stay."""
_PORTS = range(8000, 9000)
_HOST = "127.0.0.1"
_HEALTH_POLL = 0.04
_IMPORTED_MEANWHILE = (
    "fastapi.encoders",
    "prefect.flow_engine",
    "prefect.task_engine",
    "prefect.utilities.visualization",
)
"""Modules that Prefect imports when a flow runs; here while the server starts."""
_PORT_IN_USE = 3
"""Exit code of uvicorn when it cannot listen."""
_GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL."""
RESTARTS = 3
"""Number of times in a row that a killed temporary server is started again."""
_STEADY = 60.0
"""Seconds after which a server's end has another cause than that of the server before it."""
FLUSH = 10.0
"""Seconds that an ending flow waits until a server has its last logs and events."""
RECORDS_BYTES = 16 << 20
"""Free space that the databases of Prefect and MLflow need for a run; measured are 7 MiB."""
_RECORD = re.compile(rb"(?m)^(?=\d\d:\d\d:\d\d\.\d{3} \| )")
"""Start of a record in the log of Prefect's server."""
_RESULTS = (b"Traceback", b"Application startup failed")
"""Texts of records that repeat an error of the database."""
_TRIED_AGAIN = (b"Failed in consume_loop", b"database is locked")
"""Texts of a record on an event that an automation counts while another service writes: Prefect
counts it up to three times more."""
_POLL = 0.05
_RECORD_PAUSE = 0.3
"""Seconds without output after which a record is complete."""
_FOLLOWS = 1.0
"""Seconds after an error of the database in which other tracebacks are taken for its results."""
_CURRENT = 10.0
"""Seconds after an error of the database in which the server counts as unable to write it."""
_DATABASE_ERROR = re.compile(
    r"sqlite3\.OperationalError(?::|\)) (database or disk is full|disk I/O error|"
    r"attempt to write a readonly database|unable to open database file)"
)


_FINAL_STATES = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
_ended_task_runs: set[str] = set()


def note_ended(task_run: UUID | None) -> None:
    """Let the flow's end wait until the temporary server has stored the end of this task run."""
    if task_run is not None:
        _ended_task_runs.add(str(task_run))


_ending = threading.Event()
_restarting = threading.Lock()


def start_server() -> None:
    """Start Prefect's temporary server, which ends with this process but not on Ctrl-C.

    A terminal sends Ctrl-C, and a signal when it is closed, to all of its processes. The flow still
    needs the server then, to record how it ended. A server that is killed is started again, with
    the same records. It asks every process for a password that only this one and its children know.
    Servers of one workspace start one after another, because each may have to create or migrate the
    database.

    Raises:
        WorkspaceError: there is no room for the database, or the server cannot write it.
    """
    from prefect.settings import PREFECT_HOME

    from megacore.artifact import lock
    from megacore.artifact.files import require_space, workspace_errors

    database = Path(PREFECT_HOME.value()) / "prefect.db"
    require_space(database.parent, RECORDS_BYTES, "the records of a run in Prefect and MLflow need")
    _set_password()
    _replace_server_module()
    watch_over_server()
    server = TemporaryServer()
    _server_output.watch(server, database)
    keeper = threading.Thread(target=_keep, args=(server,), name="server-keeper", daemon=True)
    with workspace_errors(database.parent):
        database.parent.mkdir(parents=True, exist_ok=True)
    with lock(database):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        try:
            server.start()  # the server and the thread inherit the blocked signals
            _server_output.started = True
            keeper.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class TemporaryServer:
    """Prefect's SubprocessASGIServer without the import of the server into the flow's process.

    That import takes seconds of processor time, and only the server's own process needs it. Like
    Prefect's class, this one has a single instance, which Prefect's clients start if nobody has.
    """

    _instance: ClassVar[Self | None] = None

    def __new__(cls, port: int | None = None) -> Self:
        """Return the instance."""
        if cls._instance is None:
            cls._instance = super().__new__(cls)
            cls._instance.port = None
            cls._instance.server_process = None
            cls._instance.running = False
        return cls._instance

    port: int | None
    server_process: "subprocess.Popen[bytes] | None"
    running: bool

    @property
    def address(self) -> str:
        """URL of the server."""
        return f"http://{_HOST}:{self.port}"

    @property
    def api_url(self) -> str:
        """URL of the server's API."""
        return f"{self.address}/api"

    def start(self, timeout: int | None = None) -> None:
        """Start the server unless it runs, and wait until it answers.

        Raises RuntimeError if its process ends, or does not answer within about `timeout` seconds,
        by default Prefect's setting.
        """
        if self.running:
            return
        self.port = _free_port()
        logging.getLogger("prefect").info(
            "Starting temporary server on %s\nSee "
            "https://docs.prefect.io/v3/concepts/server#how-to-guides for more information on "
            "running a dedicated Prefect server.",
            self.address,
        )
        self.running = True
        try:
            self.server_process = self._run_uvicorn_command()
            atexit.register(self.stop)
            for module in _IMPORTED_MEANWHILE:
                importlib.import_module(module)
            self._wait_until_healthy(timeout)
        except BaseException:
            self.stop()
            raise

    def _wait_until_healthy(self, timeout: int | None) -> None:
        from prefect.settings import PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS

        assert self.server_process is not None
        seconds = timeout or PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value()
        for _ in range(round(seconds / _HEALTH_POLL)):  # longer on a busy host, as in Prefect
            ended = self.server_process.poll()
            if ended == _PORT_IN_USE:
                self.port = _free_port()
                self.server_process = self._run_uvicorn_command()
            elif ended is not None:
                break
            elif self._is_healthy():
                return
            time.sleep(_HEALTH_POLL)
        code = self.server_process.poll()
        reason = "" if code is None else f"; its process ended with {code}"
        raise RuntimeError(f"Prefect's temporary server at {self.address} does not answer{reason}")

    def _is_healthy(self) -> bool:
        return self._answer("GET", "/api/health") is not None

    def wait_for_records(self, task_runs: Collection[str], deadline: float) -> None:
        """Wait until the database has the final states of task runs, given by their ids.

        The server stores states after it has answered, one by one, and drops the rest when it ends.
        Returns at `deadline`, in seconds of the monotonic clock, or as soon as the server does not
        answer.
        """
        query = {"id": {"any_": sorted(task_runs)}, "state": {"type": {"any_": _FINAL_STATES}}}
        while time.monotonic() < deadline:
            count = self._count_task_runs(query)
            if count is None or count >= len(task_runs):
                return
            time.sleep(_POLL)

    def _count_task_runs(self, query: Mapping[str, Any]) -> int | None:
        """Return the number of task runs that a filter finds, None without an answer."""
        login = base64.b64encode(os.environ.get("PREFECT_API_AUTH_STRING", "").encode()).decode()
        headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
        body = json.dumps({"task_runs": query})
        count = self._answer("POST", "/api/task_runs/count", body, headers)
        return int(count) if count is not None and count.isdigit() else None

    def _answer(
        self, method: str, path: str, body: str | None = None, headers: Mapping[str, str] = {}
    ) -> bytes | None:
        """Return the content of the server's answer, or None if it does not answer with 200."""
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=5)
        with (
            contextlib.closing(connection),
            contextlib.suppress(OSError, http.client.HTTPException),
        ):
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.read() if answer.status == http.client.OK else None
        return None

    def _run_uvicorn_command(self) -> "subprocess.Popen[bytes]":
        from prefect.settings import get_current_settings

        settings = get_current_settings().to_environment_variables(exclude_unset=True)
        switches = {
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",
            "PREFECT__SERVER_FINAL": "1",
        }
        command = [sys.executable, "-c", _SERVE.format(thresholds=GC_THRESHOLDS), "--factory"]
        command += [_SERVER.decode(), "--host", _HOST, "--port", str(self.port)]
        command += ["--log-level", "error", "--lifespan", "on"]
        return subprocess.Popen(command, env={**os.environ, **switches, **settings})

    def stop(self) -> None:
        """End the server, at the latest after 5 s."""
        process, self.server_process = self.server_process, None
        type(self)._instance = None
        self.running = False
        if process is not None:
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    """Return a port of Prefect's temporary servers on which nobody listens."""
    for port in random.sample(_PORTS, k=len(_PORTS)):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind((_HOST, port))
            return port
    raise RuntimeError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free")


class _ServerModule(ModuleType):
    """Stand-in for Prefect's server module, from which its clients take the class of the server.

    The module itself is imported as soon as something else in it is used.
    """

    SubprocessASGIServer = TemporaryServer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of every module in sys.modules
            raise AttributeError(name)
        if sys.modules.get(_SERVER_MODULE) is self:
            del sys.modules[_SERVER_MODULE]
        module = importlib.import_module(_SERVER_MODULE)
        module.SubprocessASGIServer = TemporaryServer  # type: ignore[attr-defined]
        return getattr(module, name)


def _replace_server_module() -> None:
    """Let Prefect's clients use TemporaryServer."""
    module = sys.modules.setdefault(_SERVER_MODULE, _ServerModule(_SERVER_MODULE))
    module.SubprocessASGIServer = TemporaryServer  # type: ignore[attr-defined]


def database_problem() -> str | None:
    """Return in one sentence why the temporary server cannot write its database, if it cannot now.

    The server answers before its output is read, so this waits a moment for the output.
    """
    deadline = time.monotonic() + 2 * _RECORD_PAUSE
    while not _server_output.met_within(_CURRENT):
        if not _server_output.reads() or time.monotonic() > deadline:
            return None
        time.sleep(_POLL)
    return _server_output.problem


def database_fault(program: str, database: Path, text: str) -> str | None:
    """Return in one sentence why `program` cannot write its SQLite file, if `text` has the reason.

    `text` is an error as sqlite3 or SQLAlchemy writes it.
    """
    reason = _DATABASE_ERROR.search(text)
    if reason is None:
        return None
    from megacore.artifact.files import free_text

    return (
        f"{program} cannot write its database {database}: {reason[1]}; "
        f"{free_text(database.parent)}: free some space, or make it writable, then run the same "
        "command again"
    )


class _ServerOutput:
    """Standard error of the temporary server, passed on without tracebacks of its database."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """Reason for which the server could last not write its database, or None."""
        self._met = -math.inf
        """Time of the last error of the database."""
        self.started = False
        """True once the server has answered: from then on a problem is shown when it is met."""
        self._reader: threading.Thread | None = None

    def met_within(self, seconds: float) -> bool:
        """Return True if an error of the database was read in the last `seconds`."""
        return self.problem is not None and time.monotonic() - self._met < seconds

    def reads(self) -> bool:
        """Return True while the output of a server is read."""
        return self._reader is not None and self._reader.is_alive()

    def watch(self, server: Any, database: Path) -> None:
        """Read the output of each process that `server` starts.

        Before the server has answered, the next start after one with a problem raises
        WorkspaceError: Prefect would take the exit for a port in use, and start the server again
        and again.
        """
        start = server._run_uvicorn_command

        def start_and_read() -> "subprocess.Popen[bytes]":
            from megacore.errors import WorkspaceError

            if self._reader is not None:
                self._reader.join(timeout=_GRACE)
            if self.problem is not None and not self.started:
                raise WorkspaceError(self.problem)
            reader, writer = os.pipe()
            stderr = os.dup(2)
            os.dup2(writer, 2)  # what others write meanwhile is passed on, too
            try:
                process: subprocess.Popen[bytes] = start()
            finally:
                os.dup2(stderr, 2)
                os.close(stderr)
                os.close(writer)
            self._reader = threading.Thread(
                target=self._pass_on, args=(reader, database), name="server-output", daemon=True
            )
            self._reader.start()
            return process

        server._run_uvicorn_command = start_and_read

    def _pass_on(self, reader: int, database: Path) -> None:
        """Copy the output to stderr, each record as a whole, until the server has ended."""
        record = b""
        with open(reader, "rb", buffering=0) as output:
            while True:
                ready, _, _ = select.select([output], [], [], _RECORD_PAUSE)
                chunk = output.read(65536) if ready else b""
                if not ready or not chunk:
                    self._write(record, database)
                    record = b""
                if ready and not chunk:
                    return
                *before, record = _RECORD.split(record + chunk)
                for each in before:
                    self._write(each, database)

    def _write(self, record: bytes, database: Path) -> None:
        if all(each in record for each in _TRIED_AGAIN):
            return
        fault = database_fault("Prefect", database, record.decode("utf-8", errors="replace"))
        if fault is not None:
            record = b"" if self.met_within(_CURRENT) else f"warning: {fault}\n".encode()
            self.problem, self._met = fault, time.monotonic()
            if not self.started:
                record = b""  # the start raises it
        elif self.met_within(_FOLLOWS) and any(each in record for each in _RESULTS):
            record = b""
        if record:
            with contextlib.suppress(OSError):
                os.write(2, record)


_server_output = _ServerOutput()


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
    restarts = 0
    while True:
        began = time.monotonic()
        while server.server_process is not None and server.server_process.poll() is None:
            if _ending.wait(0.5):
                return
        with _restarting:
            if _ending.is_set() or server.server_process is None:
                return
            restarts = 1 if time.monotonic() - began > _STEADY else restarts + 1
            if restarts > RESTARTS:
                logging.getLogger("prefect").warning(
                    "the temporary server was ended %d times in a row and is not started again: "
                    "Prefect records no more of this run",
                    restarts,
                )
                return
            _server_output.problem = None  # there may be space again
            logging.getLogger("prefect").warning(
                "the temporary server was ended from outside; it is started again"
            )
            server.server_process = server._run_uvicorn_command()


def end_process(last_line: str, code: int) -> NoReturn:
    """End the flow's process: send the last logs and events, end the temporary server, print.

    Nothing is printed after `last_line`. Prefect would try for minutes to send to a server that has
    ended; this function waits `FLUSH` seconds, also until the temporary server has stored the
    states of the task runs that ended, and not at all if that server has ended. A negative `code`
    is the signal number to die of.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # what follows is short
    with _restarting:
        _ending.set()
    logging.disable(logging.CRITICAL)
    logging.raiseExceptions = False  # Prefect would report logs that no server takes
    from prefect._internal.concurrency.services import QueueService

    from megacore.observe.logging import flush_output

    module = sys.modules.get(_SERVER_MODULE)
    server = module.SubprocessASGIServer() if module else None
    process = server.server_process if server else None
    lost = process is not None and process.poll() is not None
    deadline = time.monotonic() + FLUSH
    _, unsent = QueueService.drain_all(timeout=0.0 if lost else FLUSH)  # type: ignore[misc]
    if server:
        if process is not None and not lost:
            server.wait_for_records(_ended_task_runs, deadline)
        server.stop()
    unwritten = flush_output()
    with contextlib.suppress(OSError):  # as for stdout; there is no other place for this
        if unwritten is not None:
            sys.stderr.write(f"warning: {unwritten}\n")
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
    command = [sys.executable, "-m", "tasks._temporary_server", token]
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
