"""Start, restart and end of the temporary Prefect server, and the end of the flow's process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megacore.errors import WorkspaceError
from tasks import _orphans
from tasks._orphans import MARK, _ServerOutput, database_problem, servers

ROOT = Path(__file__).parents[2]
FLOW = """
import subprocess, sys, time
from tasks._orphans import watch_over_server
watch_over_server()
# A process that looks like the server, and one that does not.
for name in ("prefect.server.api.server:create_app", "another"):
    sleep = [sys.executable, "-c", "import time; time.sleep(60)", name]
    subprocess.Popen(sleep, start_new_session=True)
print("started", flush=True)
time.sleep(60)
"""


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
    deadline = time.monotonic() + 30
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
        return b"tasks._orphans" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


SERVED_FLOW = """
import os, sys
from tasks._environment import answers
from tasks._orphans import TemporaryServer, start_server
start_server()
url = TemporaryServer().api_url
try:
    print("started", flush=True)
    sys.stdin.read()
except KeyboardInterrupt:
    print(answers(f"{url}/health"), flush=True)
"""


@pytest.mark.slow
def test_temporary_server_answers_after_ctrl_c(tmp_path: Path) -> None:
    flow = subprocess.Popen(
        [sys.executable, "-c", SERVED_FLOW],
        cwd=ROOT,
        env={**os.environ, "PREFECT_HOME": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert flow.stdin is not None
    assert flow.stdout is not None
    assert flow.stdout.readline() == b"started\n"
    os.killpg(flow.pid, signal.SIGINT)
    output, _ = flow.communicate(timeout=60)
    assert output == b"True\n"
    with pytest.raises(ProcessLookupError):
        os.killpg(flow.pid, 0)


UNSENT_EVENT = """
import sys
from prefect.events import emit_event
from tasks import _orphans
_orphans.FLUSH = 0.5
emit_event("test", resource={"prefect.resource.id": "test"})
print("first line", file=sys.stderr)
_orphans.end_process("last line", CODE)
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
        timeout=60,
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
from tasks._orphans import TemporaryServer, end_process, start_server
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
        env={**os.environ, "PREFECT_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
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
        timeout=120,
        check=False,
    )
    assert flow.returncode == 2
    assert flow.stdout.splitlines()[-1] == (
        f"error: {ROOT / 'conf/gpt2-tiny.yaml'}: train.train_iters is 'x': give an integer"
    )


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
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server, output = FailingServer(), _ServerOutput()
    output.watch(server, tmp_path / "prefect.db")
    server._run_uvicorn_command().wait()
    message = r"cannot write its database .*prefect\.db: database or disk is full; .* are free in "
    with pytest.raises(WorkspaceError, match=message):
        server._run_uvicorn_command()
    assert capfd.readouterr().err == "12:00:00.001 | WARNING | prefect - something else\n"


FULL = b"ERROR - Traceback ...\nsqlite3.OperationalError: database or disk is full\n"
OTHER = b"ERROR - Traceback ...\nKeyError: 3\n"


def test_problem_of_the_database_is_forgotten_and_hides_no_other_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(_orphans, "time", SimpleNamespace(monotonic=lambda: now))
    output = _ServerOutput()
    monkeypatch.setattr(_orphans, "_server_output", output)
    output.started = True

    def shown(record: bytes) -> str:
        output._write(record, tmp_path / "prefect.db")
        return capfd.readouterr().err

    assert shown(OTHER) == OTHER.decode()
    assert database_problem() is None
    assert shown(FULL).startswith("warning: Prefect cannot write its database ")
    assert shown(OTHER) == shown(FULL) == "", "a result of the first, and a repetition"
    now += 2
    assert shown(OTHER) == OTHER.decode()
    assert "database or disk is full" in str(database_problem())
    now += 10
    assert database_problem() is None, "there may be space again"
    assert shown(FULL).startswith("warning: ")
