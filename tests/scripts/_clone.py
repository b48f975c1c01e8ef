"""A copy of the files that `make server` needs, with a separate workspace and ports."""

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

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

    def command(
        self, *arguments: str, timeout: float = 200, **variables: str
    ) -> subprocess.CompletedProcess[str]:
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
            arguments, cwd=self.root, env=env, capture_output=True, text=True, timeout=timeout
        )

    def servers(self, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.command(sys.executable, "scripts/servers.py", command, **variables)

    def prefect(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.command(sys.executable, "-m", "prefect", *arguments, **variables)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.workspace / "servers.json").read_text())
        return state

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


def get(url: str) -> str:
    """Return the text at a URL."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())
