"""Start and end of server processes, which are identified by an inherited token."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from megacore.errors import LaunchError
from tests._limits import HANG
from tests.launch._processes import wait_until

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TOKEN = f"test-{os.getpid()}"

ESCAPE_SCRIPT = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
time.sleep(600)
"""


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import _processes

    return _processes


@pytest.fixture
def spawn(processes: ModuleType, tmp_path: Path) -> Iterator[Callable[..., object]]:
    def start(*command: str, name: str = "helper") -> object:
        return processes.spawn(
            name,
            list(command),
            token=TOKEN,
            env=dict(os.environ),
            cwd=tmp_path,
            log=tmp_path / f"{name}.log",
        )

    yield start
    for name in ("helper", "other"):
        processes.end(TOKEN, name, None, 0.1)


def test_end_includes_descendants_in_other_sessions(
    processes: ModuleType, spawn: Callable[..., object], tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    started = spawn(sys.executable, "-c", ESCAPE_SCRIPT, str(pid_file))
    wait_until(
        lambda: pid_file.exists() and pid_file.read_text() != "", HANG, "the hidden process started"
    )
    hidden = psutil.Process(int(pid_file.read_text()))
    assert hidden.ppid() != started.pid  # type: ignore[attr-defined]
    assert processes.end(TOKEN, "helper", started, grace=0.5) >= 2
    assert not hidden.is_running() or hidden.status() == psutil.STATUS_ZOMBIE
    assert processes.family(TOKEN, "helper", started) == []


def test_end_spares_processes_of_other_names(
    processes: ModuleType, spawn: Callable[..., object]
) -> None:
    other = spawn("sleep", "600", name="other")
    processes.end(TOKEN, "helper", spawn("sleep", "600"), grace=5.0)
    assert other.process() is not None  # type: ignore[attr-defined]


def test_end_spares_a_reused_process_id(processes: ModuleType) -> None:
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        created = psutil.Process(bystander.pid).create_time()
        remembered = processes.Started("helper", bystander.pid, created, "log")
        assert remembered.process() is not None
        earlier = replace(remembered, created=created - 3600)
        assert earlier.process() is None
        assert processes.end(TOKEN, "helper", earlier, grace=0.1) == 0
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_output_is_logged_and_stdin_is_closed(
    processes: ModuleType, spawn: Callable[..., object], tmp_path: Path
) -> None:
    started = spawn("sh", "-c", "cat; echo out; echo err >&2")
    wait_until(lambda: started.process() is None, HANG, "the command ended")  # type: ignore[attr-defined]
    assert (tmp_path / "helper.log").read_text().split() == ["out", "err"]


def test_port_in_use_is_reported_with_its_process(processes: ModuleType) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        listener.listen()
        with pytest.raises(LaunchError) as caught:
            processes.require_free_port(port, "the Prefect server", "PREFECT_PORT")
    message = str(caught.value)
    assert f"port {port} for the Prefect server" in message
    assert f"process {os.getpid()} (" in message
    assert f"make server PREFECT_PORT={port + 1}" in message
    processes.require_free_port(port, "the Prefect server", "PREFECT_PORT")


@pytest.mark.parametrize("prints", [True, False])
def test_a_slow_deployment_is_awaited_as_long_as_its_log_grows(
    monkeypatch: pytest.MonkeyPatch, processes: ModuleType, tmp_path: Path, prints: bool
) -> None:
    import servers

    log = tmp_path / "deploy.log"
    log.write_text("first\n")
    started = processes.Started("deploy", 1, 0.0, str(log))

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += 100
            if prints:
                log.write_text(f"{log.read_text()}deploying\n")

    clock = Clock()
    monkeypatch.setattr(servers, "time", clock)
    system = SimpleNamespace(
        WNOHANG=os.WNOHANG,
        waitpid=lambda pid, flags: (pid if clock.now > 1000 else 0, 0),
        waitstatus_to_exitcode=os.waitstatus_to_exitcode,
    )
    monkeypatch.setattr(servers, "os", system)
    if prints:
        servers._wait_ended(started)
        return
    with pytest.raises(LaunchError, match=r"has printed nothing new after 300 s: first \(log: "):
        servers._wait_ended(started)
