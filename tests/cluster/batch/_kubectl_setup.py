"""Installation of the kubectl stand-in on PATH."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests._limits import HANG

STAND_IN = Path(__file__).with_name("_kubectl.py")


def install(programs: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the stand-in as `kubectl` for the cluster in a directory."""
    programs.mkdir()
    kubectl = programs / "kubectl"
    kubectl.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN}" "{cluster}" "$@"\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")


@contextlib.contextmanager
def serving(cluster: Path) -> Iterator[None]:
    """Run the cluster as a separate process, outside the followed run."""
    server = subprocess.Popen([sys.executable, str(STAND_IN), str(cluster), "serve"])
    try:
        yield
    finally:
        (cluster / "stop").touch()
        server.wait(timeout=HANG)
        run(cluster, "delete", "jobsets", "any")


def run(cluster: Path, *words: str) -> None:
    """Run one kubectl command."""
    subprocess.run([sys.executable, str(STAND_IN), str(cluster), *words], check=True, timeout=HANG)
