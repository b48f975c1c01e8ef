"""Start, restart and end of the temporary Prefect server, and the end of the flow's process."""

import json
import logging
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacore.errors import WorkspaceError
from tasks import _temporary_server
from tasks._temporary_server import MARK, TemporaryServer, _ServerOutput, database_problem, servers
from tests._limits import HANG

ROOT = Path(__file__).parents[2]
FLOW = """
import subprocess, sys, time
from tasks._temporary_server import watch_over_server
watch_over_server()
# A process that looks like the server, and one that does not.
for name in ("prefect.server.api.server:create_app", "another"):
    sleep = [sys.executable, "-c", "import time; time.sleep(600)", name]
    subprocess.Popen(sleep, start_new_session=True)
print("started", flush=True)
time.sleep(600)
"""


PATIENT = {"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": str(int(HANG))}


def processes_of(token: str) -> list[int]:
    """Return the ids of the processes that carry a flow's mark."""
    process_ids = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if f"{MARK}={token}".encode() in Path("/proc", name, "environ").read_bytes().split(
                b"\0"
            ):
                process_ids.append(int(name))
        except OSError:
            continue
    return process_ids


def test_killed_flow_ends_its_server_and_no_other_process() -> None:
    flow = subprocess.Popen([sys.executable, "-c", FLOW], cwd=ROOT, stdout=subprocess.PIPE)
    assert flow.stdout is not None
    assert flow.stdout.readline() == b"started\n"
    (watcher,) = (
        pid
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))
        if parent_of(pid) == flow.pid and watches(pid)
    )
    token = Path(f"/proc/{watcher}/cmdline").read_bytes().split(b"\0")[-2].decode()
    deadline = time.monotonic() + HANG
    while len(processes_of(token)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(servers(token)) == 1
    flow.kill()
    flow.wait()
    flow.stdout.close()
    while servers(token) or watcher in processes_of(token):
        assert time.monotonic() < deadline, "the server outlives its flow"
        time.sleep(0.05)
    (other,) = processes_of(token)
    os.kill(other, 9)


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def watches(pid: int) -> bool:
    try:
        return b"tasks._temporary_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


SERVED_FLOW = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.default_int_handler)
from tasks._environment import answers
from tasks._temporary_server import TemporaryServer, start_server
start_server()
url = TemporaryServer().api_url
try:
    print("started", flush=True)
    sys.stdin.read()
except KeyboardInterrupt:
    print(answers(f"{url}/health"), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_temporary_server_answers_after_a_signal_of_the_terminal(
    tmp_path: Path, prefect_database: Path, number: signal.Signals
) -> None:
    shutil.copy(prefect_database, tmp_path / "prefect.db")
    flow = subprocess.Popen(
        [sys.executable, "-c", SERVED_FLOW],
        cwd=ROOT,
        env={**os.environ, "PREFECT_HOME": str(tmp_path), **PATIENT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert flow.stdin is not None
    assert flow.stdout is not None
    assert flow.stdout.readline() == b"started\n"
    os.killpg(flow.pid, number)
    output, _ = flow.communicate(timeout=HANG)
    assert output == b"True\n"
    with pytest.raises(ProcessLookupError):
        os.killpg(flow.pid, 0)


UNSENT_EVENT = """
import sys
from prefect.events import emit_event
from tasks import _temporary_server
_temporary_server.FLUSH = 0.5
emit_event("test", resource={"prefect.resource.id": "test"})
print("first line", file=sys.stderr)
_temporary_server.end_process("last line", CODE)
"""


@pytest.mark.parametrize("code", [5, -signal.SIGTERM])
def test_ending_flow_does_not_wait_for_a_server_that_is_gone(tmp_path: Path, code: int) -> None:
    flow = subprocess.run(
        [sys.executable, "-c", UNSENT_EVENT.replace("CODE", str(code))],
        cwd=ROOT,
        env={
            **os.environ,
            "PREFECT_HOME": str(tmp_path),
            "PREFECT_API_URL": "http://127.0.0.1:9/api",
        },
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert flow.returncode == code
    assert flow.stderr.splitlines()[0] == "first line"
    assert flow.stderr.splitlines()[-1] == "last line"
    assert "Traceback" not in flow.stderr


RESTARTED_SERVER = """
import os, sys, time, urllib.error, urllib.request
from prefect.client.orchestration import get_client
from tasks._environment import answers
from tasks._temporary_server import TemporaryServer, end_process, start_server
start_server()
server = TemporaryServer()
def refuses():
    try:
        urllib.request.urlopen(f"{server.api_url}/version")
    except urllib.error.HTTPError as error:
        return error.code == 401
assert refuses(), "the server answers without its password"
url, killed = f"{server.api_url}/health", server.server_process
killed.kill()
killed.wait()
while not answers(url):
    time.sleep(0.2)
assert refuses(), "the restarted server answers without its password"
with get_client(sync_client=True) as client:
    assert client.read_flow_runs() == []
assert os.environ["PREFECT_API_AUTH_STRING"] not in str(killed.args)
end_process(f"{server.server_process is not killed}", 0)
"""


@pytest.mark.slow
def test_killed_temporary_server_is_started_again_and_ends_with_the_flow(tmp_path: Path) -> None:
    flow = subprocess.run(
        [sys.executable, "-c", RESTARTED_SERVER],
        cwd=ROOT,
        env={**os.environ, "PREFECT_HOME": str(tmp_path), **PATIENT},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert flow.returncode == 0, flow.stderr
    assert "ended from outside; it is started again" in flow.stderr + flow.stdout
    assert flow.stderr.splitlines()[-1] == "True"


@pytest.mark.slow
def test_last_line_of_a_failed_command_is_the_error(tmp_path: Path) -> None:
    flow = subprocess.run(
        [sys.executable, "-m", "flows.pretrain", "-o", "train.train_iters=x"],
        cwd=ROOT,
        env={
            **{name: os.environ[name] for name in os.environ if not name.startswith("PREFECT_")},
            "MEGACORE_WORKSPACE": str(tmp_path),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert flow.returncode == 2
    assert flow.stdout.splitlines()[-1] == (
        f"error: {ROOT / 'conf/gpt2-tiny.yaml'}: train.train_iters is 'x': give an integer (in an "
        "override)"
    )
    # it was refused before a temporary server started
    assert len(flow.stdout.splitlines()) == 1


def test_end_waits_until_the_server_has_stored_the_ended_task_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored, requests = [0, 0, 1, 2, 2], list[tuple[str, str | None, dict[str, Any]]]()

    class Counts(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, self.headers["Authorization"], body))
            answer = b"%d" % stored[len(requests) - 1] if len(requests) < 6 else b"broken"
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    monkeypatch.setattr(TemporaryServer, "_instance", None)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "megacore:word")
    listener = ThreadingHTTPServer(("127.0.0.1", 0), Counts)
    server = TemporaryServer()
    server.port = listener.server_port
    with listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        server.wait_for_records({"b", "a"}, time.monotonic() + HANG)
        assert len(requests) == 4
        path, login, body = requests[0]
        assert (path, login) == ("/api/task_runs/count", "Basic bWVnYWNvcmU6d29yZA==")
        assert body["task_runs"]["id"] == {"any_": ["a", "b"]}
        assert "COMPLETED" in body["task_runs"]["state"]["type"]["any_"]
        server.wait_for_records({"a", "b", "c"}, time.monotonic())
        assert len(requests) == 4, "the time is over"
        server.wait_for_records({"a", "b", "c"}, time.monotonic() + HANG)
        assert len(requests) == 6, "the server does not answer with a number"
        listener.shutdown()
    server.wait_for_records({"a"}, time.monotonic() + HANG)  # and it is gone


HUNG_UP = """
import os, signal, sys
from tasks import _cli
signal.signal(signal.SIGHUP, _cli._raise_hung_up)
try:
    os.kill(os.getpid(), signal.SIGHUP)
except _cli.TerminatedError as end:
    os.kill(os.getpid(), signal.SIGHUP)
    sys.stderr.write("lost")
    print(end.signal.name, os.readlink("/proc/self/fd/2"))
"""


def test_flow_of_a_closed_terminal_ends_once_and_writes_nothing_to_it() -> None:
    master, slave = pty.openpty()
    flow = subprocess.Popen(
        [sys.executable, "-c", HUNG_UP], cwd=ROOT, stdout=subprocess.PIPE, stderr=slave
    )
    os.close(slave)
    os.close(master)
    output, _ = flow.communicate(timeout=HANG)
    assert (flow.returncode, output) == (0, b"SIGHUP /dev/null\n")


class FailingServer:
    """A server that prints an error of its database, as Prefect does, and ends."""

    def _run_uvicorn_command(self) -> "subprocess.Popen[bytes]":
        text = (
            "12:00:00.000 | ERROR   | uvicorn.error - Traceback (most recent call last):\n"
            "  File somewhere\nsqlite3.OperationalError: database or disk is full\n"
            "12:00:00.001 | WARNING | prefect - something else\n"
        )
        return subprocess.Popen(["printf", "%s", text], stdout=2)


def test_error_of_prefects_database_is_one_sentence_and_not_retried(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_temporary_server, "_GRACE", HANG)
    server, output = FailingServer(), _ServerOutput()
    output.watch(server, tmp_path / "prefect.db")
    server._run_uvicorn_command().wait()
    message = r"cannot write its database .*prefect\.db: database or disk is full; .* are free in "
    with pytest.raises(WorkspaceError, match=message):
        server._run_uvicorn_command()
    assert capfd.readouterr().err == "12:00:00.001 | WARNING | prefect - something else\n"


LOCKED = (
    b"12:00:00.000 | ERROR   | prefect.server.utilities.messaging.memory - Failed in consume_loop\n"
    b"Traceback ...\nsqlite3.OperationalError: database is locked\n"
)
FULL = b"ERROR - Traceback ...\nsqlite3.OperationalError: database or disk is full\n"
OTHER = b"ERROR - Traceback ...\nKeyError: 3\n"


def test_problem_of_the_database_is_forgotten_and_hides_no_other_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(_temporary_server, "time", SimpleNamespace(monotonic=lambda: now))
    output = _ServerOutput()
    monkeypatch.setattr(_temporary_server, "_server_output", output)
    output.started = True

    def shown(record: bytes) -> str:
        output._write(record, tmp_path / "prefect.db")
        return capfd.readouterr().err

    assert shown(OTHER) == OTHER.decode()
    assert shown(LOCKED) == "", "Prefect tries it again"
    assert database_problem() is None
    assert shown(FULL).startswith("warning: Prefect cannot write its database ")
    assert shown(OTHER) == shown(FULL) == "", "a result of the first, and a repetition"
    now += 2
    assert shown(OTHER) == OTHER.decode()
    assert "database or disk is full" in str(database_problem())
    now += 10
    assert database_problem() is None, "there may be space again"
    assert shown(FULL).startswith("warning: ")


def test_server_that_is_killed_now_and_then_is_always_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = SimpleNamespace(poll=lambda: 1)
    started: list[SimpleNamespace] = []

    class Server:
        server_process: SimpleNamespace | None = ended

        def _run_uvicorn_command(self) -> SimpleNamespace | None:
            started.append(ended)
            return ended if len(started) < 10 else None

    monkeypatch.setattr(_temporary_server, "_STEADY", -1.0)  # each has run for long
    _temporary_server._keep(Server())
    assert len(started) == 10
    started.clear()
    monkeypatch.setattr(_temporary_server, "_STEADY", 60.0)
    with caplog.at_level(logging.WARNING, "prefect"):
        _temporary_server._keep(Server())
    assert len(started) == _temporary_server.RESTARTS
    assert "not started again" in caplog.text
