"""A copy of the files that `make server` needs, with a separate workspace and ports."""

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psutil
import yaml

from tests._limits import HANG

ROOT = Path(__file__).resolve().parents[2]

PROBE = """
import json, os, subprocess
from pathlib import Path
from typing import Any
from prefect import flow

@flow(name="probe")
def probe(
    conf: str = "gpt2-tiny", overrides: dict[str, Any] | None = None, wait: bool = False
) -> None:
    child = subprocess.Popen(["sleep", "300"], start_new_session=True) if wait else None
    facts = {"cwd": os.getcwd(), "env": dict(os.environ), "child": child and child.pid}
    target = Path(os.environ["MEGACORE_WORKSPACE"], "probe.json")
    target.with_suffix(".tmp").write_text(json.dumps(facts))
    target.with_suffix(".tmp").rename(target)
    if child:
        child.wait()
"""


class Clone:
    """A copy of the files that the servers need, with its workspace and its two ports."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.workspace = root / "workspace"
        for name in ("conf", "flows", "tasks", "scripts"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text(encoding="utf-8"))
        probe = {
            **deployments["definitions"]["base"],
            "name": "env",
            "entrypoint": "flows/probe.py:probe",
        }
        deployments["deployments"].append(probe)
        (root / "prefect.yaml").write_text(yaml.safe_dump(deployments), encoding="utf-8")
        (root / "flows" / "probe.py").write_text(PROBE, encoding="utf-8")
        self.ports = free_ports(2)

    def deploy_only(self, *names: str) -> None:
        """Leave only these deployments in prefect.yaml; creating all takes half a minute."""
        path = self.root / "prefect.yaml"
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        values["deployments"] = [each for each in values["deployments"] if each["name"] in names]
        assert {each["name"] for each in values["deployments"]} == {*names}
        path.write_text(yaml.safe_dump(values), encoding="utf-8")

    def command(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        inherited = {
            name: os.environ[name]
            for name in ("PATH", "LANG", "LD_LIBRARY_PATH")
            if name in os.environ
        }
        env = {
            **inherited,
            "HOME": str(self.root / "home"),
            "PYTHONPATH": str(ROOT),
            "MEGACORE_WORKSPACE": str(self.workspace),
            "PREFECT_PORT": str(self.ports[0]),
            "MLFLOW_PORT": str(self.ports[1]),
            **variables,
        }
        return subprocess.run(
            arguments, cwd=self.root, env=env, capture_output=True, text=True, timeout=2 * HANG
        )

    def servers(self, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.command(sys.executable, "scripts/servers.py", command, **variables)

    def prefect(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.command(sys.executable, "-m", "prefect", *arguments, **variables)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.workspace / "servers.json").read_text())
        return state

    @property
    def password_file(self) -> Path:
        """File with the generated password of the servers."""
        return self.workspace / "servers.password"

    @property
    def login(self) -> str:
        """Generated `name:password` of the servers."""
        return self.password_file.read_text(encoding="utf-8").strip()

    def left_over(self, token: str) -> list[int]:
        """Return the ids of all processes that inherited the token of a start."""
        pids = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("MEGACORE_SERVERS", "").startswith(token):
                    pids.append(process.pid)
        return pids


def free_ports(count: int) -> list[int]:
    """Return free TCP ports of the loopback interface."""
    sockets = [socket.socket() for _ in range(count)]
    for probe in sockets:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in sockets]
    for probe in sockets:
        probe.close()
    return ports


def ask(
    url: str,
    body: Any = None,
    login: str | None = None,
    *,
    method: str | None = None,
    **headers: str,
) -> tuple[int, str]:
    """Return status and text of the answer to a GET, or a POST or `method` of `body` as JSON.

    As clients of Prefect do, repeat a request that is answered by 503: its SQLite is locked
    while another request or one of its services writes.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, method=method)
    request.add_header("content-type", "application/json")
    if login:
        request.add_header("authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    for name, value in headers.items():
        request.add_header(name, value)
    deadline = time.monotonic() + HANG
    while True:
        try:
            with urllib.request.urlopen(request, timeout=HANG) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as refused:
            if refused.code != 503 or time.monotonic() > deadline:
                return refused.code, refused.read().decode()
            time.sleep(0.2)


def get(url: str, login: str | None = None) -> str:
    """Return the text at a URL."""
    status, text = ask(url, login=login)
    assert status == 200, (url, status, text)
    return text
