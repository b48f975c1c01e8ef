"""Prefect's and MLflow's servers, started like in `make server`, to be killed and restarted."""

import contextlib
import os
import secrets
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megacore.artifact import Workspace
from tests._limits import HANG
from tests.faults._cases import free_port
from tests.faults._processes import ROOT

sys.path.insert(0, str(ROOT / "scripts"))  # scripts import each other by these names

from _processes import Started, end, family, spawn
from servers import _mlflow_command

HOST = "127.0.0.1"
QUIET = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
}


@dataclass
class Server:
    """A server on a separate port; a restart keeps the port and the store."""

    name: str
    command: list[str]
    health: str
    environment: dict[str, str]
    log: Path
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    started: Started | None = None

    def start(self) -> None:
        """Start the server; `wait` returns when it answers."""
        environment = {**os.environ, **QUIET, **self.environment}
        self.started = spawn(
            self.name, self.command, token=self.token, env=environment, cwd=ROOT, log=self.log
        )

    def wait(self) -> None:
        """Wait until the server answers."""
        deadline = time.monotonic() + HANG
        while not self.answers():
            text = self.log.read_text(encoding="utf-8", errors="replace")[-2000:]
            assert self.started is not None
            assert self.started.process() is not None, f"{self.name} ended: {text}"
            assert time.monotonic() < deadline, f"{self.name} does not answer: {text}"
            time.sleep(0.1)

    def answers(self) -> bool:
        """Return True if the server answers."""
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(self.health, timeout=HANG) as answer,
        ):
            return bool(answer.status == 200)
        return False

    def kill(self) -> None:
        """Send SIGKILL to all processes of the server."""
        while members := family(self.token, self.name, self.started):
            for process in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.02)

    def stop(self) -> None:
        """End the server regularly."""
        end(self.token, self.name, self.started, 5.0)


def mlflow_server(workspace: Path, directory: Path) -> Server:
    """Return MLflow's server on the workspace's store."""
    port = free_port()
    command = _mlflow_command(Workspace(workspace), port)
    users = command.index("--app-name")
    del command[users : users + 2]  # tests/scripts logs in
    return Server("mlflow", command, f"http://{HOST}:{port}/health", {}, directory / "mlflow.log")


def prefect_server(home: Path, directory: Path) -> Server:
    """Return Prefect's server with its database below `home`."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        HOST,
        "--port",
        str(port),
    ]
    environment = {"PREFECT_HOME": str(home), "PREFECT_API_URL": f"http://{HOST}:{port}/api"}
    return Server(
        "prefect",
        command,
        f"http://{HOST}:{port}/api/health",
        environment,
        directory / "prefect.log",
    )


def address(server: Server) -> str:
    """Return the server's URL without a path."""
    return "/".join(server.health.split("/")[:3])


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Start the server, yield it, and kill it at the end of the block."""
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.kill()
